"""Figure 7: the systems the paper compares its baseline with, and the continuous batching of today."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console

from exegpt.report.units import format_number, format_ratio, format_seconds, ratio_of
from paper.outcomes import Outcome, solve_all
from paper.plots import save
from paper.report import Claim, Place, Section, table
from paper.scenarios import BOUNDS, OURS, PEERS, PUBLISHED, TASKS, Policy, Scenario

MODEL = "opt-13b"
# DeepSpeed-Inference, ORCA and vLLM in the paper; the others are later than it.
PAPERS_PEERS = (Policy.STATIC_HYBRID, Policy.ITERATION)
ABOVE = 1 + 1e-9


def section(outcomes: Sequence[Outcome], place: Place, console: Console) -> Section:
    """Figure 7's model on all tasks, then every peer in all scenarios."""
    known = {o.scenario: o for o in outcomes}
    wanted = [Scenario(experiment=MODEL, task=t, bound=b) for t in TASKS for b in BOUNDS]
    known |= {o.scenario: o for o in solve_all([s for s in wanted if s not in known], console)}
    figure_7 = [known[s] for s in wanted]
    plot(outcomes, place)
    body = [
        "STATIC_HYBRID is DeepSpeed-Inference's way (other micro-batches for encoding than for decoding), "
        "ITERATION that of ORCA and vLLM (one prompt beside the running decodes at most), CHUNKED that of "
        "continuous batching with chunked prompts, DISAGGREGATED that of separate instances for the phases. "
        "All have their own best configuration, K/V in pages where the system has them, and nothing is added "
        "for the Python of any of them. STATIC's and STATIC_HYBRID's latency is that of the longest output.",
        f"### Figure 7: {MODEL}, throughput in sequences/s\n\n" + figure_7_table(figure_7),
        "### All scenarios\n\n" + peers_table(outcomes),
        place.link("peers.png", "each peer over STATIC"),
    ]
    return Section(
        title="Figure 7: other systems",
        claims=[claim_static(figure_7), claim_ours(outcomes)],
        body="\n\n".join(body),
    )


def claim_static(outcomes: Sequence[Outcome]) -> Claim:
    """Whether the static baseline is the best of the paper's peers."""
    counts = {p: sum((o.over_static([p]) or 0.0) > ABOVE for o in outcomes) for p in PAPERS_PEERS}
    ratios = {p: [r for o in outcomes if (r := o.over_static([p])) is not None] for p in PAPERS_PEERS}
    return Claim(
        where="figure 7",
        paper="FasterTransformer beats DeepSpeed-Inference, ORCA and vLLM on every task and bound (13B)",
        ours="; ".join(
            f"{p.value} is above STATIC in {counts[p]} of {len(outcomes)}, mean {fmean(ratios[p]):.2f}x"
            for p in PAPERS_PEERS
            if ratios[p]
        ),
        agrees=not any(counts.values()),
        why="the paper measured the Python overhead of vLLM at the time, of which a policy has none. "
        "Ending early "
        "and joining at every iteration is worth more than a static batch, if the engine adds nothing.",
    )


def claim_ours(outcomes: Sequence[Outcome]) -> Claim:
    """Our policies against what came later."""
    later = [Policy.CHUNKED, Policy.DISAGGREGATED]
    ratios = {
        p: [r for o in outcomes if (r := ratio_of(o.throughput_per_s(PUBLISHED), o.throughput_per_s([p])))]
        for p in later
    }
    above = {p: sum(r < 1 for r in ratios[p]) for p in later}
    return Claim(
        where="not in the paper",
        paper="-",
        ours="; ".join(
            f"RRA and WAA over {p.value}: median {median(ratios[p]):.2f}x, {p.value} ahead in {above[p]} of "
            f"{len(ratios[p])}"
            for p in later
            if ratios[p]
        ),
        agrees=None,
        why="`solver.policies=all` lets them compete, and the faster is chosen.",
    )


def figure_7_table(outcomes: Sequence[Outcome]) -> str:
    """A row per task and bound, a column per policy."""
    columns = (Policy.STATIC, *PEERS)
    rows = []
    for o in outcomes:
        values = [format_number(o.throughput_per_s([p])) for p in columns]
        bound = format_seconds(o.solution.bound.latency_s)
        rows.append([o.scenario.task, bound, *values, format_number(o.throughput_per_s(OURS))])
    header = ["task", "bound", *[p.value for p in columns], "RRA or WAA"]
    return table(header, rows, right=range(1, len(header)))


def peers_table(outcomes: Sequence[Outcome]) -> str:
    """A row per peer: how often it has a schedule, and its throughput over STATIC's and under ours."""
    rows = []
    for p in PEERS:
        over = [r for o in outcomes if (r := o.over_static([p])) is not None]
        ours = [r for o in outcomes if (r := ratio_of(o.throughput_per_s(OURS), o.throughput_per_s([p])))]
        rows.append(
            [
                p.value,
                f"{len(ours)} of {len(outcomes)}",
                format_ratio(fmean(over) if over else None),
                format_ratio(min(over, default=None)),
                format_ratio(max(over, default=None)),
                format_ratio(median(ours) if ours else None),
                sum(r < 1 for r in ours),
            ]
        )
    header = ["policy", "feasible", "mean over STATIC", "least", "greatest", "RRA or WAA over it, median"]
    return table([*header, "ahead of RRA and WAA"], rows, right=range(1, 7))


def plot(outcomes: Sequence[Outcome], place: Place) -> None:
    """Boxes of every policy's throughput over STATIC's."""
    groups = {p.value: (p,) for p in PEERS} | {"RRA": (Policy.RRA,), "WAA": (*OURS[1:],)}

    def paint(axes: Axes) -> None:
        values = [[r for o in outcomes if (r := o.over_static(p)) is not None] for p in groups.values()]
        axes.boxplot(values, orientation="horizontal", whis=(0, 100), widths=0.55)
        axes.set_yticks(np.arange(1, len(groups) + 1), list(groups))
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.grid(visible=False, axis="y")
        axes.set_title(
            "Throughput over STATIC in all scenarios (box: middle half; ends: least, greatest)",
            fontsize=9,
            loc="left",
        )

    save(place.directory / "peers.png", paint)
