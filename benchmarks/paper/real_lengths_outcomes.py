"""Schedules planned with a tenth of a trace, and the rest of it served by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from exegpt.report.units import ratio_of
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.scheduler.solution import Solution
from exegpt.scheduler.solve import solve
from exegpt.specs import Policy
from exegpt.workload.lengths import RequestLengths, clip_outputs, joint
from paper.drift_rows import bound_on
from paper.real_lengths_data import Split
from paper.real_lengths_replay import Replayed, replay_best
from paper.scenarios import PUBLISHED, RRA, WAA, Scenario, problem

MODELS = ("opt-13b", "gpt3-39b")
# What the two models are compared on: the tasks of figure 6, and the bounds taken here.
SYNTHETIC = ("S", "T", "C1")
TWO_BOUNDS = ("medium", "none")
OURS = ("RRA", "WAA")
# Greatest output over the mean output of the paper's tasks.
SYNTHETIC_TAIL = 2.5
# Tokens; the mean inputs of WMT and Alpaca are 30 to 45.
SHORT_INPUT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trace on a model under a bound.

    `best` and `replayed` are by RRA, WAA (the better of WAA_C and WAA_M) and STATIC, where they have a
    schedule; outputs stop at the longest that was planned. `unlimited` is STATIC where they do not.
    `expected_s` is the closed form's latency of the bound's query amid the lengths served, `least_waa_s` the
    least planned latency of WAA, where it does not meet the bound.
    """

    split: Split
    model: str
    bound: str
    bound_s: float
    best: Mapping[str, Best]
    replayed: Mapping[str, Replayed]
    expected_s: Mapping[str, float]
    unlimited: Replayed
    least_waa_s: float | None

    @property
    def winner(self) -> str:
        """RRA or WAA, whichever serves more."""
        return max(self.ours, key=lambda name: self.replayed[name].throughput_per_s)

    @property
    def ours(self) -> list[str]:
        """RRA and WAA, those of them with a schedule."""
        return [name for name in OURS if name in self.best]

    @property
    def gain(self) -> float:
        """Replayed throughput of what was planned to be the better of RRA and WAA over STATIC's."""
        return self.replayed[self.chosen].throughput_per_s / self.replayed["STATIC"].throughput_per_s

    @property
    def planned_gain(self) -> float:
        """The same as planned."""
        return self.best[self.chosen].throughput_per_s / self.best["STATIC"].throughput_per_s

    @property
    def unlimited_gain(self) -> float:
        """The gain where outputs are not stopped: STATIC's batches run until their longest ends."""
        return self.replayed[self.chosen].throughput_per_s / self.unlimited.throughput_per_s

    @property
    def chosen(self) -> str:
        """RRA or WAA, whichever is planned to serve more."""
        return max(self.ours, key=lambda name: self.best[name].throughput_per_s)


def real_problem(lengths: RequestLengths, model: str, bound: str) -> Problem:
    """The planning problem of a model's experiment with other lengths."""
    base = problem(Scenario(experiment=model, task="S", bound=bound), PUBLISHED)
    return replace(base, lengths=lengths, baselines=(Policy.STATIC,))


def best_by_name(solution: Solution) -> dict[str, Best]:
    """The best schedule of RRA, WAA and STATIC, where there is one."""
    results = {**solution.policies, **solution.baselines}
    groups = {"RRA": RRA, "WAA": WAA, "STATIC": (Policy.STATIC,)}
    found = {name: [b for p in group if (b := results[p].best) is not None] for name, group in groups.items()}
    return {name: max(some, key=lambda b: b.throughput_per_s) for name, some in found.items() if some}


def outcome(split: Split, model: str, bound: str) -> Outcome:
    """Plan with a part of the trace, and replay the rest."""
    given = real_problem(split.planned, model, bound)
    solution = solve(given)
    bound_s, best = solution.bound.latency_s, best_by_name(solution)
    served = clip_outputs(split.served, split.planned.max_output)
    wanted = split.planned.output_percentile(given.bound.length_percentile)
    amid = bound_on(replace(given, lengths=served), wanted)
    return Outcome(
        split=split,
        model=model,
        bound=bound,
        bound_s=bound_s,
        best=best,
        replayed={name: replay_best(given, b, served, bound_s) for name, b in best.items()},
        expected_s={
            name: float(amid.estimate(b.choice, np.array([b.batch]), np.array([b.extent])).latency_s[0])
            for name, b in best.items()
            if name in OURS
        },
        unlimited=replay_best(given, best["STATIC"], split.served, bound_s),
        least_waa_s=None
        if "WAA" in best
        else min(solution.policies[p].closest.get("latency_s", np.inf) for p in WAA),
    )


def planned_gain(given: Problem) -> float | None:
    """Throughput of the paper's policies over STATIC's, as planned; None if either has no schedule."""
    best = best_by_name(solve(replace(given, baselines=(Policy.STATIC,))))
    ours = max((best[name].throughput_per_s for name in OURS if name in best), default=None)
    return ratio_of(ours, best["STATIC"].throughput_per_s if "STATIC" in best else None)


def mean_planned_gain(problems: Sequence[Problem], done: Callable[[], None]) -> float:
    """Mean of the gains as planned."""
    gains = []
    for given in problems:
        gains.append(planned_gain(given))
        done()
    return fmean(g for g in gains if g is not None)


def synthetic_problems() -> list[Problem]:
    """The same models under the same bounds on the paper's tasks."""
    return [
        problem(Scenario(experiment=model, task=task, bound=bound), PUBLISHED)
        for model in MODELS
        for task in SYNTHETIC
        for bound in TWO_BOUNDS
    ]


def short_tailed_problems(splits: Sequence[Split]) -> list[Problem]:
    """The traces with outputs stopped at the multiple of their mean that the paper's tasks end at."""
    return [
        real_problem(without_tail(split.planned), model, bound)
        for split in splits
        for model in MODELS
        for bound in TWO_BOUNDS
    ]


def short_input_problems(split: Split) -> list[Problem]:
    """A trace with all inputs as short as those of the others."""
    assert split.planned.pairs is not None
    pairs = split.planned.pairs.copy()
    pairs[:, 0] = SHORT_INPUT
    return [real_problem(joint(pairs), model, bound) for model in MODELS for bound in TWO_BOUNDS]


def without_tail(lengths: RequestLengths) -> RequestLengths:
    """Outputs stopped at `SYNTHETIC_TAIL` times their mean."""
    return clip_outputs(lengths, round(SYNTHETIC_TAIL * lengths.mean_output))


def tail(lengths: RequestLengths) -> float:
    """The greatest output over the mean."""
    return lengths.max_output / lengths.mean_output
