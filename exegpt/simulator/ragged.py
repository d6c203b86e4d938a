"""How much unequal micro-batches stall each other: mean longest paths, and mean longest of several jobs."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from exegpt.profiler.grid import FloatArray

IntArray = NDArray[np.int64]


def ragged_gains_s(encode_s: FloatArray, deviation_s: FloatArray, num_jobs: int) -> FloatArray:
    """How much longer than with equal micro-batches the longest path of an encode phase is.

    Parameters
    ----------
    encode_s, deviation_s : float arrays, shape (..., P)
        Mean stage times of a micro-batch, and their deviation: one that is longer is so on every stage.
    num_jobs : int
        Micro-batches of the phase.

    Returns
    -------
    float array, shape (..., P, P)
        Of paths from stage i to stage j; zero below the diagonal.

    Notes
    -----
    A path does all jobs on the slowest of its stages, which it comes to over ever slower ones and leaves over
    ever faster ones. From one of these stages to the next it goes with one long job. Of those ahead of that
    job (behind it, once past the slowest) each is done on the faster of the two, which is what the long job's
    advantage is weighed against.
    """
    shape = encode_s.shape
    times, deviation = encode_s.reshape(-1, shape[-1]), deviation_s.reshape(-1, shape[-1])
    slower, up_s = _next_slower(times, deviation, num_jobs)
    backwards = _next_slower(times[:, ::-1], deviation[:, ::-1], num_jobs, or_equal=True)
    # The last stage in front that is no faster, and what going on from there gains.
    before, down_s = shape[-1] - 1 - backwards[0][:, ::-1], backwards[1][:, ::-1]
    gains, row = np.zeros((len(times), shape[-1], shape[-1])), np.arange(len(times))
    for i in reversed(range(shape[-1])):
        for j in range(i + 1, shape[-1]):
            climbs = slower[:, i] <= j
            up = up_s[:, i] + gains[row, np.minimum(slower[:, i], j), j]
            gains[:, i, j] = np.where(climbs, up, gains[row, i, np.maximum(before[:, j], i)] + down_s[:, j])
    return gains.reshape(*shape, shape[-1])


def _next_slower(
    times_s: FloatArray, deviation_s: FloatArray, num_jobs: int, *, or_equal: bool = False
) -> tuple[IntArray, FloatArray]:
    """The next slower stage (P if there is none), and what a long job gains on the way to it; (n, P)."""
    count, num_stages = times_s.shape
    ends = np.concatenate([np.zeros((count, 1)), np.cumsum(deviation_s, axis=1)], axis=1)
    slower = np.full(times_s.shape, num_stages)
    for i in range(num_stages):
        for j in reversed(range(i + 1, num_stages)):
            is_slower = times_s[:, j] >= times_s[:, i] if or_equal else times_s[:, j] > times_s[:, i]
            slower[is_slower, i] = j
    passed = np.take_along_axis(ends, slower, axis=1) - ends[:, :-1]
    next_s = np.take_along_axis(times_s, np.minimum(slower, num_stages - 1), axis=1)
    return slower, longest_of(passed, np.maximum(next_s - times_s, 0.0), num_jobs)


def longest_of(spread_s: FloatArray, handicap_s: FloatArray, num_jobs: int | IntArray) -> FloatArray:
    """Mean of max_k (X_k - k handicap) over k = 0..num_jobs - 1, X_k normal around 0; same shape.

    Parameters
    ----------
    spread_s : float array
        Standard deviation of X_k, independent of each other.
    handicap_s : float array
        Not negative, broadcast with `spread_s`.
    num_jobs : int or int array
        Broadcast with the others.
    """
    ratio = np.divide(handicap_s, spread_s, out=np.zeros_like(spread_s), where=spread_s > 0)
    found, row = np.unique(num_jobs, return_inverse=True)
    values = np.stack([_longest_table(m) for m in found.tolist()])
    at = np.clip(np.searchsorted(HANDICAPS, ratio, side="right") - 1, 0, len(HANDICAPS) - 2)
    share = np.minimum((ratio - HANDICAPS[at]) / (HANDICAPS[at + 1] - HANDICAPS[at]), 1.0)
    row = row.reshape(np.shape(num_jobs))
    low, high = values[row, at], values[row, at + 1]
    return np.asarray(spread_s * (low + (high - low) * share))


# Handicaps in spreads that `longest_of` is tabulated at; behind the last it is that of two jobs, near 0.
HANDICAPS = np.concatenate([np.linspace(0, 1, 21), np.linspace(1.25, 4, 12)])


@cache
def _normal() -> tuple[FloatArray, FloatArray]:
    """Points and the standard normal distribution at them."""
    x = np.linspace(-8.0, 8.0, 1601)
    return x, np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in x])


@cache
def _longest_table(num_jobs: int) -> FloatArray:
    """`longest_of` at a spread of 1, by handicap."""
    points, normal = _normal()
    x = points[::10]
    below = np.ones((len(HANDICAPS), len(x)))
    for k in range(num_jobs):
        # Jobs so far behind are never the longest.
        near = k * HANDICAPS < x[-1] - x[0]
        below[near] *= np.interp(x[None, :] + k * HANDICAPS[near, None], points, normal)
    # E[max] = integral of (1 - F) above zero minus the integral of F below it.
    return np.asarray((np.heaviside(x, 0.5) - below).sum(-1) * (x[1] - x[0]))


@cache
def longest_skew(num_jobs: int) -> float:
    """How much a skewness of 1 stretches the mean of the longest of several jobs (Cornish and Fisher).

    With X = Z + skew (Z^2 - 1) / 6 of a normal Z it is (E[(max Z)^2] - 1) / (6 E[max Z]); none for one job.
    """
    if num_jobs == 1:
        return 0.0
    x, normal = _normal()
    share = np.diff(normal**num_jobs)
    middle = (x[1:] + x[:-1]) / 2
    return float(share @ middle**2 - 1) / (6 * float(share @ middle))
