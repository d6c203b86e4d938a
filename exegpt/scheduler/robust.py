"""Estimates that hold their bounds although pools fluctuate and lengths drift.

`confidence`: the bound's query is in time with that probability, its latency being normal around the closed
form with the deviation of `simulator.fluctuation`. `drift_margin`: every bound, and memory, holds for output
lengths whose mean or deviation is off by that share, the bound's query then being that percentile of the
drifted lengths (`workload.drift`). Throughput stays that of the planned lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from exegpt.errors import ConfigError
from exegpt.profiler.grid import FloatArray
from exegpt.schedule import SIDED_POLICIES
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray, constraint_values
from exegpt.simulator.fluctuation import Spread, latency_spread, sides_spread, slots_spread
from exegpt.simulator.slots import WindowWork, window_work
from exegpt.simulator.steady import SteadyState
from exegpt.specs import Policy


class RobustState:
    """The closed forms with the worst values that confidence and drift allow.

    Parameters
    ----------
    steady : SteadyState
        Of the planned lengths.
    corners : sequence of SteadyState
        Of the drifted lengths, the one with the greatest mean and deviation last.
    confidence : float, optional
        In [0.5, 1).
    """

    def __init__(
        self, steady: SteadyState, corners: Sequence[SteadyState] = (), confidence: float | None = None
    ) -> None:
        if confidence is not None and not 0.5 <= confidence < 1:
            raise ConfigError(
                f"solver.confidence={confidence}: must lie in [0.5, 1), or be null for the mean"
            )
        self.steady = steady
        self.corners = tuple(corners)
        self.sigmas = 0.0 if confidence is None else NormalDist().inv_cdf(confidence)
        self.confidence = confidence

    def estimate(self, choice: Choice, batch: IntArray, extent: IntArray) -> Estimates:
        """Estimates whose `worst` values are what has to meet the constraints."""
        e = self.steady.estimate(choice, batch, extent)
        worst = constraint_values(e)
        for corner in self.corners:
            values = constraint_values(corner.estimate(choice, batch, extent))
            worst = {name: np.maximum(worst[name], values[name]) for name in worst}
        if self.confidence is not None:
            worst["latency_s"] = worst["latency_s"] + self._margin_s(choice, batch, extent, e)
        return replace(e, worst=worst)

    def _margin_s(self, choice: Choice, batch: IntArray, extent: IntArray, e: Estimates) -> FloatArray:
        # Never below the mean: the bounds of boxes are bounds of the mean.
        return np.maximum(self._spread(choice, batch, extent, e).at(self.sigmas), 0.0)

    def _spread(self, choice: Choice, batch: IntArray, extent: IntArray, e: Estimates) -> Spread:
        if choice.policy in SIDED_POLICIES:
            pool = np.where(np.isfinite(e.decode_batch_size), e.decode_batch_size, 0.0)
            return sides_spread(self.steady, choice, pool / choice.num_decode_instances)
        if choice.policy in (Policy.ITERATION, Policy.CHUNKED):
            return slots_spread(self.steady, choice, e, self._slot_work)
        return latency_spread(self.steady, choice, batch, extent)

    @cached_property
    def _slot_work(self) -> WindowWork:
        """Of one slot while the bound's query holds another."""
        steady = self.steady
        return window_work(steady, steady.completion.iterations_of(steady.bound_output_tokens) + 1)

    def bounds(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes: what the planned lengths need, or the greatest drift if that is more."""
        bounds = self.steady.bounds(choices, which, batches, extents)
        if not self.corners:
            return bounds
        return _stricter(bounds, self.corners[-1].bounds(choices, which, batches, extents))

    def refine(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds | None:
        """Closer bounds of boxes."""
        bounds = self.steady.refine(choices, which, batches, extents)
        if not self.corners or bounds is None:
            return bounds
        drifted = self.corners[-1].refine(choices, which, batches, extents)
        return bounds if drifted is None else _stricter(bounds, drifted)


def _stricter(planned: Bounds, drifted: Bounds) -> Bounds:
    """Throughput of the planned lengths, the greater of all lower bounds."""
    tpot = planned.tpot_lower_s
    if tpot is not None and drifted.tpot_lower_s is not None:
        tpot = np.maximum(tpot, drifted.tpot_lower_s)
    return Bounds(
        throughput_upper_per_s=planned.throughput_upper_per_s,
        latency_lower_s=np.maximum(planned.latency_lower_s, drifted.latency_lower_s),
        ttft_lower_s=np.maximum(planned.ttft_lower_s, drifted.ttft_lower_s),
        memory_lower_bytes=np.maximum(planned.memory_lower_bytes, drifted.memory_lower_bytes),
        tpot_lower_s=tpot,
    )
