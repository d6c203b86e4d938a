"""Plots of figure 11's section."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from exegpt.report.plots import BLUE, GREY, ORANGE
from paper.drift_settings import Setting
from paper.plots import save
from paper.report import Place


def margin_plot(settings: Sequence[Setting], place: Place) -> None:
    """Bars of the margins under (a) and (b)."""
    bars = [(s, planned) for s in settings for planned in (False, True)]
    colours = {"RRA": BLUE, "WAA": ORANGE}

    def paint(axes: Axes) -> None:
        for i, (s, planned) in enumerate(bars):
            values = [r.planned_margin if planned else r.margin for r in s.rows]
            heights = [np.nan if v is None else float(v) for v in values]
            at = np.arange(len(values)) + 0.2 * (i - 1.5)
            label = f"{s.name} ({s.bound}), SLA ({'b' if planned else 'a'})"
            axes.bar(
                at, heights, width=0.18, color=colours[s.name], alpha=0.5 if planned else 1.0, label=label
            )
            for x, v in zip(at, values, strict=True):
                if v is None:
                    axes.text(x, 0.3, "x", ha="center", fontsize=8)
        _ticks(axes, settings[0])
        axes.set_ylabel("margin, %")
        axes.set_title(
            "How much tighter the planning bound must be (x: none suffices)", fontsize=9, loc="left"
        )
        axes.legend()

    save(place.directory / "drift-margin.png", paint)


def throughput_plot(settings: Sequence[Setting], place: Place) -> None:
    """Throughput of the old and the re-optimised schedules; a cross where the old one breaks the bound."""

    def paint(axes: Axes) -> None:
        for s, colour in zip(settings, (BLUE, ORANGE), strict=True):
            at = np.arange(len(s.rows))
            old = np.asarray([r.old.throughput_per_s for r in s.rows])
            new = [r.new.throughput_per_s if r.new else np.nan for r in s.rows]
            axes.plot(at, old, "o", color=colour, label=f"{s.name} ({s.bound}), old")
            axes.plot(
                at,
                new,
                "_",
                color=colour,
                markersize=14,
                markeredgewidth=2,
                label=f"{s.name} ({s.bound}), re-optimised",
            )
            broken = [i for i, r in enumerate(s.rows) if not r.old.meets(r.bound_s, planned=False)]
            axes.plot(at[broken], old[broken], "x", color=GREY, markersize=10, zorder=3)
        _ticks(axes, settings[0])
        axes.set_ylabel("sequences/s")
        axes.set_ylim(bottom=0)
        axes.set_title(
            "Old and re-optimised schedules (grey cross: breaks the bound)", fontsize=9, loc="left"
        )
        axes.legend(ncols=2)

    save(place.directory / "drift-throughput.png", paint)


def _ticks(axes: Axes, setting: Setting) -> None:
    labels = [str(r.drift).replace(" ", "\n") for r in setting.rows]
    axes.set_xticks(np.arange(len(labels)), labels, fontsize=7)
    axes.grid(visible=False, axis="x")
