"""Figure 10: gains on lengths of real requests, planned with a tenth of them and served with the rest."""

from __future__ import annotations

from statistics import fmean

import numpy as np
from rich.console import Console
from rich.progress import Progress

from paper.real_lengths_claims import Means, claims
from paper.real_lengths_data import SHARE_PLANNED, TRACES, read_split
from paper.real_lengths_outcomes import (
    MODELS,
    TWO_BOUNDS,
    mean_planned_gain,
    outcome,
    short_input_problems,
    short_tailed_problems,
    synthetic_problems,
)
from paper.real_lengths_tables import bound_table, gains_table, plot, splits_table
from paper.report import Place, Section


def section(place: Place, console: Console) -> Section:
    """Claims, tables and bars of all traces."""
    splits = [read_split(trace) for trace in TRACES]
    cases = [(s, m, b) for s in splits for m in MODELS for b in TWO_BOUNDS]
    longest = max(splits, key=lambda s: s.planned.mean_input)
    groups = (synthetic_problems(), short_tailed_problems(splits), short_input_problems(longest))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("real lengths", total=2 * len(cases) + sum(map(len, groups)))
        outcomes = []
        for case in cases:
            outcomes.append(outcome(*case))
            progress.advance(task, 2)
        synthetic, cut, short = (mean_planned_gain(g, lambda: progress.advance(task)) for g in groups)
    real = fmean(o.planned_gain for o in outcomes)
    means = Means(synthetic=synthetic, real=real, without_tails=cut, short_inputs=short)
    plot(outcomes, place)
    body = [
        f"A seeded {SHARE_PLANNED:.0%} of the pairs of every trace are planned with, and requests drawn from "
        "the others, pairs whole, are replayed in a saturated system behind its warm-up. Bounds are the 30% "
        "quantile of STATIC's latencies, and none. A gain is the throughput of the better of RRA and WAA as "
        "planned over STATIC's, both as replayed on the same requests.",
        splits_table(splits),
        "arXiv summarisation stands for CNN/DailyMail, of which no lengths could be had. Pairs beyond "
        "1536 input or 512 output tokens are dropped, not cut: STATIC keeps slots of the longest input and "
        "output together, and they must lie in the models' window of 2048. STATIC's slots and bound need a "
        "longest output before it serves: that of the planned pairs is taken, for all policies, and outputs "
        "stop there. In the last column of the next table STATIC's outputs run to their end instead, and a "
        "static batch until its longest does.",
        place.link("figure-10.png", "gains on real lengths"),
        gains_table(outcomes),
        "### The bound in replay\n\nLatency of the query that is bound, the 99th percentile of the planned "
        "outputs; of STATIC the worst of all queries. `amid served` is the closed form's latency of the same "
        "schedule and query with the lengths of what is served.",
        bound_table([o for o in outcomes if np.isfinite(o.bound_s)]),
    ]
    return Section(
        title="Figure 10: lengths of real requests", claims=claims(outcomes, means), body="\n\n".join(body)
    )
