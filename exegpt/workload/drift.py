"""Length distributions that have moved away from the planned one (paper, section 7.8: drift)."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from exegpt.errors import ConfigError, DistributionError
from exegpt.workload.lengths import RequestLengths, independent, joint
from exegpt.workload.pmf import FloatArray, IntArray

# Moments of a drifted pmf agree with the wanted ones to this share of a token.
MOMENT_TOLERANCE_TOKENS = 1e-6
MAX_STEPS = 2000
# A skew normal is skewed less than a half normal.
MAX_SKEW = 0.99


def drifted(
    lengths: RequestLengths, *, mean: float = 1.0, std: float = 1.0, skew: float | None = None
) -> RequestLengths:
    """Lengths whose outputs have `mean` times the mean and `std` times the standard deviation.

    Parameters
    ----------
    lengths : RequestLengths
    mean, std : float
        Factors, above 0 and at least 0.
    skew : float, optional
        Give the outputs the shape of a skew normal instead of their own, truncated to the range that
        they have; its skewness before truncation, within -0.99..0.99.

    Returns
    -------
    RequestLengths
        Inputs are as before. Observed pairs keep their inputs and the order of their outputs, and so
        nearly their correlation.

    Raises
    ------
    ConfigError
        If a factor or the skew is out of range.
    DistributionError
        If no such distribution exists: outputs have at least one token.

    Notes
    -----
    Without `skew` every length is moved by one affine map, and its mass shared by the two whole numbers
    around the image in proportion to their nearness, so that the mean is kept; what falls below one token
    becomes one token. The map is corrected for what both do to the moments, which therefore hold
    to 1e-6 tokens, unless the wanted deviation is below that of any whole numbers with this mean. The
    tail may go past the old maximum. Observed pairs move whole, in the same shares up to one pair in each
    direction, so moments hold to about one part in their number.
    """
    _check(mean, std, skew)
    target_mean, target_std = mean * lengths.mean_output, std * lengths.std_output
    description = _description(lengths.description, mean, std, skew)
    if skew is not None:
        pmf = _skew_normal_pmf(target_mean, target_std, skew, math.ceil(mean * lengths.max_output))
        if lengths.pairs is None:
            return independent(lengths.input_pmf, pmf, description=description, notes=lengths.notes)
        return joint(_reshaped(lengths.pairs, pmf), description=description, notes=lengths.notes)
    if mean == std == 1.0:
        return lengths
    support = np.flatnonzero(lengths.output_pmf)
    image = _affine_image(support.astype(np.float64), lengths.output_pmf[support], target_mean, target_std)
    if lengths.pairs is None:
        pmf = _split(image, lengths.output_pmf[support])
        return independent(lengths.input_pmf, pmf, description=description, notes=lengths.notes)
    return joint(_moved(lengths.pairs, support, image), description=description, notes=lengths.notes)


def drift_corners(lengths: RequestLengths, margin: float) -> list[RequestLengths]:
    """Output distributions at the rim of a drift: mean and deviation by (1 +- margin), alone and together.

    Parameters
    ----------
    margin : float
        In [0, 1); 0 gives the planned lengths alone.

    Returns
    -------
    list of RequestLengths
        Eight distributions. A schedule's latency is worst at one of them, not inside: percentiles
        rise with both moments and the load with the mean. A test holds that on a grid.

    Raises
    ------
    ConfigError
        If the margin is out of range.
    DistributionError
        If no lengths drift so far, since a request has at least one output token.
    """
    if not 0 <= margin < 1:
        raise ConfigError(f"solver.drift_margin={margin}: must lie in [0, 1), a share of mean and deviation")
    if margin == 0:
        return [lengths]
    factors = (1 - margin, 1.0, 1 + margin)
    try:
        return [drifted(lengths, mean=m, std=s) for m, s in product(factors, factors) if (m, s) != (1.0, 1.0)]
    except DistributionError as error:
        raise DistributionError(f"solver.drift_margin={margin}: {error}") from error


def _check(mean: float, std: float, skew: float | None) -> None:
    if not 0 < mean < math.inf:
        raise ConfigError(f"drift of the mean output length by {mean}: must be a factor above 0")
    if not 0 <= std < math.inf:
        raise ConfigError(
            f"drift of the outputs' standard deviation by {std}: must be a factor of at least 0"
        )
    if skew is not None and not abs(skew) <= MAX_SKEW:
        raise ConfigError(f"skewness {skew} of output lengths: a skew normal has -{MAX_SKEW}..{MAX_SKEW}")


def _description(description: str, mean: float, std: float, skew: float | None) -> str:
    shape = "" if skew is None else f", skew {skew:g}"
    return f"{description}, outputs: mean x {mean:g}, deviation x {std:g}{shape}"


def _moments(pmf: FloatArray) -> tuple[float, float]:
    n = np.arange(len(pmf), dtype=np.float64)
    mean = float(pmf @ n)
    return mean, math.sqrt(float(pmf @ (n - mean) ** 2))


def _split(places: FloatArray, mass: FloatArray) -> FloatArray:
    """Pmf over whole numbers with the mass of each place shared by its two neighbours."""
    low = np.floor(places).astype(np.int64)
    share = places - low
    size = int(low.max()) + 2
    pmf = np.bincount(low, weights=mass * (1 - share), minlength=size)
    pmf = pmf + np.bincount(low + 1, weights=mass * share, minlength=size)
    return np.asarray(pmf / pmf.sum())


def _affine_image(places: FloatArray, mass: FloatArray, mean: float, std: float) -> FloatArray:
    """Images of `places`, at least 1, whose split pmf has the wanted moments."""
    if mean < 1:
        raise DistributionError(f"drift to a mean output of {mean:g} tokens: a request has at least one")
    old_mean = float(mass @ places)
    old_std = math.sqrt(float(mass @ (places - old_mean) ** 2))
    centred = (places - old_mean) / old_std if old_std > 0 else np.zeros_like(places)
    # Whole numbers with this mean spread at least so much.
    fraction = mean % 1
    wanted_std = max(std, math.sqrt(fraction * (1 - fraction)))
    at, scale = mean, std
    image = np.maximum(at + scale * centred, 1.0)
    for _ in range(MAX_STEPS):
        found_mean, found_std = _moments(_split(image, mass))
        off = max(abs(found_mean - mean), abs(found_std - wanted_std))
        if off <= MOMENT_TOLERANCE_TOKENS or (scale == 0 and at == mean):
            return image
        at += mean - found_mean
        # The square: rounding adds to the variance, whatever the scale.
        scale = math.sqrt(max(scale**2 + wanted_std**2 - found_std**2, 0.0))
        image = np.maximum(at + scale * centred, 1.0)
    raise DistributionError(
        f"no drift of the outputs has a mean of {mean:g} and a standard deviation of {std:g} tokens with "
        "at least one token each; choose factors nearer to 1"
    )


def _moved(pairs: IntArray, support: IntArray, image: FloatArray) -> IntArray:
    """Pairs with every output at one of the whole numbers around its image, in the shares of `_split`."""
    # In this order the pairs that go up are spread over outputs, and over inputs of one output.
    order = np.lexsort((pairs[:, 0], pairs[:, 1]))
    outputs = image[np.searchsorted(support, pairs[order, 1])]
    low = np.floor(outputs)
    shares = np.cumsum(outputs - low)
    # Half a pair ahead, so that rounding has no direction.
    counted = np.floor(shares + 0.5)
    up = np.diff(counted, prepend=0.0)
    moved: IntArray = pairs[order].copy()
    moved[:, 1] = (low + up).astype(np.int64)
    return moved


def _reshaped(pairs: IntArray, pmf: FloatArray) -> IntArray:
    """Pairs with outputs drawn anew as the quantiles of `pmf`, in the order that they had."""
    order = np.lexsort((pairs[:, 0], pairs[:, 1]))
    quantiles = (np.arange(len(pairs)) + 0.5) / len(pairs)
    moved: IntArray = pairs[order].copy()
    moved[:, 1] = np.searchsorted(np.cumsum(pmf), quantiles)
    return moved


def _skew_normal_pmf(mean: float, std: float, skew: float, maximum: int) -> FloatArray:
    """Skew normal on [0, maximum], rounded up to whole tokens, with the wanted moments after both."""
    # Imported where it is used: it takes as long to import as the rest of the package.
    from scipy.special import ndtr, owens_t

    if std == 0:
        raise DistributionError(f"skewness {skew:g}: outputs of one length have no shape; leave it out")
    ratio = (2 * abs(skew) / (4 - math.pi)) ** (2 / 3)
    delta = math.copysign(math.sqrt(math.pi / 2 * ratio / (1 + ratio)), skew)
    shape = delta / math.sqrt(1 - delta**2)
    edges = np.arange(maximum + 1, dtype=np.float64)
    at, spread = mean, std
    for _ in range(MAX_STEPS):
        scale = spread / math.sqrt(1 - 2 * delta**2 / math.pi)
        place = at - scale * delta * math.sqrt(2 / math.pi)
        z = (edges - place) / scale
        below = ndtr(z) - 2 * owens_t(z, shape)
        # Length k has the mass of (k - 1, k], and what lies below 0 is cut off.
        mass = np.maximum(np.diff(below, prepend=below[0]), 0.0)
        total = float(mass.sum())
        if not total > 0:
            break
        pmf = np.asarray(mass / total)
        found_mean, found_std = _moments(pmf)
        if max(abs(found_mean - mean), abs(found_std - std)) <= MOMENT_TOLERANCE_TOKENS:
            return pmf
        at += mean - found_mean
        spread *= std / found_std
    raise DistributionError(
        f"no skew normal of skewness {skew:g} on [0, {maximum}] has a mean of {mean:g} and a standard "
        f"deviation of {std:g} tokens; choose factors nearer to 1 or a smaller skew"
    )
