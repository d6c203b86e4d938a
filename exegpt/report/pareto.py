"""The plot of a sweep: throughput against latency."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MARKERS = "osD^vPX*"
_MAX_LABEL = 48


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
