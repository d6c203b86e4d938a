"""Tables and bars of figure 10's section."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from exegpt.report.units import format_number, format_ratio, format_seconds
from paper.plots import COLOURS, save
from paper.real_lengths_data import Split
from paper.real_lengths_outcomes import TWO_BOUNDS, Outcome, tail
from paper.report import Place, table


def splits_table(splits: Sequence[Split]) -> str:
    """A row per trace and part."""
    rows = [
        [
            s.trace.name,
            s.trace.stands_for,
            f"{s.num_pairs:,}",
            f"{s.num_dropped:,}",
            part,
            *(format_number(x) for x in (lengths.mean_input, lengths.mean_output)),
            lengths.output_percentile(99),
            lengths.max_output,
            f"{tail(lengths):.1f}",
            f"{lengths.correlation:.2f}",
        ]
        for s in splits
        for part, lengths in (("planned", s.planned), ("served", s.served))
    ]
    header = ["trace", "stands for", "pairs", "dropped", "part", "mean input", "mean output", "99 %"]
    return table([*header, "longest", "longest / mean", "correlation"], rows, right=(2, 3, *range(5, 11)))


def gains_table(outcomes: Sequence[Outcome]) -> str:
    """A row per outcome; throughput planned / replayed."""
    rows = [
        [
            o.split.trace.name,
            o.model,
            format_seconds(o.bound_s),
            *(_both(o, name) for name in ("STATIC", "RRA", "WAA")),
            o.winner,
            *(format_ratio(x) for x in (o.planned_gain, o.gain, o.unlimited_gain)),
        ]
        for o in outcomes
    ]
    header = ["trace", "model", "bound", "STATIC seq/s", "RRA", "WAA", "winner", "gain planned", "gain"]
    return "Throughput planned / replayed:\n\n" + table(
        [*header, "outputs not stopped"], rows, right=(2, 3, 4, 5, 7, 8, 9)
    )


def _both(o: Outcome, name: str) -> str:
    if name not in o.best:
        return "-"
    return " / ".join(format_number(x.throughput_per_s) for x in (o.best[name], o.replayed[name]))


def bound_table(outcomes: Sequence[Outcome]) -> str:
    """A row per policy of every outcome with a bound."""
    rows = [
        [
            o.split.trace.name,
            o.model,
            name,
            *(format_seconds(x) for x in (o.bound_s, o.best[name].latency_s, o.expected_s.get(name))),
            format_seconds(o.replayed[name].latency_s),
            f"{o.replayed[name].in_time:.0%}",
        ]
        for o in outcomes
        for name in ("STATIC", "RRA", "WAA")
        if name in o.best
    ]
    header = ["trace", "model", "policy", "bound", "planned", "amid served", "replayed", "in time"]
    return table(header, rows, right=range(3, 8))


def plot(outcomes: Sequence[Outcome], place: Place) -> None:
    """Bars of the replayed gain, a group per trace and model."""
    groups = list(dict.fromkeys((o.split.trace.name, o.model) for o in outcomes))

    def paint(axes: Axes) -> None:
        for o in outcomes:
            at = groups.index((o.split.trace.name, o.model)) + 0.32 * (TWO_BOUNDS.index(o.bound) - 0.5)
            axes.bar(at, o.gain, width=0.28, color=COLOURS[o.chosen])
            axes.text(at, o.gain, f"{o.gain:.1f}", ha="center", va="bottom", fontsize=7)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(np.arange(len(groups)), [f"{name}\n{model}" for name, model in groups], fontsize=7)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("throughput over STATIC")
        axes.set_title(f"Figure 10: replayed gain (bars: {', '.join(TWO_BOUNDS)})", fontsize=9, loc="left")
        axes.legend(handles=[Patch(color=COLOURS[p], label=p) for p in ("RRA", "WAA")])

    save(place.directory / "figure-10.png", paint)
