"""The comparison as a page in Markdown and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import matplotlib as mpl
import numpy as np

from agree.cases import POLICIES
from agree.measure import Agreement
from exegpt.specs import Policy

# What the closed form promises, relative to replay.
THROUGHPUT_TOLERANCE, LATENCY_TOLERANCE = 0.02, 0.03

INTRODUCTION = """# Closed form and replay

The solver searches closed forms of the steady state (`exegpt/simulator/steady.py`), while
`exegpt/simulator/replay*.py` follow a schedule event by event on the same profile, request by request. This
page says how far apart the two are.

    {command}

Made on {today} on {machine}, in {wall_s:.0f} s. Profiles are analytic; no GPU is needed.

## Method

- Schedules: the solver's best of each policy under the bound named, and others drawn at random from the
  same search space (partial tensor parallelism, replicas, micro-batches, split of the GPUs included) that
  fit in memory and reach 40 % of the best throughput. Nothing else is left out.
- Replay: {num_pairs} pairs of samples of requests for each schedule. The two samples of a pair are antithetic
  (quantile q in the one is 1 - q in the other), so that the mean of a pair varies little. The standard error
  is that of the means of the pairs.
- Throughput: queries whose encoding begins between two batches' starts, behind five generations of the pool
  (STATIC: one batch), and before the queue is empty.
- Latency: mean of the queries that begin and end in that time and have exactly the bound's length, the 99th
  percentile of the output lengths. Queries between the 98th and the 99.9th get that length, which changes
  the mean length by less than 0.1 %. The static policies compute on until the longest query of a batch ends,
  so theirs is the latency of the longest output.
- An error is closed form / replay - 1. Goal: {throughput:.0%} of throughput, {latency:.0%} of latency.

Not covered by the closed forms, and beyond the goal where it matters: two sides whose inflow and drain are
within a few per cent of each other, so that now the one and now the other limits; pools of fewer than two
encode batches, where it counts when a batch comes; and RRA at the limit of memory with many iterations a
cycle, whose admission keeps pages for the end of the cycle of queries that end before. With two random
schedules each (`--drawn 2`) there are such: RRA on GPT-3 175B at the limit of memory (b 404, N_D 122, m 14:
throughput +11.3 %, latency +4.9 %), and CHUNKED with 32 micro-batches of 12 slots over 16 stages (GPT-3 39B:
+9.2 %, -8.4 %), which is not explained yet; ITERATION's worst is -2.1 % (GPT-3 39B, b 30, two stages).
"""


def write_page(
    results: Sequence[Agreement], path: Path, *, command: str, machine: str, wall_s: float, num_pairs: int
) -> None:
    """Write the page; the plot stands beside it under the same name."""
    introduction = INTRODUCTION.format(
        command=command,
        today=date.today().isoformat(),
        machine=machine,
        wall_s=wall_s,
        num_pairs=num_pairs,
        throughput=THROUGHPUT_TOLERANCE,
        latency=LATENCY_TOLERANCE,
    )
    parts = [
        introduction,
        "## By policy\n",
        *by_policy(results),
        f"\n![errors by policy]({path.stem}.png)\n",
        "## By schedule\n",
        "`b` is the batch or the slots, `tp` the degrees of the stages (encode|decode; n*t for n stages of\n"
        "degree t), `m` micro-batches, `r` replicas; **best** is the solver's.\n",
        *by_schedule(results),
        "",
    ]
    path.write_text("\n".join(parts))


def by_policy(results: Sequence[Agreement]) -> list[str]:
    """Rows of a table: worst and mean absolute errors of each policy, and of all."""
    rows = [
        "| policy | schedules | throughput: mean | worst | latency: mean | worst | within | replay sem |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy in [*POLICIES, None]:
        mine = [r for r in results if policy in (None, r.case.policy)]
        if not mine:
            continue
        rates, latencies = (
            np.array([getattr(r, f"{name}_error") for r in mine]) for name in ("throughput", "latency")
        )
        sem = max(max(r.throughput_sem, r.latency_sem) for r in mine)
        within = sum(is_within(r) for r in mine)
        rows.append(
            f"| {policy.value if policy else 'all'} | {len(mine)} | {np.abs(rates).mean():.2%} | "
            f"{_worst(rates):+.2%} | {np.abs(latencies).mean():.2%} | {_worst(latencies):+.2%} | "
            f"{within} | {sem:.2%} |"
        )
    return rows


def by_schedule(results: Sequence[Agreement]) -> list[str]:
    """Rows of a table: every schedule."""
    rows = [
        "| policy | setting | schedule | requests | throughput, seq/s | error | latency, s | error | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        found = "**best** " if r.case.is_best else ""
        rows.append(
            f"| {r.case.policy.value} | {r.case.setting} | {found}{r.case.knobs} | {r.num_requests} | "
            f"{r.throughput_per_s:.2f} | {r.throughput_error:+.2%} ± {r.throughput_sem:.2%} | "
            f"{r.latency_s:.2f} | {r.latency_error:+.2%} ± {r.latency_sem:.2%} | "
            f"{'' if is_within(r) else 'beyond'} |"
        )
    return rows


def is_within(result: Agreement) -> bool:
    """Whether both errors are within the goal."""
    return (
        abs(result.throughput_error) <= THROUGHPUT_TOLERANCE
        and abs(result.latency_error) <= LATENCY_TOLERANCE
    )


def _worst(errors: np.ndarray) -> float:
    return float(errors[np.abs(errors).argmax()])


def plot(results: Sequence[Agreement], path: Path) -> None:
    """Errors by policy: a point per schedule, the goal shaded."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    policies: list[Policy] = [p for p in POLICIES if any(r.case.policy is p for r in results)]
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    goals = (("throughput", THROUGHPUT_TOLERANCE), ("latency", LATENCY_TOLERANCE))
    for axis, (name, goal) in zip(axes, goals, strict=True):
        axis.axhspan(-100 * goal, 100 * goal, color="0.9")
        axis.axhline(0, color="0.5", linewidth=0.8)
        for best, marker in ((False, "o"), (True, "D")):
            mine = [r for r in results if r.case.is_best is best]
            places = _places(mine, policies)
            errors = [100 * getattr(r, f"{name}_error") for r in mine]
            bars = [100 * getattr(r, f"{name}_sem") for r in mine]
            label = "solver's best" if best else "drawn at random"
            axis.errorbar(places, errors, yerr=bars, fmt=marker, markersize=4, linewidth=0.8, label=label)
        axis.set_ylabel(f"{name} error, %")
    axes[0].legend(loc="upper right", fontsize=8)
    axes[1].set_xticks(range(len(policies)), [p.value for p in policies], fontsize=8)
    axes[0].set_title("closed form / replay - 1; goal shaded, bars are one standard error", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _places(results: Sequence[Agreement], policies: Sequence[Policy]) -> list[float]:
    """Points of a policy side by side."""
    seen = dict.fromkeys(policies, 0)
    places = []
    for r in results:
        places.append(policies.index(r.case.policy) + (seen[r.case.policy] % 12 - 5.5) / 18)
        seen[r.case.policy] += 1
    return places
