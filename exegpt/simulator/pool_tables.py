"""What a pool holds under every N_D, with minima and maxima over ranges of N_D for bounds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import IntArray
from exegpt.simulator.curves import range_minima, range_minimum
from exegpt.workload.completion import Completion

# Iterations with at least this share of the mean active count are called busy, once for each share.
CUTS = (0.0, 0.1, 0.4)

# Per encoded query, by N_D; `own` is what was generated, and `inputs` the prompts, of `context`.
_COLUMNS = (
    "active_first active_last active_sum "
    "context_least context_most context_sum "
    "own_least own_most own_sum "
    "inputs_least inputs_most inputs_sum "
    "pool_mean pool_variance"
).split() + [f"{name}_{k}" for k in range(len(CUTS)) for name in ("busy_count", "busy_sum", "busy_least")]


class PoolTables:
    """Pool figures per encoded query for N_D = 1..max D; index 0 is N_D = 1.

    Larger N_D than the longest query's iterations change nothing but add empty iterations.
    """

    def __init__(self, completion: Completion) -> None:
        self.most = max(completion.max_iterations, 1)
        self._completion = completion

    @cached_property
    def _table(self) -> Mapping[str, FloatArray]:
        rows = [self._row(n_d) for n_d in range(1, self.most + 1)]
        return dict(zip(_COLUMNS, np.asarray(rows).T, strict=True))

    def _row(self, n_d: int) -> tuple[float, ...]:
        completion = self._completion
        active, context = completion.active_per_query(n_d), completion.context_per_query(n_d)
        inputs = completion.inputs_per_query(n_d)
        figures: list[float] = [active[0], active[-1], active.sum()]
        for values in (context, context - inputs, inputs):
            figures += [values.min(), values.max(), values.sum()]
        figures += completion.pool_tokens_moments(n_d)
        for cut in CUTS:
            busy = active[active >= cut * active.mean()]
            figures += [len(busy), busy.sum(), busy.min()]
        return tuple(figures)

    def at(self, column: str, n_d: IntArray) -> FloatArray:
        """A figure at each N_D."""
        return np.asarray(self._table[column][np.minimum(n_d, self.most) - 1])

    @cached_property
    def _least(self) -> dict[str, FloatArray]:
        return {}

    def least(self, column: str, low: IntArray, high: IntArray) -> FloatArray:
        """Least of a figure over low <= N_D <= high."""
        return self._extreme(column, low, high, 1.0)

    def greatest(self, column: str, low: IntArray, high: IntArray) -> FloatArray:
        """Greatest of a figure over low <= N_D <= high."""
        return -self._extreme(column, low, high, -1.0)

    def _extreme(self, column: str, low: IntArray, high: IntArray, sign: float) -> FloatArray:
        key = f"{sign}{column}"
        if key not in self._least:
            self._least[key] = range_minima(sign * self._table[column][None, :])
        first, last = (np.minimum(n, self.most) - 1 for n in (low, high))
        return range_minimum(self._least[key], 0, first, last)
