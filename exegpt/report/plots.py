"""Plots of a job as inline SVG; text and axes take the colour of the page around them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from exegpt.events import RequestRecord, StageEvent
from exegpt.report.reasons import is_feasible
from exegpt.report.spread import pool_over_time, stage_spreads
from exegpt.report.summary import is_complete, latencies_s
from exegpt.report.units import format_number, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib knows no `currentColor`: text and lines are drawn in this colour and renamed in the SVG.
_INK = "#010203"
# Blue, orange and green that keep a contrast of 3:1 on white and on near black.
BLUE, ORANGE, GREEN, GREY = "#3f82c9", "#d4772a", "#3d9a5f", "#8a8f98"
_WIDTH_IN = 7.6
# A Gantt chart shows how phases and micro-batches follow each other: few cycles, and few enough
# bars that the shortest is wider than a pixel.
_MAX_CYCLES = 3
_MAX_BARS = 400
_MAX_POINTS = 2_000


def draw(paint: Callable[[Axes], None], *, height_in: float = 2.8) -> str:
    """An SVG element whose axes `paint` fills."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "exegpt",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.18,
        "legend.frameon": False,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"),
            _INK,
        ),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        paint(figure.add_subplot())
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Ids of axes and patches repeat from plot to plot and are referred to by none; those of clip
    # paths and markers are hashes of their content.
    return re.sub(r'<g id="[a-z]+\w*_\d+">', "<g>", svg)


def gantt_window(events: Sequence[StageEvent]) -> list[StageEvent]:
    """Events of the first cycles, whole ones if at least the first can be told apart bar by bar."""
    first = min(event.cycle for event in events)
    ordered = sorted(
        (event for event in events if event.cycle < first + _MAX_CYCLES),
        key=lambda event: (event.cycle, event.start_s),
    )
    if len(ordered) <= _MAX_BARS:
        return ordered
    cut = ordered[_MAX_BARS].cycle
    whole = [event for event in ordered[:_MAX_BARS] if event.cycle < cut]
    return whole or ordered[:_MAX_BARS]


def gantt(events: Sequence[StageEvent]) -> str:
    """The pipeline of the first cycles: a row per stage, a bar per micro-batch, odd ones lighter."""
    window = gantt_window(events)
    start_s = min(event.start_s for event in window)
    stages = sorted({(event.stage, event.rank) for event in window})
    row_of = {rank: row for row, (_, rank) in enumerate(stages)}
    scale, unit = _scale(max(event.end_s for event in window) - start_s)

    def paint(axes: Axes) -> None:
        for phase, color in (("encode", ORANGE), ("decode", BLUE)):
            chosen = [event for event in window if event.phase == phase]
            for parity, alpha in ((0, 1.0), (1, 0.6)):
                bars = [event for event in chosen if event.micro_batch % 2 == parity]
                label = phase if parity == 0 else None
                if bars:
                    axes.barh(
                        [row_of[event.rank] for event in bars],
                        [(event.end_s - event.start_s) * scale for event in bars],
                        left=[(event.start_s - start_s) * scale for event in bars],
                        height=0.72,
                        color=color,
                        alpha=alpha,
                        linewidth=0,
                        label=label,
                    )
        axes.set_yticks(range(len(stages)), [f"stage {stage} (rank {rank})" for stage, rank in stages])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.01)
        cycles = sorted({event.cycle for event in window})
        axes.set_xlabel(f"time since the first encoding, {unit} (cycles {cycles[0]} to {cycles[-1]})")
        _legend_above(axes)

    return draw(paint, height_in=1.5 + 0.32 * len(stages))


def pool(
    events: Sequence[StageEvent], predicted: Sequence[StageEvent] = (), *, label: str = "measured"
) -> str:
    """Queries in decoding over time, and as a replay predicted them; `label` names the former."""

    def paint(axes: Axes) -> None:
        for chosen, name, color, line in (
            (events, label, BLUE, "-"),
            (predicted, "predicted", ORANGE, "--"),
        ):
            times, sizes = pool_over_time(chosen)
            if len(times):
                # Thinned evenly in time order; the last point, where the pool is empty, stays.
                keep = np.unique(np.linspace(0, len(times) - 1, min(len(times), _MAX_POINTS)).astype(int))
                axes.step(
                    times[keep],
                    sizes[keep],
                    where="post",
                    label=name,
                    color=color,
                    linestyle=line,
                    linewidth=1.3,
                )
        axes.set_xlabel("time since the first encoding, s")
        axes.set_ylabel("queries in decoding")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _legend_above(axes)

    return draw(paint)


def latency_cdf(
    records: Sequence[RequestRecord],
    predicted: Sequence[RequestRecord] = (),
    *,
    label: str = "measured",
    bound_s: float | None = None,
) -> str:
    """Share of queries that are done within a latency, with the bound if there is one."""

    def paint(axes: Axes) -> None:
        for chosen, name, color, line in (
            (records, label, BLUE, "-"),
            (predicted, "predicted", ORANGE, "--"),
        ):
            values = np.sort(latencies_s(chosen))
            if len(values):
                share = 100 * np.arange(len(values) + 1) / len(values)
                edges = np.concatenate([values[:1], values])
                axes.step(edges, share, where="post", label=name, color=color, linestyle=line, linewidth=1.5)
        if bound_s is not None:
            text = f"bound {format_seconds(bound_s)}, for its length"
            axes.axvline(bound_s, color=GREEN, linewidth=1.5, linestyle=":", label=text)
        axes.set_xlabel("latency from encode start, s")
        axes.set_ylabel("queries, %")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 102)
        _legend_above(axes)

    return draw(paint)


def output_lengths(records: Sequence[RequestRecord], planned_pmf: Sequence[float] | None = None) -> str:
    """Histogram of output lengths, planned and observed, as shares of the queries."""
    observed = np.array([record.output_tokens for record in records if is_complete(record)])
    planned = np.asarray(planned_pmf if planned_pmf is not None else (), dtype=float)
    longest = int(max([*observed, *np.flatnonzero(planned), 1]))
    width = max(1, -(-longest // 40))
    edges = np.arange(0.5, longest + width + 0.5, width)

    def paint(axes: Axes) -> None:
        if len(observed):
            shares = np.full(len(observed), 100 / len(observed))
            axes.hist(observed, bins=edges.tolist(), weights=shares, color=BLUE, alpha=0.65, label="observed")
        if len(planned):
            lengths = np.arange(len(planned))
            mass, _ = np.histogram(lengths, bins=edges, weights=100 * planned)
            axes.stairs(mass, edges, color=ORANGE, linewidth=1.5, label="planned")
        axes.set_xlabel(f"output tokens (bins of {width})")
        axes.set_ylabel("queries, %")
        axes.set_xlim(0, edges[-1])
        _legend_above(axes)

    return draw(paint)


def throughputs(solve: Mapping[str, Any]) -> str:
    """Throughput of each policy and baseline at its best; those without a schedule have no bar."""
    named = [(name, record, BLUE) for name, record in (solve.get("policies") or {}).items()]
    named += [(f"{name} (baseline)", record, GREY) for name, record in (solve.get("baselines") or {}).items()]
    rates = [record["throughput_per_s"] if is_feasible(record) else 0.0 for _, record, _ in named]

    def paint(axes: Axes) -> None:
        bars = axes.barh(range(len(named)), rates, color=[color for _, _, color in named], height=0.66)
        labels = [
            format_number(rate) if is_feasible(record) else "no schedule"
            for rate, (_, record, _) in zip(rates, named, strict=True)
        ]
        axes.bar_label(bars, labels, padding=4)
        axes.set_yticks(range(len(named)), [name for name, _, _ in named])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("throughput, sequences/s")
        axes.margins(x=0.12)
        axes.set_xlim(left=0)

    return draw(paint, height_in=0.9 + 0.34 * len(named))


def stage_spread(events: Sequence[StageEvent]) -> str | None:
    """Spread of each stage's time per cycle; None with too few steady cycles."""
    by_phase = {phase: stage_spreads(events, phase) for phase in ("encode", "decode")}
    stages = sorted({(event.stage, event.rank) for event in events})
    if not any(by_phase.values()):
        return None

    def paint(axes: Axes) -> None:
        for offset, (phase, color) in zip((-0.2, 0.2), (("encode", ORANGE), ("decode", BLUE)), strict=True):
            found = [
                (row, by_phase[phase][rank])
                for row, (_, rank) in enumerate(stages)
                if rank in by_phase[phase]
            ]
            places = [row + offset for row, _ in found]
            bars = axes.bar(places, [100 * value for _, value in found], width=0.38, color=color, label=phase)
            axes.bar_label(bars, [f"{100 * value:.1f}" for _, value in found], padding=2, fontsize=8)
        axes.set_xticks(range(len(stages)), [f"stage {stage}\nrank {rank}" for stage, rank in stages])
        axes.set_ylabel("p99 over mean, minus 1, %")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)
        _legend_above(axes)

    return draw(paint)


def _scale(span_s: float) -> tuple[float, str]:
    return (1.0, "s") if span_s >= 2 else (1e3, "ms")


def _legend_above(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)
