"""Checks every figure of the paper that planning can check, and writes docs/reproduction.md.

    python benchmarks/reproduce.py                      all sections; writes docs/reproduction.md
    python benchmarks/reproduce.py --only drift         some sections; writes outputs/reproduction/report.md

Real lengths and traces are read from EXEGPT_DATA (../shared/data if unset). No GPU is needed: profiles are
analytic, and requests are replayed.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from paper import case_study, drift, gains, memory_split, monotonicity, peers, real_lengths, search_times
from paper.outcomes import Outcome, solve_all
from paper.report import Place, Section, page
from paper.scenarios import scenarios
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]

Maker = Callable[[Place, Console], Section]


@cache
def outcomes(console: Console) -> Sequence[Outcome]:
    """All scenarios, solved once for the sections that need them."""
    return solve_all(scenarios(), console)


SECTIONS: dict[str, Maker] = {
    "gains": lambda place, console: gains.section(outcomes(console), place, console),
    "search_times": lambda place, console: search_times.section(outcomes(console)),
    "peers": lambda place, console: peers.section(outcomes(console), place, console),
    "memory_split": memory_split.section,
    "case_study": case_study.section,
    "monotonicity": monotonicity.section,
    "real_lengths": real_lengths.section,
    "drift": drift.section,
}


def main() -> None:
    """Parse, make the sections, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS)
    )
    args = parser.parse_args()
    console = Console(stderr=True)
    path = ROOT / ("outputs/reproduction/report.md" if args.only else "docs/reproduction.md")
    name = "plots" if args.only else "reproduction"
    command = " ".join(["python", "benchmarks/reproduce.py", *(["--only", *args.only] if args.only else [])])
    started = time.perf_counter()
    sections = make(args.only or list(SECTIONS), Place(path.parent / name, name), console)
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(sections, command=command, machine=machine, wall_s=time.perf_counter() - started))
    console.print(f"written: {path}", soft_wrap=True)


def make(names: Sequence[str], place: Place, console: Console) -> list[Section]:
    """The sections named, one after the other, each told with its time."""
    made = []
    for i, name in enumerate(names, 1):
        started = time.perf_counter()
        made.append(SECTIONS[name](place, console))
        console.print(f"{i}/{len(names)} {name}: {time.perf_counter() - started:.0f} s")
    return made


if __name__ == "__main__":
    main()
