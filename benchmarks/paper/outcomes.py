"""Every scenario of the paper solved once; what the sections of the report are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Console
from rich.progress import track

from exegpt.report.units import ratio_of
from exegpt.scheduler.solution import Solution
from exegpt.scheduler.solve import solve
from exegpt.specs import Policy
from paper.scenarios import PEERS, PUBLISHED, WAA, Scenario, problem


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scenario and its solutions.

    `solution` is of the paper's policies, with STATIC as the only baseline; `others` of what is not the
    paper's: WAA with a free split, and the later systems' policies.
    """

    scenario: Scenario
    solution: Solution
    others: Solution

    def throughput_per_s(self, policies: Sequence[Policy]) -> float | None:
        """The best of some policies, seq/s; None if none of them has a schedule."""
        results = {**self.others.policies, **self.solution.policies, **self.solution.baselines}
        found = [b.throughput_per_s for p in policies if p in results and (b := results[p].best) is not None]
        return max(found, default=None)

    def over_static(self, policies: Sequence[Policy]) -> float | None:
        """Throughput of the best of some policies over STATIC's; None if either has no schedule."""
        return ratio_of(self.throughput_per_s(policies), self.throughput_per_s([Policy.STATIC]))

    @property
    def gain(self) -> float | None:
        """The gain of the paper's policies."""
        return self.over_static(PUBLISHED)

    @property
    def winner(self) -> str | None:
        """RRA or WAA, as the paper counts them."""
        if self.solution.winner is None:
            return None
        return "WAA" if self.solution.winner in WAA else self.solution.winner.value


def solve_all(scenarios: Sequence[Scenario], console: Console) -> list[Outcome]:
    """Solve scenarios one after another."""
    outcomes = []
    for scenario in track(scenarios, description="scenarios", console=console, transient=True):
        solution = solve(replace(problem(scenario, PUBLISHED), baselines=(Policy.STATIC,)))
        others = replace(problem(scenario, (Policy.WAA, *PEERS)), baselines=(), bound=solution.bound)
        outcomes.append(Outcome(scenario, solution, solve(replace(others, bound_quantile=None))))
    return outcomes


def mean_gain(outcomes: Sequence[Outcome], policies: Sequence[Policy] = PUBLISHED) -> float:
    """Arithmetic mean of the gains over STATIC where both have a schedule."""
    return fmean(gain for o in outcomes if (gain := o.over_static(policies)) is not None)


def by_task(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes of each task."""
    return {
        task: [o for o in outcomes if o.scenario.task == task]
        for task in dict.fromkeys(o.scenario.task for o in outcomes)
    }
