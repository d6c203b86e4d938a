"""Variance of a query's latency from the cohorts of independent queries that it shares the pool with.

With tau_q and tau_c what one more query and one more context token cost in a decode iteration, tau_i what
one more of the context's prompt tokens costs, a query of D iterations and `input` prompt tokens that has
ages a0..a1 while the bound's query is there costs

    X = sum over a = a0..min(D, a1 + 1) - 1 of tau_q(a) + tau_c(a) (1 + a) + tau_i(a) input,

and what its prompt costs if it is encoded in that time. Queries are independent, so the variance of the
latency is the sum of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import IntArray
from exegpt.simulator.serving import Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """What one more of each costs, s; `query_s`, `context_s` and `input_s` by age, shape (n, ages).

    `context_s` is per generated token attended to, `input_s` per prompt token: the same but for
    encoder-decoder models, whose decoder attends to prompts by tables of their own. `prompt_s` is per prompt
    token encoded, `square_s` per squared token beside that; shape (n,).
    """

    query_s: FloatArray
    context_s: FloatArray
    input_s: FloatArray
    prompt_s: FloatArray
    square_s: FloatArray


def cohort_spread_s(
    serving: Serving, slopes: Slopes, batch: FloatArray, n_d: int, dispersion: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Shift and deviation from cohorts of `batch` queries that enter every `n_d` iterations; shape (n,).

    Cohort c enters c cycles after the bound's query; from 0 on it is also encoded in that time. Each one's
    mean of X and X^2 are differences of running sums over D, so a cohort costs a few look-ups. `dispersion`
    is the variance of a cohort's number over its mean.
    """
    ends = serving.completion.iterations_of(serving.bound_output_tokens)
    longest = serving.completion.max_iterations
    sums = _running_sums(serving, slopes)
    first, last = -(max(longest - 1, 0) // n_d), max(ends - 1, 0) // n_d
    cohort = np.arange(first, last + 1)
    low = np.maximum(-cohort * n_d, 0)
    high = np.maximum(np.minimum(ends - cohort * n_d, longest), low)
    encoded = cohort >= 0
    mean, square = sums.moments(low, high, encoded * slopes.prompt_s[:, None])
    # The bound's query is one of its own cohort: always there, and without variance.
    own = sums.w0[:, ends] + serving.mean_input * (sums.w1[:, ends] + slopes.prompt_s)
    shift = own - mean[:, -first]
    others = np.repeat(batch[:, None], len(cohort), axis=1)
    others[:, -first] = np.maximum(batch - 1, 0)
    residual = encoded * (slopes.square_s**2 * square_residual(serving))[:, None]
    each = np.maximum(square - mean**2, 0.0) + dispersion * mean**2 + residual
    variance = (others * each).sum(-1)
    return shift, np.sqrt(variance)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over D = 0..k of p(D) E[input^i | D] times w0^j w1^l, each of shape (n, ages + 1) or (ages + 1,).

    w0(D) and w1(D) are what a query of D iterations costs from age 0 on without, and per, prompt token.
    """

    p: tuple[FloatArray, FloatArray, FloatArray]
    w0: FloatArray
    w1: FloatArray
    table: dict[tuple[int, int, int], FloatArray]

    def moments(self, low: IntArray, high: IntArray, prompt_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean and mean square of X for ages low..high - 1 of every cohort, (n, cohorts).

        `low` and `high` have shape (cohorts,); `prompt_s`, (n, cohorts), is what a token of a prompt costs
        that is encoded here. Only those have `low` 0: others that have D <= low have left.
        """
        base0, base1 = self.w0[:, low], self.w1[:, low] - prompt_s

        def between(i: int, j: int, k: int) -> FloatArray:
            sums = self.table[i, j, k]
            return np.asarray(sums[..., high] - np.where(low > 0, sums[..., low], 0.0))

        q0, q1, q2 = (between(i, 0, 0) for i in range(3))
        mean = between(0, 1, 0) - base0 * q0 + between(1, 0, 1) - base1 * q1
        square = between(0, 2, 0) - 2 * base0 * between(0, 1, 0) + base0**2 * q0
        cross = between(1, 1, 1) - base1 * between(1, 1, 0) - base0 * between(1, 0, 1) + base0 * base1 * q1
        square += 2 * cross
        square += between(2, 0, 2) - 2 * base1 * between(2, 0, 1) + base1**2 * q2
        # Those that stay longer have all of the ages.
        t0, t1, t2 = (p[-1] - p[high] for p in self.p)
        rest0, rest1 = self.w0[:, high] - base0, self.w1[:, high] - base1
        mean += rest0 * t0 + rest1 * t1
        square += rest0**2 * t0 + 2 * rest0 * rest1 * t1 + rest1**2 * t2
        return mean, square


def _running_sums(serving: Serving, slopes: Slopes) -> _Sums:
    completion, lengths = serving.completion, serving.lengths
    longest = completion.max_iterations
    offset = len(lengths.output_pmf) - 1 - longest
    pmf = lengths.output_pmf[offset:]
    weights = (
        pmf,
        pmf * lengths.mean_input_by_output[offset:],
        pmf * lengths.mean_square_input_by_output[offset:],
    )
    ages = np.arange(longest)
    w0, w1 = np.zeros((2, len(slopes.prompt_s), longest + 1))
    w0[:, 1:] = np.cumsum(slopes.query_s + slopes.context_s * (1 + ages), axis=1)
    w1[:, 1:] = np.cumsum(slopes.input_s, axis=1)
    powers = {(0, 0): np.ones(longest + 1), (1, 0): w0, (2, 0): w0**2, (0, 1): w1, (1, 1): w0 * w1}
    powers[0, 2] = w1**2
    wanted = (
        *((i, 0, 0) for i in range(3)),
        *((0, 1, 0), (0, 2, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 1), (2, 0, 2)),
    )
    table = {(i, j, k): np.cumsum(weights[i] * powers[j, k], axis=-1) for i, j, k in wanted}
    return _Sums(p=(table[0, 0, 0], table[1, 0, 0], table[2, 0, 0]), w0=w0, w1=w1, table=table)


def square_per_token(serving: Serving) -> float:
    """Regression of a prompt's squared length on its length, tokens."""
    pmf = serving.lengths.input_pmf
    n = np.arange(len(pmf), dtype=np.float64)
    deviation = n - serving.mean_input
    variance = float(pmf @ deviation**2)
    return float(pmf @ (n**2 * deviation)) / variance if variance > 0 else 0.0


def square_residual(serving: Serving) -> float:
    """Variance of a prompt's squared length that its length does not explain, tokens^4."""
    pmf = serving.lengths.input_pmf
    n = np.arange(len(pmf), dtype=np.float64)
    residual = n**2 - square_per_token(serving) * n
    return float(pmf @ residual**2) - float(pmf @ residual) ** 2
