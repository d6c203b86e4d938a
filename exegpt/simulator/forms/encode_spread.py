"""How much longer than the mean a stage takes for the longest of the ragged micro-batches of an encode phase.

Micro-batches get as many queries as they lost, which vary, with prompts that vary, and the pipeline waits
for the longest one on every stage but the slowest. Passing a stage with a later micro-batch costs what the
slowest stage would have done in that time.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.choice import IntArray
from exegpt.simulator.curves import range_minima, range_minimum
from exegpt.simulator.forms.spread import square_per_token
from exegpt.simulator.ragged import longest_of, longest_skew
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import StageKinds


class EncodeSpread:
    """The spread of RRA's encode phases under one workload."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def of_stages(
        self, stages: tuple[Stage, ...], m: int, batch: FloatArray, n_d: IntArray, encode_s: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """How much longer than the mean prompts' every stage's mean time is, and its deviation; (n, stages).

        `encode_s` (n, stages) are the times of mean micro-batches. A micro-batch shorter by as much saves
        less time than a longer one costs, where costs have a floor.
        """
        if m == 1 or len(stages) == 1:
            return np.zeros_like(encode_s), np.zeros_like(encode_s)
        kinds, place = self.serving.kinds(stages)
        first = [place.index(kind) for kind in range(kinds.count.shape[1])]
        queries = batch / m
        lost, uneven = self._lost_at(n_d), queries % 1 * (1 - queries % 1)
        deviation = self._longer_s(kinds, queries, lost, uneven) - encode_s[:, first]
        # Gauss and Hermite's rule of three points.
        aside = [self._longer_s(kinds, queries, lost, uneven, sigmas=s * 3**0.5) for s in (-1, 1)]
        mean = (aside[0] + aside[1] - 2 * encode_s[:, first]) / 6
        deviation = deviation * (1 + self._skew(queries, lost, uneven) * longest_skew(m))[:, None]
        # Never below the mean prompts', which the bounds take.
        return np.maximum(mean, 0.0)[:, place], np.maximum(deviation, 0.0)[:, place]

    def _skew(self, queries: FloatArray, lost: FloatArray, uneven: FloatArray) -> FloatArray:
        """Skewness of a micro-batch's tokens, (n,): of a binomial number of prompts and of their lengths.

        Not below zero: the bounds have none.
        """
        lengths, mean = self.serving.lengths, self.serving.mean_input
        n = np.arange(len(lengths.input_pmf), dtype=np.float64)
        own = float(lengths.input_pmf @ (n - mean) ** 3)
        counts, variance = queries * lost, lengths.std_input**2
        third = queries * own + 3 * (counts + uneven) * mean * variance + counts * (2 * lost - 1) * mean**3
        total = queries * variance + (counts + uneven) * mean**2
        return np.divide(np.maximum(third, 0.0), total**1.5, out=np.zeros_like(total), where=total > 0)

    def of_kinds(
        self, kinds: StageKinds, m: IntArray, batch: FloatArray, n_d: IntArray, encode_s: FloatArray
    ) -> FloatArray:
        """The same by kinds of stages of many pipelines; `m` (n,), `encode_s` and result (n, kinds)."""
        queries = batch / m
        longer = self._longer_s(kinds, queries, self._lost_at(n_d), queries % 1 * (1 - queries % 1))
        slowest = kinds.slowest(encode_s)[:, None]
        gains = longest_of(np.maximum(longer - encode_s, 0.0), slowest - encode_s, m[:, None])
        return np.where(kinds.count > 0, gains, 0.0)

    def least_of_kinds(
        self,
        kinds: StageKinds,
        m: IntArray,
        batches: IntArray,
        extents: IntArray,
        least_s: FloatArray,
        most_s: FloatArray,
    ) -> FloatArray:
        """Lower bounds of `of_kinds` over boxes of batches (n, 2) x N_D (n, 2).

        The gain rises with how much longer a job is and falls with its handicap. Both are taken at the
        encode times, `least_s` and `most_s` (n, kinds), of the least and the greatest batch: more queries
        of which more are lost make a micro-batch of no fewer tokens, in no fewer prompts; batches that do
        not divide only add to it, and so does what longer prompts add to the mean square. Single
        candidates have their exact value.
        """
        single = (batches[:, 0] == batches[:, 1]) & (extents[:, 0] == extents[:, 1])
        result = np.zeros_like(least_s)
        if single.any():
            result[single] = self.of_kinds(
                kinds.take(np.flatnonzero(single)),
                m[single],
                batches[single, 0].astype(np.float64),
                extents[single, 0],
                least_s[single],
            )
        boxes = np.flatnonzero(~single)
        if len(boxes):
            mine = kinds.take(boxes)
            low, high = (np.minimum(extents[boxes, i], len(self._lost_variance)) - 1 for i in (0, 1))
            lost = range_minimum(self._least_lost, 0, low, high)
            none = np.zeros(len(boxes))
            jobs = m[boxes]
            longer = self._longer_s(mine, batches[boxes, 0] / jobs, lost, none, longer_prompts=False)
            handicap = mine.slowest(most_s[boxes])[:, None] - least_s[boxes]
            spread = np.maximum(longer - most_s[boxes], 0.0)
            gains = longest_of(spread, np.maximum(handicap, 0.0), jobs[:, None])
            result[boxes] = np.where(mine.count > 0, gains, 0.0)
        return result

    def _longer_s(
        self,
        kinds: StageKinds,
        queries: FloatArray,
        lost: FloatArray,
        uneven: FloatArray,
        *,
        longer_prompts: bool = True,
        sigmas: float = 1.0,
    ) -> FloatArray:
        """Time for a micro-batch that is so many standard deviations of tokens longer than the mean.

        So many more queries, and queries that much longer, as variances go. `lost` is the variance of the
        queries lost in a cycle per encoded query, `uneven` that from a batch that does not divide.
        """
        serving, lengths = self.serving, self.serving.lengths
        mean, square = serving.mean_input, lengths.mean_square_input
        # What one micro-batch loses more than the mean the others lose less: their difference counts.
        counts = queries * lost + uneven
        variance = queries * lengths.std_input**2 + counts * mean**2
        # Some tokens are left, however short.
        deviation = np.maximum(sigmas * np.sqrt(variance), -0.9 * queries * mean)
        share = np.divide(counts * mean**2, variance, out=np.zeros_like(variance), where=variance > 0)
        more = queries + deviation * share / mean
        squares = more * square
        if longer_prompts:
            squares = squares + deviation * (1 - share) * square_per_token(serving)
            squares = np.maximum(squares, (queries * mean + deviation) ** 2 / more)
        return serving.tables.encode_ragged_s(
            kinds, more, queries + deviation / mean, np.sqrt(squares / more)
        )

    def _lost_at(self, n_d: IntArray) -> FloatArray:
        return np.asarray(self._lost_variance[np.minimum(n_d, len(self._lost_variance)) - 1])

    @cached_property
    def _least_lost(self) -> FloatArray:
        return range_minima(self._lost_variance[None, :])

    @cached_property
    def _lost_variance(self) -> FloatArray:
        """Variance of the queries that a micro-batch loses in a cycle, per encoded query, by N_D from 1 on.

        Micro-batches are filled up to the same size, so each has so many places that are taken anew after
        c = ceil(D / N_D) cycles, independent of each other: in a cycle with chance 1 / E[c] (renewal theory).
        Where all queries take as many cycles, micro-batches stay as they were first dealt.
        """
        survival, most = self.serving.completion.survival, self.serving.pool_tables.most
        return np.asarray([_lost(survival[::n_d]) for n_d in range(1, most + 1)])


def _lost(alive: FloatArray) -> float:
    """1 - 1 / E[c] from P(c > k), k = 1, 2, ..; a query without iterations leaves its place after a cycle."""
    later = alive[1:]
    varies = bool(((later > 0) & (later < 1 - 1e-9)).any())
    return 1 - 1 / (1 + float(later.sum())) if varies else 0.0
