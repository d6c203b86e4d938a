"""Iterations of a cycle in blocks: what a pool holds changes little from one iteration to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import IntArray
from exegpt.workload.completion import Completion

# Blocks of a cycle. Costs are linear within a block but for the table's points in it, so the error is of
# second order in what a block spans; a test holds it against every iteration by itself.
NUM_BLOCKS = 24


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


class IterationBlocks:
    """Blocks of the cycles of every N_D, made when asked for.

    The first and the last iteration are blocks of their own; up to `NUM_BLOCKS` iterations all are.
    Iterations behind the longest query's end are left out.
    """

    def __init__(self, completion: Completion, most: int) -> None:
        self._completion = completion
        self._most = most
        self._table = np.zeros((4, most + 1, min(most, NUM_BLOCKS)))
        self._made = np.zeros(most + 1, dtype=bool)

    def of(self, n_d: IntArray) -> Blocks:
        """Blocks of candidates with these N_D, as wide as the widest needs."""
        n = np.minimum(n_d, self._most)
        for missing in np.unique(n[~self._made[n]]).tolist():
            self._make(missing)
        return Blocks(*self._table[:, n, : min(int(n.max()), NUM_BLOCKS)])

    def _make(self, n_d: int) -> None:
        starts = _starts(n_d)
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


def _starts(n_d: int) -> IntArray:
    if n_d <= NUM_BLOCKS:
        return np.arange(n_d)
    inner = np.linspace(1, n_d - 1, NUM_BLOCKS - 1)
    return np.concatenate([[0], np.round(inner).astype(np.int64)])
