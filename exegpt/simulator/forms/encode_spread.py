"""How much longer than the mean a stage takes for the longest of the ragged micro-batches of an encode phase.

Micro-batches get as many queries as they lost, which vary, with prompts that vary, and the pipeline waits
for the longest one on every stage but the slowest. Passing a stage with a later micro-batch costs what the
slowest stage would have done in that time. One standard deviation more tokens is costed as so many more mean
prompts.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.choice import IntArray
from exegpt.simulator.pipeline import longest_of
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import StageKinds


class EncodeSpread:
    """The spread of RRA's encode phases under one workload."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def of_stages(
        self, stages: tuple[Stage, ...], m: int, batch: FloatArray, n_d: IntArray, encode_s: FloatArray
    ) -> FloatArray:
        """Additional time of every stage, for mean encode times `encode_s`; both (n, num_stages)."""
        if m == 1 or len(stages) == 1:
            return np.zeros_like(encode_s)
        longer = self.serving.encode_s(stages, self._longer(m, batch, n_d))
        slowest = encode_s.max(-1, keepdims=True)
        return longest_of(np.maximum(longer - encode_s, 0.0), slowest - encode_s, m)

    def of_kinds(
        self, kinds: StageKinds, m: int, batch: FloatArray, n_d: IntArray, encode_s: FloatArray
    ) -> FloatArray:
        """The same by kinds of stages of many pipelines; `encode_s` and result (n, kinds)."""
        longer = self.serving.tables.encode_s(kinds, self._longer(m, batch, n_d))
        slowest = kinds.slowest(encode_s)[:, None]
        gains = longest_of(np.maximum(longer - encode_s, 0.0), slowest - encode_s, m)
        return np.where(kinds.count > 0, gains, 0.0)

    def _longer(self, m: int, batch: FloatArray, n_d: IntArray) -> FloatArray:
        """Mean prompts in a micro-batch that is one standard deviation longer than the mean."""
        lengths = self.serving.lengths
        queries = batch / m
        lost = self._lost_variance[np.minimum(n_d, len(self._lost_variance)) - 1]
        counts = queries * lost * (1 - 1 / m) + queries % 1 * (1 - queries % 1)
        variance = queries * lengths.std_input**2 + counts * self.serving.mean_input**2
        return np.asarray(queries + np.sqrt(variance) / self.serving.mean_input)

    @cached_property
    def _lost_variance(self) -> FloatArray:
        """Variance of the queries that a pool loses in a cycle, per encoded query, by N_D from 1 on."""
        survival = self.serving.completion.survival
        return np.asarray([_lost(survival[::n_d]) for n_d in range(1, self.serving.pool_tables.most + 1)])


def _lost(alive: FloatArray) -> float:
    later = np.append(alive[1:], 0.0)
    kept = np.divide(later, alive, out=np.zeros_like(alive), where=alive > 0)
    return float(((alive - later) * kept).sum())
