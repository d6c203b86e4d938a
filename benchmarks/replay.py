"""Times replays: 2,000 requests of task T on GPT-3 175B and 16 A100, each policy's best schedule.

    python benchmarks/replay.py
    python benchmarks/replay.py --requests 10000 --policies RRA WAA

Goal: 2,000 requests in under 2 s on one core. Leaves with 1 if a policy takes longer, in proportion.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from agree.cases import POLICIES, Case, Setting, make_cases
from agree.measure import deployment
from rich.console import Console
from rich.progress import track
from rich.table import Table

from exegpt.simulator.replay_schedule import replay_schedule
from exegpt.specs import Policy
from exegpt.workload.requests import sample_requests

SETTING = Setting(
    name="GPT-3 175B, 16 A100, T, none",
    overrides=("experiment=paper/gpt3-175b-a100", "workload=translation"),
    quantile=None,
)
GOAL_S_PER_REQUEST = 2 / 2000


def main() -> int:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [p.value for p in POLICIES]
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    console = Console()
    table = Table(title=f"replay of {args.requests} requests, {SETTING.name}")
    for column in ("policy", "schedule", "seconds", "tokens per s"):
        table.add_column(column, justify="left" if column in ("policy", "schedule") else "right")
    slow = False
    for name in track(args.policies, description="replaying", console=console, transient=True):
        cases = make_cases(SETTING, Policy[name], 0, 0)
        if not cases:
            table.add_row(name, "no schedule", "-", "-")
            continue
        wall_s, num_tokens = time_replay(cases[0], args.requests)
        slow |= wall_s > GOAL_S_PER_REQUEST * args.requests
        table.add_row(name, cases[0].knobs, f"{wall_s:.2f}", f"{num_tokens / wall_s:,.0f}")
    console.print(table)
    return int(slow)


def time_replay(case: Case, num_requests: int) -> tuple[float, int]:
    """Seconds, and output tokens."""
    requests = sample_requests(case.problem.lengths, num_requests, np.random.default_rng(0))
    started = time.perf_counter()
    result = replay_schedule(case.schedule, deployment(case), requests)
    wall_s = time.perf_counter() - started
    return wall_s, sum(record.output_tokens for record in result.records)


if __name__ == "__main__":
    sys.exit(main())
