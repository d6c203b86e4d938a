"""Measured tables that end early, continued by the formula of the card's sheet.

Public tables stop at some batch or context: Vidur's layers at 4,096 tokens, AIConfigurator's decode steps at
what one GPU took. Beyond, a time is the last measured one times what the formula says it grows by, and the
profile's provenance says from where.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from exegpt.profiler.grid import FloatArray, Grid, make_grid

# Axes along which a table may be continued. Prompts of one batch are computed one after another where
# there are more than were measured together, so `queries` of encode attention need no continuing.
_AXES = {"encode_attention": (1,), "decode_attention": (1, 0)}


def continued(measured: Grid, formula: Grid) -> tuple[Grid, str]:
    """The measured table up to where the formula's ends, and in words from where on it is scaled.

    Parameters
    ----------
    measured, formula : Grid
        Of one operator at one degree.

    Returns
    -------
    Grid
        With the measured table's own points in front.
    str
        E.g. `scaled by formula beyond 4,096 tokens`; empty if the table reaches as far as the formula.
    """
    operator = measured.name.rpartition(".")[2]
    axes, values, said = list(measured.axes), measured.values_s, []
    for axis in _AXES.get(operator, (0,)):
        last = float(axes[axis][-1])
        further = formula.axes[axis][formula.axes[axis] > last]
        if not len(further):
            continue
        growth = _growth(formula, axes, axis, further)
        end = np.take(values, [-1], axis=axis)
        values = np.concatenate([values, end * growth], axis=axis)
        axes[axis] = np.concatenate([axes[axis], further])
        said.append(f"{last:,.0f} {measured.axis_names[axis].replace('_', ' ')}")
    if not said:
        return measured, ""
    # Growth may shrink along the other axis; no cost falls there, as none does where it was measured.
    for axis in range(values.ndim):
        values = np.maximum.accumulate(values, axis=axis)
    grid = make_grid(measured.name, measured.axis_names, axes, values)
    return replace(grid, repaired=measured.repaired), f"scaled by formula beyond {' and '.join(said)}"


def _growth(formula: Grid, axes: list[FloatArray], axis: int, further: FloatArray) -> FloatArray:
    """Formula at the further points over the formula at the last measured one, at the other axis' points."""
    # Where the measured table reaches further along the other axis, the formula's end stands for it.
    points = [np.minimum(a, formula.limit(i)) for i, a in enumerate(axes)]
    points[axis] = np.concatenate([axes[axis][-1:], further])
    times = formula.at_or_inf(*np.meshgrid(*points, indexing="ij"))
    return np.asarray(times / np.take(times, [0], axis=axis)).take(range(1, len(further) + 1), axis=axis)
