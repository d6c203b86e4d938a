"""When queries complete, and what the decode pool holds until then.

Symbols of the paper (sections 5 and 6): D decode iterations of a query, N_D decode iterations of a
cycle, B_E queries encoded per cycle, B_D queries in the pool, U iteration since the last encoding.
Here G(a) = P(D > a) is the chance that a query is still active at age a, that is after a iterations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exegpt.errors import ConfigError
from exegpt.specs import Counting
from exegpt.workload.lengths import RequestLengths
from exegpt.workload.pmf import FloatArray

# Floats that cached rows may take together: 32 MiB.
CACHE_FLOATS = 1 << 22


@dataclass(frozen=True, slots=True)
class _PoolRow:
    """Sums over the cohorts of one N_D, per encoded query; each array has shape (N_D,)."""

    active: FloatArray
    context: FloatArray
    variance: FloatArray
    inputs: FloatArray


class Completion:
    """Ages, pools and contexts that follow from a length distribution.

    Parameters
    ----------
    lengths : RequestLengths
    counting : Counting
        `exact`: the pool is the exact steady state. `paper`: D = S, and the pool is the published
        B_D = B_E / sum_U P_D(U), which is 15 to 19 % too small on its own example.
    first_token_at_encoding : bool
        Whether encoding yields the first output token (D = S - 1; decoder-only models) or not (D = S).
        Paper counting always has D = S.

    Attributes
    ----------
    survival : float array, shape (max_iterations + 1,)
        G(a), from P(D > 0) down to 0.
    context : float array, shape (max_iterations + 1,)
        Mean tokens that an active query of age a attends to, E[input | D > a] + 1 + a; 0 where G is 0.

    Notes
    -----
    Before iteration u of a cycle the pool holds the cohorts encoded k = 0, 1, .. cycles ago at ages
    a = k N_D + u - 1, so per encoded query it has sum_k G(k N_D + u - 1) active queries (exact
    steady state, by linearity; no independence assumed).

    The paper takes a pooled query to have length S with probability P_D(S) and to be equally likely
    in each of its c(S) = ceil(S / N_D) phases. Its P_D(U) and its active counts then come out of the
    same sums with every length weighted by 1 / c(S), divided by W = E[1 / c(S)] = sum_U P_D(U). Contexts
    are weighted likewise.
    """

    def __init__(
        self,
        lengths: RequestLengths,
        counting: Counting = Counting.exact,
        *,
        first_token_at_encoding: bool = True,
    ) -> None:
        self.lengths = lengths
        self.counting = counting
        self._offset = 1 if counting is Counting.exact and first_token_at_encoding else 0
        # Index d of these is D = d.
        self._pmf = lengths.output_pmf[self._offset :]
        self._inputs = lengths.mean_input_by_output[self._offset :]
        self._square_inputs = lengths.mean_square_input_by_output[self._offset :]
        self._ages = np.arange(len(self._pmf), dtype=np.float64)
        self._exact = self._tails(self._pmf)
        self.survival, summed, _ = self._exact
        self.context = np.divide(summed, self.survival, out=np.zeros_like(summed), where=self.survival > 0)
        for values in (self.survival, self.context):
            values.setflags(write=False)
        self._cache: OrderedDict[int, tuple[FloatArray, ...]] = OrderedDict()
        self._cached_floats = 0

    @property
    def token_tails(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """By age a, of a query's X = [D > a] (input + 1 + a): P(D > a), E[X] and E[X^2]."""
        return self._exact

    @property
    def max_iterations(self) -> int:
        """Largest D."""
        return len(self._pmf) - 1

    @property
    def mean_iterations(self) -> float:
        """E[D]."""
        return float(self.survival.sum())

    def iterations_of(self, output_tokens: int) -> int:
        """D of a query with `output_tokens` output tokens, at least 1."""
        if output_tokens < 1:
            raise ConfigError(f"output_tokens={output_tokens}: a query has at least 1 output token")
        return output_tokens - self._offset

    def active_per_query(self, n_d: int) -> FloatArray:
        """Active queries in iteration u = 1..n_d of a cycle, per encoded query; shape (n_d,)."""
        return self._row(n_d).active

    def context_per_query(self, n_d: int) -> FloatArray:
        """Summed context tokens of the pool in iteration u = 1..n_d, per encoded query; shape (n_d,)."""
        return self._row(n_d).context

    def inputs_per_query(self, n_d: int) -> FloatArray:
        """The prompts' part of `context_per_query`; shape (n_d,)."""
        return self._row(n_d).inputs

    def start_pool_per_query(self, n_d: int) -> float:
        """Pool at the start of a decode phase per encoded query; exact: E[ceil(D / n_d)]."""
        return float(self._row(n_d).active[0])

    def pool_variance_per_query(self, n_d: int) -> float:
        """Variance of the pool at the start of a decode phase, per encoded query.

        Exact: cohort k contributes independent Bernoulli draws, sum_k G(k n_d) (1 - G(k n_d)).
        Paper counting: B_D draws, all at the start of a phase, hence 0.
        """
        if self.counting is Counting.paper:
            return 0.0
        alive = self.survival[::n_d]
        return float((alive * (1 - alive)).sum())

    def pool_tokens_moments(self, n_d: int) -> tuple[float, float]:
        """Peak mean and peak variance of the K/V tokens in the pool, per encoded query.

        Returns
        -------
        mean, variance : float
            Each the largest over the encoding and the n_d iterations of a cycle, before the queries that
            complete in that iteration leave. B_E queries per cycle need B_E times both; mean and
            z deviations together cover every moment of the cycle.

        Notes
        -----
        Queries are independent, and each of B_E per cycle is in the pool or not: a cohort of age a adds
        E[X] and E[X^2] - E[X]^2 of X = [D > a] (input + 1 + a). Queries that end at encoding are counted
        there with their input.
        """
        row = self._row(n_d)
        mean, variance = float(row.context.max()), float(row.variance.max())
        if self.counting is Counting.paper:
            return mean, variance
        encode_mean, encode_variance = self._encode_moments(n_d)
        return max(mean, encode_mean), max(variance, encode_variance)

    def expected_max_output(self, batch: FloatArray) -> FloatArray:
        """Mean output tokens of the longest of `batch` queries; same shape, sizes of at least 1.

        Batch sizes may be fractions; E[max] = sum_s (1 - P(S <= s)^B).
        """
        above = np.append(np.cumsum(self.lengths.output_pmf[::-1])[::-1][1:], 0.0)
        return _expected_max(above, batch)

    def expected_max_iterations(self, batch: FloatArray) -> FloatArray:
        """Mean D of the longest of `batch` queries; same shape, sizes of at least 1."""
        return _expected_max(self.survival, batch)

    def _tails(self, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Sums over d > a of `weights` times 1, X and X^2, where X = input + 1 + a; shape of the ages."""
        count = _sum_above(weights)
        inputs = _sum_above(weights * self._inputs)
        squares = _sum_above(weights * self._square_inputs)
        added = 1 + self._ages
        return count, inputs + added * count, squares + 2 * added * inputs + added**2 * count

    def _row(self, n_d: int) -> _PoolRow:
        if n_d < 1:
            raise ConfigError(f"decode_iterations={n_d}: must be at least 1")
        return _PoolRow(*self._cached(n_d, lambda: self._compute_row(n_d)))

    def _compute_row(self, n_d: int) -> tuple[FloatArray, ...]:
        if self.counting is Counting.exact:
            active, context, squares = self._exact
            inputs = context - (1 + self._ages) * active
            return tuple(_fold(v, n_d) for v in (active, context, squares - context**2, inputs))
        # D = 0 does not occur here: D = S, and outputs have at least one token.
        phases = np.maximum(np.ceil(self._ages / n_d), 1)
        weights = self._pmf / phases
        total = weights.sum()
        active, context, squares = (_fold(tail, n_d) for tail in self._tails(weights))
        inputs = _fold(_sum_above(weights * self._inputs), n_d)
        return active / total, context / total, (squares - context**2) / total, inputs / total

    def _encode_moments(self, n_d: int) -> tuple[float, float]:
        """Mean and variance of the K/V tokens while a batch is encoded, per encoded query."""
        mean, variance = self._input_moments
        # Older cohorts hold input + a tokens; their next one comes with the first iteration.
        count, context, squares = (tail[n_d::n_d] for tail in self._exact)
        held = context - count
        held_squares = squares - 2 * context + count
        return mean + float(held.sum()), variance + float((held_squares - held**2).sum())

    @cached_property
    def _input_moments(self) -> tuple[float, float]:
        """Mean and variance of the prompts."""
        mean = self.lengths.mean_input
        return mean, self.lengths.mean_square_input - mean**2

    def _cached(self, key: int, compute: Callable[[], tuple[FloatArray, ...]]) -> tuple[FloatArray, ...]:
        """Arrays under `key`, least recently used ones dropped: rows of all N_D grow with its square."""
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        arrays = compute()
        for array in arrays:
            array.setflags(write=False)
        self._cache[key] = arrays
        self._cached_floats += sum(array.size for array in arrays)
        while self._cached_floats > CACHE_FLOATS and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_floats -= sum(array.size for array in dropped)
        return arrays


def _sum_above(values: FloatArray) -> FloatArray:
    """Sum of the entries after each index; summed from the end, so small tails keep their digits."""
    result = np.zeros_like(values)
    result[:-1] = np.cumsum(values[:0:-1])[::-1]
    return result


def _fold(by_age: FloatArray, n_d: int) -> FloatArray:
    """Sum over cohorts: entry u - 1 is the sum of `by_age` at k n_d + u - 1, k = 0, 1, ..; shape (n_d,)."""
    num_cohorts = -(-len(by_age) // n_d)
    padded = np.zeros(num_cohorts * n_d)
    padded[: len(by_age)] = by_age
    result: FloatArray = padded.reshape(num_cohorts, n_d).sum(axis=0)
    return result


def _expected_max(above: FloatArray, batch: FloatArray) -> FloatArray:
    """Sum over s of P(max of B draws > s), where `above` is P(one draw > s)."""
    sizes, places = np.unique(np.asarray(batch, dtype=np.float64), return_inverse=True)
    if sizes.size and sizes[0] < 1:
        raise ConfigError(f"batch size {sizes[0]:g}: must be at least 1")
    with np.errstate(divide="ignore"):
        log_below = np.log1p(-np.minimum(above, 1.0))
    # One size at a time: a table of all sizes and lengths would be large for long traces.
    means = np.array([-np.expm1(size * log_below).sum() for size in sizes])
    result: FloatArray = means[places].reshape(np.shape(batch))
    return result
