"""Plots of throughput against latency: of a sweep's jobs, and of one job's frontier."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exegpt.report.frontier_rows import open_steps, policy_points, rival_points
from exegpt.report.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX*"
_MAX_LABEL = 48
# An axis this long has no room for every digit between powers of ten.
_MANY_DECADES = 40


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (latency, throughput) points that no other beats in both, by rising latency."""
    best: list[tuple[float, float]] = []
    for latency_s, throughput in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or throughput > best[-1][1]:
            best.append((latency_s, throughput))
    return best


def series_of(
    rows: Sequence[Mapping[str, Any]], varying: Sequence[str]
) -> dict[str, list[tuple[float, float]]]:
    """Points by label; a series is one combination of the varying overrides other than the bound's.

    The bound is what moves a schedule along its frontier, so it makes no series of its own.
    """
    keys = [key for key in varying if key.split(".")[0] != "bound"]
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["throughput_per_s"] is None or row["latency_s"] is None:
            continue
        label = ", ".join(f"{key.split('.')[-1]} {row[key] or '(default)'}" for key in keys)
        series.setdefault(label, []).append((row["latency_s"], row["throughput_per_s"]))
    return series


def write_pareto(rows: Sequence[Mapping[str, Any]], varying: Sequence[str], path: Path) -> None:
    """Plot the feasible jobs of a sweep and the frontier of each series as PNG."""
    from matplotlib.figure import Figure

    series = series_of(rows, varying)
    figure = Figure(figsize=(8, 5), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for place, (label, points) in enumerate(series.items()):
        color = f"C{place % 10}"
        name = label if len(label) <= _MAX_LABEL else label[: _MAX_LABEL - 1] + "…"
        latencies, rates = zip(*points, strict=True)
        axes.scatter(latencies, rates, color=color, marker=_MARKERS[place // 10 % len(_MARKERS)], label=name)
        best = frontier(points)
        if len(best) > 1:
            axes.plot(*zip(*best, strict=True), color=color, linewidth=1, drawstyle="steps-post")
    if not series:
        axes.text(0.5, 0.5, "no job has a schedule", ha="center", transform=axes.transAxes)
    if len(series) > 1:
        # Beside the axes, so that no point lies under the legend.
        figure.legend(loc="outside right upper", fontsize="small")
    axes.set_xlabel("predicted latency of the bound's query, s")
    axes.set_ylabel("throughput, sequences/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.supxlabel(_caption(rows, series), fontsize="small")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    path.write_bytes(image.getvalue())


def _caption(rows: Sequence[Mapping[str, Any]], series: Mapping[str, Sequence[Any]]) -> str:
    count = Counter(str(row["status"]) for row in rows)
    caption = f"{sum(map(len, series.values()))} of {len(rows)} jobs plotted"
    for status in ("infeasible", "failed"):
        if count[status]:
            caption += f", {count[status]} {status}"
    return caption + "; lines: frontier of each series"


def write_frontier(solve: Mapping[str, Any], path: Path) -> None:
    """Plot the frontier of a `solve` record as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", dpi=150)
    frontier_plot(solve)(figure.add_subplot())
    _save(figure, path)


def frontier_plot(solve: Mapping[str, Any]) -> Callable[[Axes], None]:
    """Paints each policy's throughput under rising latency bounds, what the proofs leave open, and rivals."""

    def paint(axes: Axes) -> None:
        for place, (low, high, below, above) in enumerate(open_steps(solve)):
            label = "open: between what is reached and what is proven" if place == 0 else None
            axes.fill_between([low, high], below, above, color="0.5", alpha=0.25, linewidth=0, label=label)
        for place, (name, points) in enumerate(policy_points(solve).items()):
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=f"C{place}",
                    marker=_MARKERS[place % len(_MARKERS)],
                    markersize=4,
                    linewidth=1.2,
                    drawstyle="steps-post",
                    label=name,
                )
        for place, (name, (latency_s, rate)) in enumerate(rival_points(solve).items()):
            axes.plot(latency_s, rate, color="0.45", marker="x", linestyle="none")
            # Left and right in turn, since under one bound all stand close to one line.
            side, shift = (("left", 5), ("right", -5))[place % 2]
            axes.annotate(
                name,
                (latency_s, rate),
                xytext=(shift, 0),
                textcoords="offset points",
                fontsize=7,
                ha=side,
                va="center",
            )
        _mark_choice(axes, solve)
        _plain_log_axis(axes)
        axes.set_xlabel("latency bound of the query at the bound's length, s")
        axes.set_ylabel("throughput, sequences/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", fontsize="small")

    return paint


def _mark_choice(axes: Axes, solve: Mapping[str, Any]) -> None:
    """The job's own bound and answer."""
    if (bound_s := solve.get("latency_bound_s")) is not None:
        label = f"bound {format_seconds(bound_s)}"
        axes.axvline(bound_s, color="0.3", linewidth=1, linestyle=":", label=label)
    if solve.get("status") == "ok":
        axes.plot(
            solve["latency_s"],
            solve["throughput_per_s"],
            marker="*",
            markersize=13,
            color="C3",
            linestyle="none",
            label=f"chosen: {solve['policy']}",
        )


def _plain_log_axis(axes: Axes) -> None:
    """Latencies on a logarithmic axis with plain numbers, as many as have room."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_locator(LogLocator(subs=range(2, 10) if high < _MANY_DECADES * low else (2, 5)))
    axes.xaxis.set_major_formatter(_plain_number)
    axes.xaxis.set_minor_formatter(_plain_number)


def _plain_number(value: float, _: float) -> str:
    return f"{value:g}"
