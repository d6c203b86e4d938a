"""Times of the parts that stages consist of: a layer, and what a stage has beside its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.costs import StageCosts, StageShape
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import FIRST, LAST, SENDS

# Key of a layer among the parts; the others are the flags of the stage that they are the rest of.
LAYER = -1
_PIPELINE = ((FIRST | SENDS, True, False), (SENDS, False, False), (LAST | SENDS, False, True))


def stage_parts(
    serving: Serving, degree: int, times: Callable[[StageCosts], FloatArray]
) -> Mapping[int, FloatArray]:
    """What `times` are for each part of the stages of one degree.

    Parameters
    ----------
    degree : int
        Index into `StageTables.degrees`.
    times : callable
        From costs of a pipeline to arrays of shape (..., stages), infinite beyond the profile.

    Returns
    -------
    mapping of int to float array, shape (...)
        Under `LAYER` a layer's, under a stage's flags the rest's; a stage takes layers x the one + the other.
    """
    tp_size = serving.tables.degrees[degree]

    def of(ends: list[tuple[bool, bool]], num_layers: int) -> FloatArray:
        shapes = [
            StageShape(num_layers=num_layers, tp_size=tp_size, is_first=first, is_last=last)
            for first, last in ends
        ]
        with np.errstate(invalid="ignore"):
            found = times(StageCosts(serving.profile, serving.model, shapes))
        # Beyond the profile, no layers of infinite time each are not a number.
        return np.where(np.isnan(found), np.inf, found)

    rest = of([(first, last) for _, first, last in _PIPELINE], 0)
    parts = {flags: rest[..., place] for place, (flags, _, _) in enumerate(_PIPELINE)}
    alone, whole = of([(True, True)], 0)[..., 0], of([(True, True)], 1)[..., 0]
    finite = np.isfinite(alone)
    parts[FIRST | LAST] = alone
    parts[LAYER] = np.where(finite, whole - np.where(finite, alone, 0.0), np.inf)
    return parts
