"""How much the latency of the bound's query varies, because pools and prompts do.

The closed forms give the latency amid mean pools and mean prompts. Around it, every query that
shares an encode phase or a decode iteration with the bound's query makes it later by what its own
tokens cost: linearised at the mean, the latency is a sum over independent queries, and its variance is
the sum of theirs. With tau_q and tau_c what one more query and one more context token cost in a decode
iteration, a query of D iterations and `input` prompt tokens that has ages a0..a1 while the bound's
query is there costs

    X = sum over a = a0..min(D, a1 + 1) - 1 of tau_q(a) + tau_c(a) (input + 1 + a),

and what its prompt costs if it is encoded in that time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exegpt.errors import ConfigError
from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.choice import Choice, IntArray
from exegpt.simulator.pipeline import period_s, phase_s
from exegpt.simulator.serving import Serving
from exegpt.specs import Policy

# Step of the finite differences as a share of the mean: wide enough to cross the cells of a profile,
# as fluctuations do, and narrower than their usual size.
STEP = 0.1
# The step where the profile ends within the other: pools at its rim, whose fluctuation it still covers.
RIM_STEP = 0.01

_STATIC = (Policy.STATIC, Policy.STATIC_HYBRID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """What one more of each costs, s; `query_s` and `context_s` by age, shape (n, ages).

    `prompt_s` is per prompt token encoded, `square_s` per squared token beside that; shape (n,).
    """

    query_s: FloatArray
    context_s: FloatArray
    prompt_s: FloatArray
    square_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Latency of the bound's query around the closed form, s; each of shape (n,).

    Attributes
    ----------
    shift_s : float array
        What its mean is above the closed form, which has the mean pool: the bound's query is in the pool
        to its end, while a query of its cohort leaves earlier on average.
    std_s : float array
    """

    shift_s: FloatArray
    std_s: FloatArray

    def at(self, sigmas: float) -> FloatArray:
        """What to add to the closed form's latency for `sigmas` deviations."""
        return np.asarray(self.shift_s + sigmas * self.std_s)


def latency_std_s(serving: Serving, choice: Choice, batch: IntArray, extent: IntArray) -> FloatArray:
    """Standard deviation of the latency of the bound's query; see `latency_spread`."""
    return latency_spread(serving, choice, batch, extent).std_s


def latency_spread(serving: Serving, choice: Choice, batch: IntArray, extent: IntArray) -> Spread:
    """How the latency of the bound's query lies around the closed form.

    Parameters
    ----------
    serving : Serving
    choice : Choice
        Of policy RRA, STATIC or STATIC_HYBRID.
    batch, extent : int arrays, shape (n,)
        As `Choice` says.

    Returns
    -------
    Spread
        Infinite where the profile does not reach.

    Raises
    ------
    ConfigError
        For a policy whose latency has no such form.

    Notes
    -----
    The bound's query itself is fixed: its own lengths do not vary. Queries are independent, and RRA
    encodes the same number of them every cycle.
    """
    if choice.policy not in (Policy.RRA, *_STATIC):
        raise ConfigError(
            f"solver.confidence: the spread of latency under {choice.policy.value} is not known; "
            "use RRA or STATIC, or leave it out"
        )
    with np.errstate(invalid="ignore"):
        batches = np.asarray(batch, dtype=np.float64)
        if choice.policy in _STATIC:
            return _static_spread(serving, choice, batches)
        shift, std = np.full((2, len(batches)), np.inf)
        iterations = np.minimum(extent, max(serving.completion.max_iterations, 1))
        for n_d in np.unique(iterations).tolist():
            rows = iterations == n_d
            slopes = rra_slopes(serving, choice, batches[rows], n_d)
            shift[rows], std[rows] = cohort_spread_s(serving, slopes, batches[rows], n_d)
    return _spread(shift, std)


def _spread(shift: FloatArray, std: FloatArray) -> Spread:
    return Spread(
        shift_s=np.where(np.isfinite(shift), shift, np.inf), std_s=np.where(np.isfinite(std), std, np.inf)
    )


def stationary_spread(
    serving: Serving,
    stages: tuple[Stage, ...],
    num_micro_batches: int,
    pool: FloatArray,
) -> Spread:
    """How the decode time of the bound's query lies around that amid a stationary mean pool.

    For policies whose decode pool is fed at every iteration (WAA, DISAGGREGATED): in each, as many
    queries enter as leave on average. Encoding is not in it.

    Parameters
    ----------
    pool : float array, shape (n,)
        Mean queries that decode.
    """
    completion = serving.completion
    if completion.mean_iterations == 0:
        return Spread(shift_s=np.zeros_like(pool), std_s=np.zeros_like(pool))
    entering = pool / completion.mean_iterations
    context = entering * completion.context_per_query(1)[0]
    with np.errstate(invalid="ignore"):
        query_s, context_s = _decode_slopes(
            serving, stages, num_micro_batches, pool[:, None], context[:, None]
        )
        zero = np.zeros_like(pool)
        slopes = Slopes(
            query_s=_by_age(serving, query_s),
            context_s=_by_age(serving, context_s),
            prompt_s=zero,
            square_s=zero,
        )
        return _spread(*cohort_spread_s(serving, slopes, entering, 1))


def rra_slopes(serving: Serving, choice: Choice, batch: FloatArray, n_d: int) -> Slopes:
    """Slopes of RRA at the mean pools of a cycle, for candidates of one N_D."""
    active = batch[:, None] * serving.completion.active_per_query(n_d)
    context = batch[:, None] * serving.completion.context_per_query(n_d)
    query_s, context_s = _decode_slopes(serving, choice.stages, choice.num_micro_batches, active, context)
    prompt_s, square_s = _encode_slopes(serving, choice, batch)
    return Slopes(
        query_s=_by_age(serving, query_s),
        context_s=_by_age(serving, context_s),
        prompt_s=prompt_s,
        square_s=square_s,
    )


def cohort_spread_s(
    serving: Serving, slopes: Slopes, batch: FloatArray, n_d: int
) -> tuple[FloatArray, FloatArray]:
    """Shift and deviation from cohorts of `batch` queries that enter every `n_d` iterations; shape (n,).

    Cohort c enters c cycles after the bound's query. Each one's mean of X and X^2 are differences
    of running sums over D, so a cohort costs a few look-ups.
    """
    ends = serving.completion.iterations_of(serving.bound_output_tokens)
    longest = serving.completion.max_iterations
    sums = _running_sums(serving, slopes)
    last = max(ends - 1, 0) // n_d
    shift, variance = np.zeros((2, len(batch)))
    for cohort in range(-((longest - 1) // n_d), last + 1):
        low = max(-cohort * n_d, 0)
        high = min(ends - cohort * n_d, longest)
        if high <= low and cohort < 0:
            continue
        mean, square = sums.moments(low, max(high, low), slopes.prompt_s if cohort >= 0 else None)
        # The bound's query is one of its own cohort: always there, and without variance.
        if cohort == 0:
            own = sums.w0[:, ends] + serving.mean_input * (sums.w1[:, ends] + slopes.prompt_s)
            shift = own - mean
        others = np.maximum(batch - 1, 0) if cohort == 0 else batch
        variance += others * np.maximum(square - mean**2, 0.0)
        if cohort >= 0:
            variance += others * slopes.square_s**2 * _square_residual(serving)
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

    def moments(self, low: int, high: int, prompt_s: FloatArray | None) -> tuple[FloatArray, FloatArray]:
        """Mean and mean square of X for ages low..high - 1, with the prompt's own cost if it is encoded."""
        base0, base1 = self.w0[:, low], self.w1[:, low]
        if prompt_s is not None:
            base1 = base1 - prompt_s

        def between(i: int, j: int, k: int) -> FloatArray:
            sums = self.table[i, j, k]
            # A query with D <= low has left, unless it is encoded here; then it has D >= 0 iterations.
            before = 0.0 if prompt_s is not None else sums[..., low]
            return np.asarray(sums[..., high] - before)

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
    w1[:, 1:] = np.cumsum(slopes.context_s, axis=1)
    powers = {(0, 0): np.ones(longest + 1), (1, 0): w0, (2, 0): w0**2, (0, 1): w1, (1, 1): w0 * w1}
    powers[0, 2] = w1**2
    wanted = (
        *((i, 0, 0) for i in range(3)),
        *((0, 1, 0), (0, 2, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 1), (2, 0, 2)),
    )
    table = {(i, j, k): np.cumsum(weights[i] * powers[j, k], axis=-1) for i, j, k in wanted}
    return _Sums(p=(table[0, 0, 0], table[1, 0, 0], table[2, 0, 0]), w0=w0, w1=w1, table=table)


def _by_age(serving: Serving, by_iteration: FloatArray) -> FloatArray:
    """Values per iteration of a cycle, shape (n, N_D), at every age of a query, shape (n, ages)."""
    ages = np.arange(serving.completion.max_iterations)
    return np.asarray(by_iteration[:, ages % by_iteration.shape[1]])


def _decode_slopes(
    serving: Serving, stages: tuple[Stage, ...], m: int, active: FloatArray, context: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """What one more query, and one more context token, cost in an iteration; shape of `active`."""
    costs = serving.costs(stages)

    def time(queries: FloatArray, tokens: FloatArray) -> FloatArray:
        return period_s(costs.decode_s(queries / m, tokens / m), m)

    def slopes(step: float) -> tuple[FloatArray, FloatArray]:
        up, down = 1 + step, 1 - step
        queries = time(active * up, context) - time(active * down, context)
        tokens = time(active, context * up) - time(active, context * down)
        return _over(queries, 2 * step * active), _over(tokens, 2 * step * context)

    by_query, by_context = slopes(STEP)
    if not (np.isfinite(by_query).all() and np.isfinite(by_context).all()):
        at_rim = slopes(RIM_STEP)
        by_query, by_context = (
            np.where(np.isfinite(wide), wide, narrow)
            for wide, narrow in zip((by_query, by_context), at_rim, strict=True)
        )
    return by_query, by_context


def _over(difference_s: FloatArray, of: FloatArray) -> FloatArray:
    """A difference per unit of what it is of, zero where there is none of it."""
    return np.divide(difference_s, of, out=np.zeros_like(of), where=of > 0)


def _encode_slopes(serving: Serving, choice: Choice, batch: FloatArray) -> tuple[FloatArray, FloatArray]:
    """What one more prompt token, and one more squared token, cost in an encode phase; shape (n,).

    The token's own cost has what its square costs on average in it.
    """
    m = choice.encode_micro_batches or choice.num_micro_batches
    costs, lengths = serving.costs(choice.stages), serving.lengths
    queries, tokens = batch / m, batch / m * serving.mean_input

    def time(tokens: FloatArray, rms: float) -> FloatArray:
        return phase_s(costs.encode_s(queries, tokens, rms), m)

    rms = serving.rms_input
    up, down = 1 + STEP, 1 - STEP
    by_token = (time(tokens * up, rms) - time(tokens * down, rms)) / (2 * STEP * tokens * m)
    squares = batch * lengths.mean_square_input
    widest = min(rms * np.sqrt(up), lengths.max_input)
    narrow = rms * np.sqrt(down)
    by_square = (time(tokens, widest) - time(tokens, narrow)) / (squares * (widest**2 - narrow**2) / rms**2)
    return by_token + by_square * _square_per_token(serving), by_square


def _square_per_token(serving: Serving) -> float:
    """Regression of a prompt's squared length on its length, tokens."""
    pmf = serving.lengths.input_pmf
    n = np.arange(len(pmf), dtype=np.float64)
    deviation = n - serving.mean_input
    variance = float(pmf @ deviation**2)
    return float(pmf @ (n**2 * deviation)) / variance if variance > 0 else 0.0


def _square_residual(serving: Serving) -> float:
    """Variance of a prompt's squared length that its length does not explain, tokens^4."""
    pmf = serving.lengths.input_pmf
    n = np.arange(len(pmf), dtype=np.float64)
    residual = n**2 - _square_per_token(serving) * n
    return float(pmf @ residual**2) - float(pmf @ residual) ** 2


def _static_spread(serving: Serving, choice: Choice, batch: FloatArray) -> Spread:
    """STATIC keeps every row to the end: only prompts vary, in encoding and in every context."""
    m, longest = choice.num_micro_batches, serving.completion.max_iterations
    prompt_s, square_s = _encode_slopes(serving, choice, batch)
    if longest:
        rows = np.broadcast_to(batch[:, None], (len(batch), longest))
        contexts = rows * (serving.mean_input + 1 + np.arange(longest))
        _, context_s = _decode_slopes(serving, choice.stages, m, rows, contexts)
        prompt_s = prompt_s + context_s.sum(-1)
    per_query = prompt_s**2 * serving.lengths.std_input**2 + square_s**2 * _square_residual(serving)
    return _spread(np.zeros_like(batch), np.sqrt(np.maximum(batch - 1, 0) * per_query))
