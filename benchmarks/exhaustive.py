"""Compares branch and bound with the evaluation of every candidate, in full scenarios of the paper.

    python benchmarks/exhaustive.py                        OPT-13B on S with all four bounds, and on C1
    python benchmarks/exhaustive.py --scenarios "opt-13b T loose"

Evaluates 20 to 40 million schedules a scenario, which takes minutes to an hour each. Leaves with 1 if any
throughput differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from paper.scenarios import PUBLISHED, Scenario, problem, scenarios
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import SearchResult
from exegpt.scheduler.solve import solve
from exegpt.specs import Policy, SolverName

DEFAULT = [*(f"opt-13b S {bound}" for bound in ("tight", "medium", "loose", "none")), "opt-13b C1 medium"]


def main() -> int:
    """Parse, search both ways, print a line per scenario and policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {str(s): s for s in scenarios()}
    parser.add_argument("--scenarios", nargs="+", default=DEFAULT, metavar='"MODEL TASK BOUND"')
    args = parser.parse_args()
    unknown = [name for name in args.scenarios if name not in known]
    if unknown:
        parser.error(f"--scenarios {unknown}: not known; known are {list(known)}")
    console = Console()
    same = [compare(known[name], policy, console) for name in args.scenarios for policy in PUBLISHED]
    console.print(f"{sum(same)} of {len(same)} equal")
    return 0 if all(same) else 1


def compare(scenario: Scenario, policy: Policy, console: Console) -> bool:
    """Whether both ways find the same best throughput of a policy."""
    base = problem(scenario, [policy])
    # The bound in seconds, so that the static baseline is not searched again.
    bound = solve(base).bound
    given = replace(base, bound=bound, bound_quantile=None, baselines=())
    fast, fast_s = timed(given, policy)
    whole, whole_s = timed(replace(given, method=SolverName.exhaustive), policy, console)
    both = [r.best.throughput_per_s if r.best else None for r in (fast, whole)]
    verdict = "equal" if both[0] == both[1] else "DIFFERS"
    console.print(
        f"{scenario} {policy.value}: {both[0]} and {both[1]} seq/s, {verdict}; {fast.num_evaluations:,} in "
        f"{fast_s:.2f} s and {whole.num_evaluations:,} in {whole_s:.0f} s",
        soft_wrap=True,
    )
    return both[0] == both[1]


def timed(given: Problem, policy: Policy, console: Console | None = None) -> tuple[SearchResult, float]:
    """A policy's result, and the seconds it took; with a bar on the console."""
    started = time.perf_counter()
    if console is None:
        return solve(given).policies[policy], time.perf_counter() - started
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{policy.value}, all", total=None)
        result = solve(given, report=lambda done, size: progress.update(task, completed=done, total=size))
    return result.policies[policy], time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
