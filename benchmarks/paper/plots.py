"""Plots of docs/reproduction.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from exegpt.report.plots import BLUE, GREY, ORANGE
from paper.outcomes import Outcome
from paper.scenarios import BOUNDS

COLOURS = {"RRA": BLUE, "WAA": ORANGE, None: GREY}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def save(path: Path, paint: Callable[[Axes], None], *, size_in: tuple[float, float] = (8.6, 2.9)) -> None:
    """A PNG whose axes `paint` fills."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size_in, layout="constrained")
        paint(figure.add_subplot())
        # No software version or date: the same figures give the same file.
        figure.savefig(path, dpi=110, metadata={"Software": None})


def gain_plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Bars of the gain over STATIC: a group per model and task, a bar per bound, coloured by the winner."""
    groups = list(dict.fromkeys((o.scenario.experiment, o.scenario.task) for o in outcomes))

    def paint(axes: Axes) -> None:
        for o in outcomes:
            index = groups.index((o.scenario.experiment, o.scenario.task))
            at = index + 0.2 * (list(BOUNDS).index(o.scenario.bound) - 1.5)
            axes.bar(at, o.gain or 0.0, width=0.17, color=COLOURS[o.winner])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(np.arange(len(groups)), [f"{task}\n{experiment}" for experiment, task in groups])
        axes.tick_params(axis="x", labelsize=7)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("throughput over STATIC")
        axes.set_title(f"{title} (bars: {', '.join(BOUNDS)})", fontsize=9, loc="left")
        axes.legend(handles=[Patch(color=COLOURS[p], label=f"{p} wins") for p in ("RRA", "WAA")])

    save(path, paint, size_in=(max(8.6, 0.8 * len(groups)), 3.0))
