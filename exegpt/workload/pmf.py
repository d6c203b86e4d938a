"""Probability mass functions over whole numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exegpt.errors import DistributionError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SUM_TOLERANCE = 1e-9
# A cumulated sum of 1e5 float64 terms is off by about 1e-12; this much of it is rounding.
CDF_ROUNDING = 1e-11


def checked_pmf(name: str, values: FloatArray) -> FloatArray:
    """A read-only copy of `values` without trailing zeros, summing to 1.

    Parameters
    ----------
    name : str
        What the lengths are, for messages.
    values : float array, shape (max + 1,)
        Probability of each number of tokens; index 0 carries none.

    Raises
    ------
    DistributionError
        If `values` is empty, has a negative or undefined entry, mass at 0, or a sum that is not 1
        within 1e-9.
    """
    pmf = np.array(values, dtype=np.float64)
    if pmf.ndim != 1 or pmf.size == 0:
        raise DistributionError(
            f"{name}: expected a list of probabilities, found an array of shape {pmf.shape}"
        )
    if not np.isfinite(pmf).all():
        at = int(np.flatnonzero(~np.isfinite(pmf))[0])
        raise DistributionError(f"{name}: the probability of {at} tokens is {pmf[at]}; it must be a number")
    if (pmf < 0).any():
        at = int(np.flatnonzero(pmf < 0)[0])
        raise DistributionError(
            f"{name}: the probability of {at} tokens is {pmf[at]:g}; it must not be negative"
        )
    total = float(pmf.sum())
    if total == 0:
        raise DistributionError(f"{name}: no length has any probability")
    if abs(total - 1) > SUM_TOLERANCE:
        raise DistributionError(
            f"{name}: probabilities sum to {total:.12g}, not to 1 within {SUM_TOLERANCE:g}; "
            "divide them by their sum"
        )
    if pmf[0] > 0:
        raise DistributionError(
            f"{name}: length 0 has probability {pmf[0]:g}; a request has at least one token on either side. "
            "Leave such requests out."
        )
    pmf = pmf[: int(np.flatnonzero(pmf)[-1]) + 1] / total
    pmf.setflags(write=False)
    return pmf


def percentile(pmf: FloatArray, q: float) -> int:
    """Smallest length whose cumulated probability reaches `q` per cent.

    Raises
    ------
    DistributionError
        If `q` is not in (0, 100].
    """
    if not 0 < q <= 100:
        raise DistributionError(f"percentile {q} of lengths: must lie in (0, 100]")
    if q == 100:
        return int(np.flatnonzero(pmf)[-1])
    return int(np.searchsorted(np.cumsum(pmf), q / 100 - CDF_ROUNDING))


def fixed_pmf(num_tokens: int) -> FloatArray:
    """All mass on one length of at least 1 token; shape (num_tokens + 1,)."""
    if num_tokens < 1:
        raise DistributionError(f"fixed length {num_tokens}: must be at least 1 token")
    pmf = np.zeros(num_tokens + 1)
    pmf[num_tokens] = 1.0
    return pmf


def empirical_pmf(values: Sequence[int] | IntArray) -> FloatArray:
    """Relative frequencies of observed lengths, each at least 1 token; shape (max + 1,).

    Raises
    ------
    DistributionError
        If there are no values, or one is no whole number or below 1.
    """
    lengths = np.asarray(values)
    if lengths.size == 0:
        raise DistributionError("observed lengths: there are none")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise DistributionError(f"observed lengths: expected whole numbers, found {lengths.dtype}")
    if lengths.min() < 1:
        raise DistributionError(
            f"observed lengths: {lengths.min()} is below 1 token; leave such requests out"
        )
    return np.bincount(lengths.ravel()) / lengths.size


def truncated_normal_pmf(
    mean: float, std: float, maximum: int, *, minimum: float = 0.0
) -> tuple[FloatArray, str | None]:
    """Normal lengths on [minimum, maximum], rounded up to whole tokens.

    Parameters
    ----------
    mean, std : float
        Moments in tokens *after* truncation, before rounding. Where no truncated normal has them they
        are the parameters of the normal before truncation, and a note says so.
    maximum : int
        Largest length, tokens.
    minimum : float
        Lower end of the continuous variable; the smallest length is the next whole token above.

    Returns
    -------
    pmf : float array, shape (maximum + 1,)
    note : str or None
        Set if the moments could not be met.

    Raises
    ------
    DistributionError
        If `std` is negative, or `mean` or `minimum` lies outside the range.

    Notes
    -----
    Paper, table 3. Rounding up reproduces its five 99th percentiles (63, 292, 417, 137, 579); it
    lifts the mean by about half a token.
    """
    if maximum < 1 or not 0 <= minimum < maximum:
        raise DistributionError(
            f"lengths from {minimum} to {maximum} tokens: need 0 <= minimum < maximum, maximum >= 1"
        )
    if not minimum < mean <= maximum:
        raise DistributionError(f"mean length {mean} must lie in ({minimum:g}, {maximum}] tokens")
    if not 0 <= std < math.inf:
        raise DistributionError(f"standard deviation {std} of a length must be a number of at least 0 tokens")
    if std == 0:
        pmf = np.zeros(maximum + 1)
        pmf[math.ceil(mean)] = 1.0
        return pmf, None
    parent = _parent_normal(mean, std, minimum, float(maximum))
    if parent is not None:
        return _discretise(*parent, minimum, maximum), None
    pmf = _discretise(mean, std, minimum, maximum)
    lengths = np.arange(maximum + 1)
    mean_after = float(pmf @ lengths)
    std_after = math.sqrt(float(pmf @ (lengths - mean_after) ** 2))
    note = (
        f"no normal truncated to [{minimum:g}, {maximum}] has mean {mean:g} and standard deviation {std:g}; "
        "they are taken as those of the normal before truncation "
        f"(after it: {mean_after:.1f} and {std_after:.1f})"
    )
    return pmf, note


def _parent_normal(mean: float, std: float, low: float, high: float) -> tuple[float, float] | None:
    """Mean and standard deviation before truncation to [low, high] that give `mean` and `std` after it.

    Among all densities on the range with these two moments, exp(a z + b z^2) with z = (x - mean) / std
    has the most entropy; a and b minimise the convex log integral(exp(a z + b z^2)) - b. It is a
    truncated normal exactly if b < 0, which is how an impossible pair is told.
    """
    # Any truncated normal spreads less than an exponential, whose spread is its distance to the end.
    if std >= min(mean - low, high - mean):
        return None
    # Beyond 40 deviations such a density holds less than exp(-40) of its mass.
    z_low, z_high = max((low - mean) / std, -40.0), min((high - mean) / std, 40.0)
    nodes, weights = np.polynomial.legendre.leggauss(600)
    z = z_low + (nodes + 1) / 2 * (z_high - z_low)
    powers = np.stack([z, z * z])
    target = np.array([0.0, 1.0])

    def dual(x: FloatArray) -> tuple[float, FloatArray]:
        exponent = x @ powers
        top = float(exponent.max())
        density = weights * np.exp(exponent - top)
        total = float(density.sum())
        return top + math.log(total) - float(x @ target), density / total

    x = np.array([0.0, -0.5])
    value, density = dual(x)
    for _ in range(200):
        moments = powers @ density
        gradient = moments - target
        if np.abs(gradient).max() < 1e-12:
            break
        centred = powers - moments[:, None]
        step = np.linalg.solve((centred * density) @ centred.T, -gradient)
        size = 1.0
        # Halve the Newton step until the dual falls; near the optimum it can only stay equal.
        while size > 1e-9:
            trial_value, trial_density = dual(x + size * step)
            if trial_value <= value + 1e-4 * size * float(gradient @ step) + 1e-15:
                break
            size /= 2
        x, value, density = x + size * step, trial_value, trial_density
    if x[1] > -1e-9:
        return None
    variance = 1 / (-2 * float(x[1]))
    return mean + std * float(x[0]) * variance, std * math.sqrt(variance)


def _discretise(parent_mean: float, parent_std: float, minimum: float, maximum: int) -> FloatArray:
    """Mass of the normal truncated to [minimum, maximum] in each (k - 1, k]; shape (maximum + 1,)."""
    edges = np.clip(np.arange(-1, maximum + 1, dtype=np.float64), minimum, maximum)
    z = (edges - parent_mean) / parent_std
    # Masses are differences of whichever tail is small where the mass is: relative to the tail at the
    # near end they keep their digits even when the parent's mean lies far outside the range.
    upper = parent_mean < (minimum + maximum) / 2
    log_tail = _log_normal_cdf(-z if upper else z)
    tail = np.exp(log_tail - log_tail.max())
    pmf: FloatArray = np.abs(np.diff(tail))
    total: float = pmf.sum()
    return pmf / total


# Below this math.erfc leaves the range of floats; the tail's series is exact to 1e-12 there.
_SERIES_BELOW = -37.0


def _log_normal_cdf(z: FloatArray) -> FloatArray:
    """Logarithm of the standard normal's distribution function.

    scipy.special.log_ndtr, whose import would take a fifth of the time of a whole planning job.
    """
    return np.array([_log_tail(float(value)) for value in z])


def _log_tail(z: float) -> float:
    if z > _SERIES_BELOW:
        return math.log(math.erfc(-z / math.sqrt(2)) / 2)
    # Mills' ratio: 1 - 1/z^2 + 3/z^4 - 15/z^6 + 105/z^8.
    square = z * z
    series = (((105 / square - 15) / square + 3) / square - 1) / square
    return -square / 2 - math.log(-z) - math.log(2 * math.pi) / 2 + math.log1p(series)
