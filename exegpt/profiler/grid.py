"""Isotone piecewise-linear tables over one or two axes, which refuse points outside."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exegpt.errors import ProfileError, ProfileRangeError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Grid:
    """Times in seconds on a rectangular grid, interpolated linearly, never extrapolated.

    Below the first point of the first axis a cost falls in proportion to zero at zero: half a
    query costs half of one. Below the first point of the second axis it stays constant.

    Attributes
    ----------
    name : str
        Operator, for messages.
    axis_names : tuple of str
        What the axes count, e.g. `("queries", "context_tokens")`.
    axes : tuple of float arrays, each strictly increasing and positive
    values_s : float array, shape (len(axes[0]), ...)
        Finite, not negative, and falling along no axis; see `isotone`.
    repaired : float
        Largest relative change that making the measured values isotone took.
    """

    name: str
    axis_names: tuple[str, ...]
    axes: tuple[FloatArray, ...]
    values_s: FloatArray
    repaired: float = 0.0
    _lists: tuple[Any, ...] = field(init=False, repr=False, compare=False, default=())
    _padded: tuple[FloatArray, FloatArray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Scalar lookups are the replay's inner loop; lists are ten times faster there than arrays.
        lists = ([0.0, *self.axes[0].tolist()], *(a.tolist() for a in self.axes[1:]))
        # The point zero with cost zero, in front of the first axis.
        first = np.concatenate([[0.0], self.axes[0]])
        values = np.concatenate([np.zeros((1, *self.values_s.shape[1:])), self.values_s])
        object.__setattr__(self, "_padded", (first, values))
        object.__setattr__(self, "_lists", (*lists, values.tolist()))

    def limit(self, axis: int = 0) -> float:
        """Largest point of an axis."""
        return float(self.axes[axis][-1])

    def covers(self, *points: ArrayLike) -> NDArray[np.bool_]:
        """Which points lie inside the table (broadcast over the axes)."""
        inside = [
            (np.asarray(p) >= 0) & (np.asarray(p) <= a[-1]) for p, a in zip(points, self.axes, strict=True)
        ]
        return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*inside)))

    def at_or_inf(self, *points: ArrayLike) -> FloatArray:
        """Times at the points (not negative), infinity where the table does not cover them."""
        first, values = self._padded
        if len(self.axes) == 1:
            return np.asarray(np.interp(np.asarray(points[0], dtype=np.float64), first, values, right=np.inf))
        x, y = np.broadcast_arrays(*(np.asarray(p, dtype=np.float64) for p in points))
        inside = (x <= first[-1]) & (y <= self.axes[1][-1])
        return np.where(inside, self._bilinear(first, values, x, y), np.inf)

    def _bilinear(self, first: FloatArray, values: FloatArray, x: FloatArray, y: FloatArray) -> FloatArray:
        second = self.axes[1]
        i = np.minimum(np.searchsorted(first, x, side="right"), len(first) - 1) - 1
        s = np.minimum((x - first[i]) / (first[i + 1] - first[i]), 1.0)
        if len(second) == 1:
            return np.asarray(values[i, 0] * (1 - s) + values[i + 1, 0] * s)
        j = np.clip(np.searchsorted(second, y, side="right") - 1, 0, len(second) - 2)
        t = np.clip((y - second[j]) / (second[j + 1] - second[j]), 0.0, 1.0)
        low = values[i, j] * (1 - t) + values[i, j + 1] * t
        high = values[i + 1, j] * (1 - t) + values[i + 1, j + 1] * t
        return np.asarray(low * (1 - s) + high * s)

    def at(self, *points: float) -> float:
        """Time at one point.

        Raises
        ------
        ProfileRangeError
            If the point lies outside the table.
        """
        if len(points) == 1:
            first, values = self._lists
            if not 0 <= points[0] <= first[-1]:
                raise self._outside(points)
            i, s = _cell(first, points[0])
            return float(values[i] * (1 - s) + values[i + 1] * s)
        first, second, values = self._lists
        if not (0 <= points[0] <= first[-1] and 0 <= points[1] <= second[-1]):
            raise self._outside(points)
        i, s = _cell(first, points[0])
        low, high = _along(values[i], second, points[1]), _along(values[i + 1], second, points[1])
        return low * (1 - s) + high * s

    def _outside(self, points: Sequence[float]) -> ProfileRangeError:
        for point, axis, name in zip(points, self.axes, self.axis_names, strict=True):
            if not 0 <= point <= axis[-1]:
                return ProfileRangeError(
                    f"{name}={point:g} is outside 0..{axis[-1]:g}, the range profiled for {self.name}. "
                    "Profile further (profile.budget_s) or ask for less."
                )
        raise AssertionError(f"{self.name}: {points} lie inside")


def _cell(axis: list[float], point: float) -> tuple[int, float]:
    i = min(bisect_right(axis, point) - 1, len(axis) - 2)
    return i, (point - axis[i]) / (axis[i + 1] - axis[i])


def _along(row: list[float], axis: list[float], point: float) -> float:
    if len(axis) == 1 or point <= axis[0]:
        return row[0]
    j, t = _cell(axis, point)
    return row[j] * (1 - t) + row[j + 1] * t


def isotone(values: FloatArray) -> FloatArray:
    """Nearest-in-spirit table that falls along no axis.

    The mean of the least isotone table above the values and the greatest below them: noise moves
    a point to neither side on average, which a running maximum would.
    """
    above, below = values, values
    for axis in range(values.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    return np.asarray((above + below) / 2)


def make_grid(name: str, axis_names: Sequence[str], axes: Sequence[ArrayLike], values: ArrayLike) -> Grid:
    """Check measured times and make them isotone.

    Raises
    ------
    ProfileError
        If shapes differ, an axis does not increase from above zero, or a time is NaN or negative.
    """
    arrays = tuple(np.asarray(axis, dtype=np.float64) for axis in axes)
    times = np.asarray(values, dtype=np.float64)
    if times.shape != tuple(len(a) for a in arrays) or times.size == 0 or len(arrays) not in (1, 2):
        raise ProfileError(f"{name}: values have shape {times.shape}, axes {[len(a) for a in arrays]}")
    for axis_name, axis in zip(axis_names, arrays, strict=True):
        if not (np.all(np.isfinite(axis)) and axis[0] > 0 and np.all(np.diff(axis) > 0)):
            raise ProfileError(f"{name}: axis {axis_name} must increase strictly from above 0")
    if not np.all(np.isfinite(times)) or np.any(times < 0):
        raise ProfileError(f"{name}: times must be finite and not negative")
    smooth = isotone(times)
    change = float(np.max(np.abs(smooth - times) / np.maximum(times, 1e-12)))
    return Grid(name, tuple(axis_names), arrays, smooth, change)
