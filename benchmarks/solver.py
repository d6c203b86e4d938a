"""Times the solver over the paper's scenarios, policy by policy.

    python benchmarks/solver.py
    python benchmarks/solver.py --policies RRA WAA --experiments opt-13b

Prints space sizes, evaluations, evaluations per second, median and worst time of a solve. Building profiles
and composing configurations is not in the times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from paper.scenarios import PUBLISHED, Policy, Scenario, problem, scenarios
from rich.console import Console
from rich.progress import track
from rich.table import Table

from exegpt.errors import ExeGPTError
from exegpt.scheduler.solve import solve


@dataclass(frozen=True, slots=True)
class Timing:
    """One solve; `gap` is None where nothing is feasible."""

    scenario: Scenario
    wall_s: float
    space_size: int
    num_evaluations: int
    gap: float | None


def main() -> None:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [p.value for p in Policy]
    parser.add_argument("--policies", nargs="+", choices=names, default=[p.value for p in PUBLISHED])
    parser.add_argument("--experiments", nargs="+", help="files of conf/experiment/paper; default all")
    args = parser.parse_args()
    console = Console()
    chosen = [s for s in scenarios() if not args.experiments or s.experiment in args.experiments]
    if not chosen:
        known = sorted({s.experiment for s in scenarios()})
        parser.error(f"--experiments {' '.join(args.experiments)}: none is known; known: {' '.join(known)}")
    for name in args.policies:
        timings = time_policy(Policy[name], chosen, console)
        if timings:
            console.print(summary(name, timings))


def time_policy(policy: Policy, chosen: Sequence[Scenario], console: Console) -> list[Timing]:
    """A timing per scenario that the policy can be planned for."""
    timings = []
    for scenario in track(chosen, description=policy.value, transient=True):
        given = replace(problem(scenario, [policy]), baselines=(Policy.STATIC,))
        started = time.perf_counter()
        try:
            record = solve(given).record()
        except ExeGPTError as error:
            console.print(f"{scenario}: {error}", style="yellow")
            continue
        wall_s = time.perf_counter() - started
        timings.append(
            Timing(scenario, wall_s, record["space_size"], record["num_evaluations"], record["gap"])
        )
    return timings


def summary(name: str, timings: Sequence[Timing]) -> Table:
    """A row per model and one of all."""
    table = Table(title=f"{name} with the static baseline")
    for column in ("model", "solves", "median s", "worst s", "worst", "space", "evaluated", "per s", "gap"):
        table.add_column(column, justify="left" if column in ("model", "worst") else "right")
    experiments = list(dict.fromkeys(t.scenario.experiment for t in timings))
    for experiment in [*experiments, None]:
        part = [t for t in timings if experiment in (None, t.scenario.experiment)]
        worst = max(part, key=lambda t: t.wall_s)
        evaluated, wall_s = sum(t.num_evaluations for t in part), sum(t.wall_s for t in part)
        gaps = [t.gap for t in part if t.gap is not None]
        table.add_row(
            experiment or "all",
            str(len(part)),
            f"{median(t.wall_s for t in part):.2f}",
            f"{worst.wall_s:.2f}",
            f"{worst.scenario.task} {worst.scenario.bound}",
            f"{max(t.space_size for t in part):,}",
            f"{evaluated:,}",
            f"{evaluated / wall_s:,.0f}",
            f"{max(gaps):.1%}" if gaps else "-",
        )
    return table


if __name__ == "__main__":
    main()
