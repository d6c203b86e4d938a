"""What the paper states of figure 11, and what we find."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exegpt.report.units import format_number, format_seconds
from exegpt.simulator.choice import IntArray
from paper.drift_rows import Drift, Row
from paper.drift_settings import (
    Replayed,
    Setting,
    adapted_shares,
    late,
    lost,
    mean_share,
    own_margin,
    replayed_margin,
)
from paper.report import Claim

# The paper's margins in per cent under SLA (a) and (b), and its limits of RRA's losses.
MEAN_MARGINS = (13, 10)
STD_MARGINS = (5, 0)
FREE_GAP = 0.20
RRA_MEAN = (0.28, 0.126)
RRA_OTHERS = (0.11, 0.17)


def claims(rra: Setting, waa: Setting, free: Sequence[Setting], again: Sequence[Replayed]) -> list[Claim]:
    """The paper's statements."""
    return [
        margin_claim(Drift("mean", 1.15), MEAN_MARGINS, rra, waa, again),
        margin_claim(Drift("std", 1.3), STD_MARGINS, rra, waa),
        direction_claim(rra, waa, again),
        free_claim(next(s for s in free if s.name == "WAA")),
        skew_claim(rra, waa),
        rra_claim(rra, ("mean",), RRA_MEAN),
        rra_claim(rra, ("std", "skew"), RRA_OTHERS),
        adapted_claim(rra),
    ]


def where_of(setting: Setting) -> str:
    """The policy and its bound, and why it is not the paper's."""
    unmet = "".join(
        f"; none at {bound}, its least latency is {format_seconds(least)}"
        for bound, least in setting.unmet.items()
    )
    return f"{setting.name} ({setting.bound}, {format_seconds(setting.problem.bound.latency_s)}{unmet})"


def within(margin: int | None, papers: int) -> bool:
    """Whether a margin is found and no greater than the paper's."""
    return margin is not None and margin <= papers


def margin_claim(
    drift: Drift, papers: tuple[int, int], rra: Setting, waa: Setting, again: Sequence[Replayed] = ()
) -> Claim:
    """Margins that a drift needs; `again` are replays of WAA's schedule, its pool's room held."""
    rows = [(s, s.row(drift.moment, drift.value)) for s in (waa, rra)]
    texts = [
        f"{where_of(s)}: {_per_cent(r.margin)} (a), {_per_cent(r.planned_margin)} (b), by its own latency "
        f"{own_margin(s, r, planned=False):.0%} and {own_margin(s, r, planned=True):.0%}"
        for s, r in rows
    ]
    if again:
        texts[0] += f", replayed with its pool's room held {replayed_margin(again, drift):.0%} (a)"
    return Claim(
        where="figure 11",
        paper=f"{drift}: WAA needs a bound tighter by {papers[0]}% under (a), "
        + (f"{papers[1]}% under (b)" if papers[1] else "none under (b)"),
        ours="; ".join(texts),
        agrees=all(within(r.margin, papers[0]) and within(r.planned_margin, papers[1]) for _, r in rows),
        why=f"{batch_step(waa)}. {cycle_step(rra, rows[1][1])}.",
    )


def batch_step(waa: Setting) -> str:
    """How coarse WAA's schedules are at the bound: what the next smaller encode batch would do."""
    best, steady = waa.best, waa.problem.steady()
    if best.batch == 1:
        return "WAA's encode batch is 1 already, no smaller one is left"
    less = best.batch - 1
    e = steady.estimate(best.choice, _one(less), _one(best.extent))
    return (
        f"WAA encodes {best.batch} at a time; {less} at a time takes {format_seconds(float(e.latency_s[0]))} "
        f"instead of {format_seconds(best.latency_s)}, with {format_number(float(e.throughput_per_s[0]))} "
        f"instead of {format_number(best.throughput_per_s)} seq/s, so that step is all that a margin can buy"
    )


def _one(value: int) -> IntArray:
    return np.asarray([value], dtype=np.int64)


def cycle_step(rra: Setting, row: Row) -> str:
    """In how many of RRA's cycles the bound's query ends, planned and drifted."""
    planned = rra.problem.lengths.output_percentile(99)
    now = row.drift.of(rra.problem.lengths).output_percentile(99)
    before, after = (cycles_of(tokens, rra.best.extent) for tokens in (planned, now))
    phases = "one more encode phase" if after - before == 1 else f"{after - before} more encode phases"
    return (
        f"RRA's N_D of {rra.best.extent} ends {planned} tokens in cycle {before}, {now} tokens in cycle "
        f"{after}, after {phases}"
    )


def cycles_of(output_tokens: int, iterations: int) -> int:
    """Cycles of RRA that a query of a decoder-only model sees; its first token comes from encoding."""
    return 1 + (output_tokens - 2) // iterations if output_tokens > 1 else 1


def _per_cent(margin: int | None) -> str:
    return "more than 40%" if margin is None else f"{margin}%"


def direction_claim(rra: Setting, waa: Setting, again: Sequence[Replayed]) -> Claim:
    """Longer and shorter outputs."""
    longer = [s.row("mean", f) for s in (waa, rra) for f in (1.15, 1.3)]
    shorter = [s.row("mean", f) for s in (waa, rra) for f in (0.7, 0.85)]
    good = all(_faster(r) and not r.old.meets(r.bound_s, planned=False) for r in longer)
    good &= all(lost(r) > 0 and r.old.meets(r.bound_s, planned=False) for r in shorter)
    cells = [f"{r.drift}: {_against(r)}" for r in longer + shorter]
    half = len(longer) // 2
    worst = again[-1]
    return Claim(
        where="figure 11",
        paper="longer outputs: the old schedule has more throughput than the re-optimised one, but breaks "
        "the bound; shorter: less, within the bound",
        ours=f"WAA {', '.join(cells[:half] + cells[2 * half : 3 * half])}; "
        f"RRA {', '.join(cells[half : 2 * half] + cells[3 * half :])}. Replayed with the pool's room "
        f"held, WAA has {format_number(worst.replayed_per_s)} seq/s at {worst.drift}",
        agrees=good,
        why="see the tables.",
    )


def _faster(row: Row) -> bool:
    """More throughput than what meets the bound, which may be nothing."""
    return row.new is None or row.old.throughput_per_s > row.new.throughput_per_s


def _against(row: Row) -> str:
    old = format_number(row.old.throughput_per_s)
    new = format_number(row.new.throughput_per_s if row.new else None)
    state = "in time" if row.old.meets(row.bound_s, planned=False) else "late"
    return f"{old} against {new} seq/s, {state}"


def free_claim(waa: Setting) -> Claim:
    """Throughput given up by keeping the old schedule without a bound."""
    fitting = [r for r in waa.rows if r.old.fits]
    worst = max(fitting, key=lost)
    return Claim(
        where="figure 11",
        paper="no bound: the throughput gap is at most 20%, at 0.7 of the mean",
        ours=f"WAA: at most {lost(worst):.1%}, at {worst.drift}"
        + (
            f"; beyond memory at {len(waa.rows) - len(fitting)} drifts"
            if len(fitting) < len(waa.rows)
            else ""
        ),
        agrees=lost(worst) <= FREE_GAP and str(worst.drift) == "mean x0.7",
        why="see the table.",
    )


def skew_claim(rra: Setting, waa: Setting) -> Claim:
    """Little effect on throughput, some on the latency of the 99th percentile."""
    texts, good = [], True
    for s in (waa, rra):
        rows = [r for r in s.rows if r.drift.moment == "skew"]
        moved = max(abs(r.old.throughput_per_s / s.best.throughput_per_s - 1) for r in rows)
        ratios = [r.old.latency_s / s.best.latency_s - 1 for r in rows]
        texts.append(f"{s.name}: throughput {moved:.1%}, latency {min(ratios):+.1%} to {max(ratios):+.1%}")
        good &= moved < max(abs(x) for x in ratios)
    return Claim(
        where="figure 11",
        paper="skewness: little effect on throughput, some on the 99th percentile's latency",
        ours="; ".join(texts),
        agrees=good,
        why="throughput moves more than latency.",
    )


def rra_claim(rra: Setting, moments: Sequence[str], papers: tuple[float, float]) -> Claim:
    """What keeping RRA's old schedule costs: throughput against a new one, latency against the bound."""
    rows = [r for r in rra.rows if r.drift.moment in moments]
    worst, latest = max(rows, key=lost), max(rows, key=_latency)
    above = {planned: max(late(r, planned=planned) for r in rows) for planned in (False, True)}
    fast, in_time = lost(worst) <= papers[0], max(above.values()) <= papers[1]
    return Claim(
        where="figure 11",
        paper=f"RRA, {' and '.join(moments)}: costs at most {papers[0]:.0%} throughput and {papers[1]:.1%} "
        "latency",
        ours=f"at most {lost(worst):.1%} below a new schedule ({worst.drift}); beyond the bound by "
        f"{max(above[False], 0):.1%} under (a), {max(above[True], 0):.1%} under (b)",
        agrees=fast and in_time,
        why=("" if fast else f"throughput, at {worst.drift}: a new batch or placement has more. ")
        + ("" if in_time else f"latency, at {latest.drift}: {cycle_step(rra, latest)}. ")
        + "The paper does not say of which query its latency is.",
    )


def _latency(row: Row) -> float:
    return row.old.latency_s


def adapted_claim(rra: Setting) -> Claim:
    """RRA with a new N_D alone."""
    shares = adapted_shares(rra)
    found = [s for s in shares if s is not None]
    return Claim(
        where="figure 11",
        paper="RRA adapts by N_D alone, without a new allocation",
        ours=f"a new N_D meets the bound at {len(found)} of {len(shares)} drifts that have a schedule, with "
        f"{min(found):.1%} of a new schedule's throughput at least, {mean_share(shares):.1%} on average",
        agrees=len(found) == len(shares),
        why="some drifts need a new batch or placement.",
    )
