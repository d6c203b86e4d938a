"""Iterations of a cycle in blocks: what a pool holds changes little from one iteration to the next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import IntArray
from exegpt.simulator.curves import range_minima, range_minimum
from exegpt.workload.completion import Completion

# Iterations 1, 2, .. of a cycle are blocks of their own up to this one. Behind it blocks start by this factor
# later than the one before, since a pool empties ever more slowly, but none is longer than this part of the
# longest query's iterations. Costs are linear within a block but for the table's points in it, so the error
# is of second order in what a block spans; a test holds it against every iteration by itself.
SINGLE_ITERATIONS = 8
BLOCK_GROWTH = 1.25
LONGEST_BLOCK = 1 / 24


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of candidates; arrays of shape (n, blocks), zero behind a candidate's last block.

    Attributes
    ----------
    weights : float array
        Iterations in a block.
    active, context, inputs : float arrays
        Per encoded query, means over a block's iterations; see `Completion`.
    """

    weights: FloatArray
    active: FloatArray
    context: FloatArray
    inputs: FloatArray

    def place(self, iteration: IntArray) -> tuple[IntArray, FloatArray]:
        """Block that holds each candidate's iteration (from 1 on), and how much of it lies behind that."""
        ends = np.cumsum(self.weights, axis=1)
        at = (ends < iteration[:, None]).sum(axis=1)
        size = np.take_along_axis(self.weights, at[:, None], axis=1)[:, 0]
        end = np.take_along_axis(ends, at[:, None], axis=1)[:, 0]
        return at, (end - iteration) / size


@dataclass(frozen=True, slots=True)
class LeastBlocks:
    """Least of what the blocks of several N_D hold, per encoded query.

    Attributes
    ----------
    weights : float array, shape (n, blocks)
        Iterations but the last that every N_D of a range has in a block; zero where there is none.
    inner : float array, shape (n, blocks, 3)
        Least active queries, context and inputs of a block that holds those iterations.
    last, every : float arrays, shape (n, 3)
        The same of the last iteration, and of every block.
    """

    weights: FloatArray
    inner: FloatArray
    last: FloatArray
    every: FloatArray


class IterationBlocks:
    """Blocks of the cycles of every N_D, made when asked for.

    All N_D have the same blocks, as far as they reach; the last iteration is always a block of its own.
    Iterations behind the longest query's end are left out.

    Parameters
    ----------
    completion : Completion
    most : int
        Greatest N_D that makes a difference.
    separate_inputs : bool
        Whether prompts are attended to apart from what was generated, so that each has its own least value.
    """

    def __init__(self, completion: Completion, most: int, *, separate_inputs: bool = False) -> None:
        self._completion = completion
        self._separate_inputs = separate_inputs
        self._most = most
        self._starts = _starts(most)
        self._table = np.zeros((4, most + 1, len(self._starts) + 1))
        self._made = np.zeros(most + 1, dtype=bool)

    def of(self, n_d: IntArray) -> Blocks:
        """Blocks of candidates with these N_D, as wide as the widest needs."""
        n = np.minimum(n_d, self._most)
        for missing in np.unique(n[~self._made[n]]).tolist():
            self._make(missing)
        return Blocks(*self._table[:, n, : self._count(int(n.max()))])

    def least(self, low: IntArray, high: IntArray) -> LeastBlocks:
        """Least of the blocks of low <= N_D <= high, arrays of shape (n,)."""
        low, high = np.minimum(low, self._most), np.minimum(high, self._most)
        width = self._count(int(low.max())) - 1
        starts = self._starts[:width]
        ends = np.append(self._starts, self._most)[1 : width + 1]
        weights = np.clip(low[:, None] - 1 - starts, 0, ends - starts).astype(np.float64)
        single = low == high
        inner = np.empty((len(low), width, 3))
        if single.any():
            self.of(low[single])
            inner[single] = np.moveaxis(self._table[1:, low[single], :width], 0, -1)
        if not single.all():
            inner[~single] = self._ranged(low[~single], high[~single], weights[~single])
        last, every = self._edges(low, high)
        return LeastBlocks(weights, inner, last, every)

    def _ranged(self, low: IntArray, high: IntArray, weights: FloatArray) -> FloatArray:
        result = np.zeros((*weights.shape, 3))
        rows, blocks = np.nonzero(weights)
        for k in range(3):
            result[rows, blocks, k] = range_minimum(self._minima[k], blocks, low[rows], high[rows])
        return self._joined(result)

    def _edges(self, low: IntArray, high: IntArray) -> FloatArray:
        """Least of the last iteration and of every one, (2, n, 3); the same where N_D is one value."""
        rows = np.arange(6)[:, None]
        least = range_minimum(self._edge_minima, rows, low, high).reshape(2, 3, -1)
        result = self._joined(np.moveaxis(least, 1, -1))
        return np.where((low == high)[:, None], result[:1], result)

    def _joined(self, least: FloatArray) -> FloatArray:
        """Least contexts from what was least."""
        if self._separate_inputs:
            least[..., 1] += least[..., 2]
        return least

    @cached_property
    def _figures(self) -> FloatArray:
        """Active queries, context (or what of it was generated) and inputs, (3, N_D, blocks)."""
        self.of(np.arange(1, self._most + 1))
        figures: FloatArray = self._table[1:].copy()
        if self._separate_inputs:
            figures[1] -= figures[2]
        return figures

    @cached_property
    def _counts(self) -> IntArray:
        """Blocks by N_D, from 0 on."""
        return np.asarray([self._count(n) for n in range(self._most + 1)])

    @cached_property
    def _minima(self) -> list[FloatArray]:
        """Range minima over N_D of each figure; rows are blocks."""
        # What is behind an N_D's blocks, its last iteration included, limits no range.
        absent = np.arange(self._table.shape[2])[:, None] >= self._counts - 1
        return [range_minima(np.where(absent, np.inf, part.T)) for part in self._figures]

    @cached_property
    def _edge_minima(self) -> FloatArray:
        """Range minima over N_D of what the last iteration has, then the least block; three rows each."""
        last = self._figures[:, np.arange(self._most + 1), self._counts - 1]
        absent = np.arange(self._table.shape[2]) >= self._counts[:, None]
        least = np.where(absent, np.inf, self._figures).min(-1)
        return range_minima(np.concatenate([last, least]))

    def _count(self, n_d: int) -> int:
        """Blocks of a cycle of N_D iterations; the last iteration is one."""
        return int(np.searchsorted(self._starts, n_d - 1)) + 1

    def _make(self, n_d: int) -> None:
        starts = np.append(self._starts[: self._count(n_d) - 1], n_d - 1)
        weights = np.diff(np.append(starts, n_d))
        rows = (
            self._completion.active_per_query(n_d),
            self._completion.context_per_query(n_d),
            self._completion.inputs_per_query(n_d),
        )
        self._table[0, n_d, : len(starts)] = weights
        for i, row in enumerate(rows, start=1):
            self._table[i, n_d, : len(starts)] = np.add.reduceat(row, starts) / weights
        self._made[n_d] = True


def _starts(most: int) -> IntArray:
    """Iterations, from 0 on, that blocks start at."""
    starts = list(range(min(SINGLE_ITERATIONS, most)))
    longest = max(int(most * LONGEST_BLOCK), 1)
    while starts[-1] < most:
        starts.append(starts[-1] + min(max(int(starts[-1] * (BLOCK_GROWTH - 1)), 1), longest))
    return np.asarray(starts[:-1])
