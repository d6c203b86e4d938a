"""Compares the closed forms with event-driven replay, over all policies.

    python benchmarks/agreement.py                      writes docs/agreement.md and docs/agreement.png
    python benchmarks/agreement.py --policies RRA WAA --drawn 5 --out outputs/agreement.md

Schedules are the solver's best of each policy and some drawn at random from its search space. Leaves with 1
if any schedule is beyond the goal.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from agree.cases import POLICIES, SETTINGS, Case, make_cases
from agree.measure import Agreement, compare
from agree.report import by_policy, is_within, plot, write_page
from rich.console import Console
from rich.progress import Progress

from exegpt.specs import Policy

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> int:
    """Parse, compare, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [p.value for p in POLICIES]
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument("--drawn", type=int, default=2, help="random schedules of a policy in a setting")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of samples of each schedule, from 2 on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of schedules")
    parser.add_argument("--out", type=Path, default=DOCS / "agreement.md")
    args = parser.parse_args()
    if args.pairs < 2 or args.drawn < 0:
        parser.error(
            f"--pairs {args.pairs} --drawn {args.drawn}: at least 2 pairs (for a standard error) and 0 drawn"
        )
    started = time.perf_counter()
    console = Console()
    results = compare_all(
        [Policy[name] for name in args.policies], args.drawn, args.pairs, args.seed, args.jobs, console
    )
    command = " ".join(["python", "benchmarks/agreement.py", *sys.argv[1:]])
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    write_page(
        results,
        args.out,
        command=command,
        machine=machine,
        wall_s=time.perf_counter() - started,
        num_pairs=args.pairs,
    )
    plot(results, args.out.with_suffix(".png"))
    console.print("\n".join(by_policy(results)), markup=False, soft_wrap=True)
    return 0 if all(map(is_within, results)) else 1


def compare_all(
    policies: Sequence[Policy], num_drawn: int, num_pairs: int, seed: int, num_jobs: int, console: Console
) -> list[Agreement]:
    """Every policy in every setting; what is beyond the goal is told at once."""
    cases: list[Case] = []
    results: list[Agreement] = []
    with Progress(console=console) as progress:
        task = progress.add_task("solving", total=len(policies) * len(SETTINGS))
        for policy in policies:
            for setting in SETTINGS:
                cases += make_cases(setting, policy, num_drawn, seed)
                progress.advance(task)
        task = progress.add_task("replaying", total=len(cases))
        with ProcessPoolExecutor(num_jobs) as pool:
            for result in pool.map(partial(compare, num_pairs=num_pairs), cases):
                results.append(result)
                progress.advance(task)
                if not is_within(result):
                    progress.console.print(told(result), markup=False, soft_wrap=True)
    return results


def told(result: Agreement) -> str:
    """A result in a line."""
    case = result.case
    return (
        f"{case.policy.value}, {case.setting}: {case.knobs}: throughput {result.throughput_error:+.2%}, "
        f"latency {result.latency_error:+.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
