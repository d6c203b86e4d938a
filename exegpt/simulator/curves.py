"""Stacks of piecewise linear functions of one or two numbers, with lower bounds over ranges.

All functions of a stack share their points, so a place is looked up once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from exegpt.profiler.grid import FloatArray, Grid
from exegpt.simulator.choice import IntArray

# Convex functions start at every so many points: a range begins at the start at or in front of it.
HULL_STEP = 4

Place = tuple[IntArray, FloatArray]


class Part(Protocol):
    """A summand of a function: where its slope changes, how far it reaches, its value."""

    def points(self, limit: float) -> FloatArray: ...

    def limit(self) -> float: ...

    def at(self, queries: FloatArray) -> FloatArray: ...


class CurveTable:
    """Functions of a number of queries, each a sum of parts; zero at zero, never falling.

    Attributes
    ----------
    x : float array, shape (k,)
        Points, from 0 on.
    y : float array, shape (functions, k)
    """

    def __init__(self, functions: Sequence[Sequence[Part]]) -> None:
        parts = [part for function in functions for part in function]
        limit = min(part.limit() for part in parts)
        points = np.unique(np.concatenate([[0.0, limit], *(part.points(limit) for part in parts)]))
        self.x = points[points <= limit]
        self.y = np.asarray(
            [np.sum([part.at(self.x) for part in function], axis=0) for function in functions]
        )
        self.limit = limit
        starts = -(-len(self.x) // HULL_STEP)
        self._hulls = np.zeros((len(self.y), starts, len(self.x)))
        self._turning = np.zeros((len(self.y), starts))
        self._made = np.zeros(len(self.y), dtype=bool)

    def locate(self, queries: FloatArray) -> Place:
        """Cell and place within it; the place is infinite beyond the table."""
        cell = np.clip(np.searchsorted(self.x, queries, side="right") - 1, 0, len(self.x) - 2)
        share = (queries - self.x[cell]) / (self.x[cell + 1] - self.x[cell])
        return cell, np.where(queries <= self.limit * (1 + 1e-12), share, np.inf)

    def at(self, function: IntArray, place: Place) -> FloatArray:
        """Values of `function` (n, kinds) at a place (n,)."""
        cell, share = place[0][:, None], place[1][:, None]
        low = self.y[function, cell]
        with np.errstate(invalid="ignore"):
            value = low + (self.y[function, cell + 1] - low) * share
        return np.where(np.isfinite(share), value, np.inf)

    def least_ratio(self, function: IntArray, low: FloatArray, high: FloatArray) -> FloatArray:
        """Least f(x) / x over low <= x <= high; infinite where even `low` is beyond the table.

        On a piece a + b x the ratio is monotone, so its least value is at an end or a point between.
        """
        inside = low <= self.limit * (1 + 1e-12)
        low, high = np.broadcast_arrays(*(np.minimum(x, self.limit) for x in (low, high)))
        ends = np.minimum(self._ratio(function, low), self._ratio(function, high))
        first = np.searchsorted(self.x, low, side="left")
        last = np.searchsorted(self.x, high, side="right") - 1
        between = np.where(last >= first, self._range_least(function, first, last), np.inf)
        return np.where(inside, np.minimum(ends, between), np.inf)

    def _ratio(self, function: IntArray, x: FloatArray) -> FloatArray:
        cell = np.clip(np.searchsorted(self.x, x, side="right") - 1, 0, len(self.x) - 2)
        share = (x - self.x[cell]) / (self.x[cell + 1] - self.x[cell])
        low = self.y[function, cell]
        value = low + (self.y[function, cell + 1] - low) * share
        # At zero itself: the slope of the first piece.
        slope = self.y[function, 1] / self.x[1]
        return np.asarray(np.divide(value, x, out=slope.copy() + 0 * value, where=x > 0))

    @cached_property
    def _least(self) -> FloatArray:
        ratios = np.concatenate([np.full((len(self.y), 1), np.inf), self.y[:, 1:] / self.x[1:]], axis=1)
        return range_minima(ratios)

    def _range_least(self, function: IntArray, first: IntArray, last: IntArray) -> FloatArray:
        return range_minimum(self._least, function, first, np.maximum(last, first))

    def _convex(self, function: IntArray) -> tuple[FloatArray, FloatArray]:
        """Greatest convex functions below each function behind each start, and where f / x is least.

        Shapes (functions, starts, k) and (functions, starts); those asked for are made first.
        """
        for missing in np.unique(function[~self._made[function]]).tolist():
            hulls = _hulls(self.x, self.y[missing], HULL_STEP)
            starts = np.arange(0, len(self.x), HULL_STEP)[:, None]
            behind = (np.arange(len(self.x)) >= starts) & (self.x > 0)
            ratio = np.divide(hulls, self.x, out=np.full_like(hulls, np.inf), where=behind)
            self._hulls[missing] = hulls
            self._turning[missing] = self.x[np.argmin(ratio, axis=-1)]
            self._made[missing] = True
        return self._hulls, self._turning

    def convex_ratio(
        self, function: IntArray, start: IntArray, low: FloatArray, high: FloatArray
    ) -> FloatArray:
        """Least h(z) / z over low <= z <= high, h the greatest convex function below f behind point `start`.

        For numbers x_u behind that point with mean z Jensen's inequality gives sum f(x_u) >= n h(z). With h
        convex, z h'(z) - h(z) never falls, so h(z) / z falls up to one point and rises behind it.
        """
        hulls, turning = self._convex(function)
        start = np.broadcast_to(start // HULL_STEP, function.shape)
        z = np.clip(turning[function, start], low, np.maximum(np.minimum(high, self.limit), low))
        # Means beyond the table cannot come from numbers inside it.
        inside = z <= self.limit * (1 + 1e-12)
        z = np.minimum(z, self.limit)
        cell = np.clip(np.searchsorted(self.x, z, side="right") - 1, 0, len(self.x) - 2)
        cell = np.maximum(cell, np.minimum(start * HULL_STEP, len(self.x) - 2))
        share = (z - self.x[cell]) / (self.x[cell + 1] - self.x[cell])
        value = hulls[function, start, cell] * (1 - share) + hulls[function, start, cell + 1] * share
        ratio = np.divide(value, z, out=np.zeros_like(value), where=z > 0)
        return np.where(inside, np.maximum(ratio, 0.0), np.inf)


class AttentionTable:
    """Times by degree, queries and summed context; from grids that share no axes they are resampled."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        limits = [min(grid.limit(axis) for grid in grids) for axis in (0, 1)]
        points = [np.unique(np.concatenate([grid.axes[axis] for grid in grids])) for axis in (0, 1)]
        self.q = np.append(0.0, points[0][points[0] <= limits[0]])
        self.n = points[1][points[1] <= limits[1]]
        self.values = np.asarray([g.at_or_inf(self.q[:, None], self.n[None, :]) for g in grids])

    def at(self, degree: IntArray, queries: FloatArray, context: FloatArray) -> FloatArray:
        """Times, broadcast; infinite beyond the tables, constant below their first context."""
        inside = (queries <= self.q[-1]) & (context <= self.n[-1])
        i = np.clip(np.searchsorted(self.q, queries, side="right") - 1, 0, len(self.q) - 2)
        s = (queries - self.q[i]) / (self.q[i + 1] - self.q[i])
        if len(self.n) == 1:
            low, high = self.values[degree, i, 0], self.values[degree, i + 1, 0]
        else:
            j = np.clip(np.searchsorted(self.n, context, side="right") - 1, 0, len(self.n) - 2)
            t = np.clip((context - self.n[j]) / (self.n[j + 1] - self.n[j]), 0.0, 1.0)
            low = self.values[degree, i, j] * (1 - t) + self.values[degree, i, j + 1] * t
            high = self.values[degree, i + 1, j] * (1 - t) + self.values[degree, i + 1, j + 1] * t
        return np.where(inside, low + (high - low) * s, np.inf)

    @cached_property
    def _least(self) -> FloatArray:
        return range_minima(self.values / self.n)

    def least_ratio(
        self, degree: IntArray, queries: FloatArray, low: FloatArray, high: FloatArray
    ) -> FloatArray:
        """Least time per context token for at least `queries` queries and low <= context <= high.

        More queries cost no less, so the row of points at or below `queries` is a lower bound; along it the
        ratio is least at an end or at a point between. Infinite where the least corner is beyond the table.
        """
        inside = (queries <= self.q[-1]) & (low <= self.n[-1])
        i = np.clip(np.searchsorted(self.q, queries, side="right") - 1, 0, len(self.q) - 1)
        low, high = np.broadcast_arrays(np.minimum(low, self.n[-1]), np.minimum(high, self.n[-1]))
        first = np.searchsorted(self.n, low, side="left")
        last = np.searchsorted(self.n, high, side="right") - 1
        degree, i = np.broadcast_arrays(degree, i)
        row = degree * len(self.q) + i
        flat = self._flat
        between = range_minimum(flat, row, np.minimum(first, len(self.n) - 1), np.maximum(last, first))
        between = np.where(last >= first, between, np.inf)
        ends = np.minimum(self._ratio(degree, i, low), self._ratio(degree, i, high))
        return np.where(inside, np.minimum(ends, between), np.inf)

    @cached_property
    def _lines(self) -> tuple[FloatArray, FloatArray]:
        """A line below each row behind each point: its value at no context, and its slope; (degree, q, n)."""
        rise = self.values[..., None, :] - self.values[..., :, None]
        run = self.n[None, :] - self.n[:, None]
        secants = np.divide(rise, run, out=np.full_like(rise, np.inf), where=run > 0)
        slope = secants.min(-1)
        # Behind the last point there is nothing: any line through it will do.
        slope[..., -1] = 0.0
        return self.values - slope * self.n, slope

    def line(self, degree: IntArray, queries: FloatArray, low: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Value at no context and slope of a line that no time for contexts of at least `low` lies below.

        It passes through the point at or in front of `low` with the least slope to any point behind, for the
        row of points at or below `queries`. Flat where `low` is in front of all points.
        """
        i = np.clip(np.searchsorted(self.q, queries, side="right") - 1, 0, len(self.q) - 1)
        j = np.searchsorted(self.n, low, side="right") - 1
        degree, i, j = np.broadcast_arrays(degree, i, j)
        start, slope = (table[degree, i, np.maximum(j, 0)] for table in self._lines)
        return np.where(j >= 0, start, self.values[degree, i, 0]), np.where(j >= 0, slope, 0.0)

    @cached_property
    def _flat(self) -> FloatArray:
        return self._least.reshape(len(self._least), -1, len(self.n))

    def _ratio(self, degree: IntArray, i: IntArray, n: FloatArray) -> FloatArray:
        if len(self.n) == 1:
            value = self.values[degree, i, 0]
        else:
            j = np.clip(np.searchsorted(self.n, n, side="right") - 1, 0, len(self.n) - 2)
            t = np.clip((n - self.n[j]) / (self.n[j + 1] - self.n[j]), 0.0, 1.0)
            value = self.values[degree, i, j] * (1 - t) + self.values[degree, i, j + 1] * t
        return np.asarray(np.divide(value, n, out=np.full_like(value, np.inf), where=n > 0))


def range_minima(values: FloatArray) -> FloatArray:
    """Minima of 1, 2, 4, .. neighbours along the last axis, for `range_minimum`; shape (levels, *shape)."""
    size = values.shape[-1]
    levels = np.empty((size.bit_length(), *values.shape))
    levels[0] = values
    for k in range(1, len(levels)):
        width = 1 << (k - 1)
        # What reaches over the end is never asked for.
        levels[k] = levels[k - 1]
        np.minimum(levels[k - 1, ..., :-width], levels[k - 1, ..., width:], out=levels[k, ..., :-width])
    return levels


def range_minimum(levels: FloatArray, row: IntArray | int, first: IntArray, last: IntArray) -> FloatArray:
    """Minimum of each row's entries first..last (both in it, first <= last); rows of a two-axis table."""
    level = np.frexp(last - first + 1)[1] - 1
    return np.asarray(np.minimum(levels[level, row, first], levels[level, row, last + 1 - (1 << level)]))


def _hulls(x: FloatArray, y: FloatArray, step: int) -> FloatArray:
    """Greatest convex function below (x, y) restricted to x[start:], for every `step`-th start; (starts, k).

    Built from the end: a point in front of a hull joins it and takes off the points that the line to a
    later one passes below. Entries in front of the start are zero and have no meaning.
    """
    xs, ys = x.tolist(), y.tolist()
    hulls = np.zeros((-(-len(xs) // step), len(xs)))
    chain: list[int] = []
    for start in range(len(xs) - 1, -1, -1):
        while len(chain) >= 2:
            a, b = chain[-1], chain[-2]
            if (ys[a] - ys[start]) * (xs[b] - xs[start]) < (ys[b] - ys[start]) * (xs[a] - xs[start]):
                break
            chain.pop()
        chain.append(start)
        if start % step == 0:
            at = chain[::-1]
            hulls[start // step, start:] = np.interp(x[start:], x[at], y[at])
    return hulls
