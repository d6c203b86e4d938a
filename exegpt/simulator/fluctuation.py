"""How much the latency of the bound's query varies, because pools and prompts do.

The closed forms give the latency amid mean pools and mean prompts. Around it, every query that
shares an encode phase or a decode iteration with the bound's query makes it later by what its own
tokens cost: linearised at the mean, the latency is a sum over independent queries (`cohorts`). What one
more query or token costs are finite differences of the closed forms' own times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exegpt.errors import ConfigError
from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.choice import Choice, Estimates, IntArray
from exegpt.simulator.cohorts import Slopes, cohort_spread_s, square_per_token, square_residual
from exegpt.simulator.pipeline import period_s, phase_s
from exegpt.simulator.serving import Serving
from exegpt.simulator.slots import WindowWork
from exegpt.specs import Policy

# Step of the finite differences as a share of the mean: wide enough to cross the cells of a profile,
# as fluctuations do, and narrower than their usual size.
STEP = 0.1
# The step where the profile ends within the other: pools at its rim, whose fluctuation it still covers.
RIM_STEP = 0.01

_STATIC = (Policy.STATIC, Policy.STATIC_HYBRID)


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
        iterations = np.minimum(extent, max(serving.completion.max_iterations, 1))
        return _rra_spread(serving, choice, batches, iterations)


def _spread(shift: FloatArray, std: FloatArray) -> Spread:
    return Spread(
        shift_s=np.where(np.isfinite(shift), shift, np.inf), std_s=np.where(np.isfinite(std), std, np.inf)
    )


def _rra_spread(serving: Serving, choice: Choice, batch: FloatArray, iterations: IntArray) -> Spread:
    """Slopes at the mean pools of every iteration of every candidate's cycle, then the cohorts."""
    completion, shift, std = serving.completion, np.full(len(batch), np.inf), np.full(len(batch), np.inf)
    groups = [(n_d, np.flatnonzero(iterations == n_d)) for n_d in np.unique(iterations).tolist()]
    pools = [
        np.stack(
            [
                np.outer(batch[rows], of(n_d))
                for of in (
                    completion.active_per_query,
                    completion.context_per_query,
                    completion.inputs_per_query,
                )
            ]
        )
        for n_d, rows in groups
    ]
    flat = np.concatenate([pool.reshape(3, -1) for pool in pools], axis=1)
    slopes = _decode_slopes(serving, choice.stages, choice.num_micro_batches, flat)
    prompt_s, square_s = _encode_slopes(serving, choice, batch)
    ends = np.cumsum([pool[0].size for pool in pools])
    for (n_d, rows), end in zip(groups, ends.tolist(), strict=True):
        own = slopes[:, end - len(rows) * n_d : end].reshape(3, len(rows), n_d)
        found = Slopes(
            query_s=_by_age(serving, own[0]),
            context_s=_by_age(serving, own[1]),
            input_s=_by_age(serving, own[2]),
            prompt_s=prompt_s[rows],
            square_s=square_s[rows],
        )
        shift[rows], std[rows] = cohort_spread_s(serving, found, batch[rows], n_d)
    return _spread(shift, std)


def sides_spread(serving: Serving, choice: Choice, pool: FloatArray) -> Spread:
    """How the decode time of the bound's query lies around that amid a stationary mean pool.

    For policies whose decode pool has GPUs of its own and is fed at every iteration (WAA, DISAGGREGATED): in
    each, as many queries enter as leave on average. Encoding is not in it.

    Parameters
    ----------
    pool : float array, shape (n,)
        Mean queries that decode in one instance of the decode pipeline.

    Notes
    -----
    WAA composes encode batches of nearly equal work, so queries come evenly. DISAGGREGATED encodes first
    come first served: batches of equal numbers take times that vary as the sum of their prompts' encode
    times, so the number that comes in a given time has the squared coefficient of variation of one prompt's
    encode time as its index of dispersion (renewal theory).
    """
    completion = serving.completion
    if completion.mean_iterations == 0:
        return Spread(shift_s=np.zeros_like(pool), std_s=np.zeros_like(pool))
    entering = pool / completion.mean_iterations
    tokens = [entering * of(1)[0] for of in (completion.context_per_query, completion.inputs_per_query)]
    with np.errstate(invalid="ignore"):
        stages, m = choice.decode_stages, choice.num_micro_batches
        slopes = _decode_slopes(serving, stages, m, np.stack([pool, *tokens]))
        query_s, context_s, input_s = (_by_age(serving, slope[:, None]) for slope in slopes)
        zero = np.zeros_like(pool)
        found = Slopes(query_s=query_s, context_s=context_s, input_s=input_s, prompt_s=zero, square_s=zero)
        dispersion = 0.0
        if choice.policy is Policy.DISAGGREGATED:
            prompt = _Prompt.of(serving, choice.encode_stages)
            variance = (prompt.token_s * serving.lengths.std_input) ** 2
            variance += prompt.square_s**2 * square_residual(serving)
            dispersion = variance / prompt.whole_s**2
        return _spread(*cohort_spread_s(serving, found, entering, 1, dispersion))


def slots_spread(serving: Serving, choice: Choice, e: Estimates, work: WindowWork) -> Spread:
    """How the latency of the bound's query lies around the closed form under continuous batching.

    For ITERATION and CHUNKED, whose slots are taken by new queries at once.

    Parameters
    ----------
    e : Estimates
        The closed form's, of the same candidates.
    work : WindowWork
        Of one slot in as many turns as the bound's query holds its own.

    Notes
    -----
    What a joining query costs is what turns take longer than if nobody joined, shared by those that join. Of
    that a prompt's tokens make up the share that they have in encoding it by itself, and all of it where
    it is split among passes that are there anyway (CHUNKED). While the bound's query decodes, its own slot
    brings its own context instead of a mean one. CHUNKED's line is not in it: a query joins in one turn.
    """
    completion, m = serving.completion, choice.num_micro_batches
    alive, tokens, _ = completion.token_tails
    total = float(alive.sum()) or 1.0
    mean_context = float(tokens.sum()) / total
    mean_inputs = mean_context - 1 - float(alive @ np.arange(len(alive))) / total
    # Beyond the profile a turn takes for ever.
    with np.errstate(invalid="ignore", divide="ignore"):
        joining = e.throughput_per_s / choice.num_replicas * e.cycle_s
        slots = joining * (completion.mean_iterations + 1)
        pools = np.stack([slots, slots * mean_context, slots * mean_inputs])
        context_s = _decode_slopes(serving, choice.stages, m, pools)[1]
        calm_s = period_s(serving.decode_s(choice.stages, *(pools / m)), m)
        joining_s = np.maximum(e.cycle_s - calm_s, 0.0) / joining
        prompt = _Prompt.of(serving, choice.stages)
        part = joining_s / (prompt.varying_s if choice.policy is Policy.CHUNKED else prompt.whole_s)
        prompt_s, square_s = part * prompt.token_s, part * prompt.square_s
        # In its first turn a query attends to nothing yet.
        query_s = joining_s - prompt_s * serving.mean_input + context_s * mean_context
        slope = np.stack([query_s, prompt_s, context_s], axis=-1)
        variance = np.einsum("ni,ij,nj->n", slope, work.covariance, slope)
        variance = np.maximum(variance, 0.0) + work.mean[0] * square_s**2 * square_residual(serving)
        ends = completion.iterations_of(serving.bound_output_tokens)
        own = ends * (serving.mean_input + (ends + 1) / 2 - mean_context)
        return _spread(context_s * own, np.sqrt(np.maximum(slots - 1, 0.0) * variance))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What one mean prompt costs to encode, summed over the stages, s.

    `token_s` is per token, with what its square costs on average in it, `square_s` per squared token beside
    that; `varying_s` is what all tokens make up of the `whole_s`.
    """

    token_s: float
    square_s: float
    varying_s: float
    whole_s: float

    @classmethod
    def of(cls, serving: Serving, stages: tuple[Stage, ...]) -> _Prompt:
        costs, mean, rms = serving.costs(stages), serving.mean_input, serving.rms_input
        up, down = 1 + STEP, 1 - STEP

        def time(tokens: float, rms: float) -> float:
            return float(costs.encode_s(1.0, tokens, rms).sum())

        by_token = (time(mean * up, rms) - time(mean * down, rms)) / (2 * STEP * mean)
        widest, narrow = min(rms * up**0.5, serving.lengths.max_input), rms * down**0.5
        by_square = (time(mean, widest) - time(mean, narrow)) / (widest**2 - narrow**2)
        return cls(
            token_s=by_token + by_square * square_per_token(serving),
            square_s=by_square,
            varying_s=by_token * mean + by_square * rms**2,
            whole_s=time(mean, rms),
        )


def _by_age(serving: Serving, by_iteration: FloatArray) -> FloatArray:
    """Values per iteration of a cycle, shape (n, N_D), at every age of a query, shape (n, ages)."""
    ages = np.arange(serving.completion.max_iterations)
    return np.asarray(by_iteration[:, ages % by_iteration.shape[1]])


def _decode_slopes(serving: Serving, stages: tuple[Stage, ...], m: int, pools: FloatArray) -> FloatArray:
    """What one more query, generated token and prompt token attended to cost in an iteration, (3, n).

    `pools` are mean queries, their summed context and the prompts' part of it, (3, n).
    """
    slopes = _decode_slopes_by(serving, stages, m, pools, STEP)
    if np.isfinite(slopes).all():
        return slopes
    return np.where(np.isfinite(slopes), slopes, _decode_slopes_by(serving, stages, m, pools, RIM_STEP))


def _decode_slopes_by(
    serving: Serving, stages: tuple[Stage, ...], m: int, pools: FloatArray, step: float
) -> FloatArray:
    queries, context, inputs = pools
    own = context - inputs

    def time(queries: FloatArray, own: FloatArray, inputs: FloatArray) -> FloatArray:
        return period_s(serving.decode_s(stages, queries / m, (own + inputs) / m, inputs / m), m)

    def over(difference_s: FloatArray, mean: FloatArray) -> FloatArray:
        return np.divide(difference_s, 2 * step * mean, out=np.zeros_like(mean), where=mean > 0)

    up, down = 1 + step, 1 - step
    by_query = over(time(queries * up, own, inputs) - time(queries * down, own, inputs), queries)
    if not serving.model.is_encoder_decoder:
        # Tokens cost the same whether they are prompt or generated.
        both = time(queries, own * up, inputs * up) - time(queries, own * down, inputs * down)
        return np.stack([by_query, *[over(both, context)] * 2])
    by_own = over(time(queries, own * up, inputs) - time(queries, own * down, inputs), own)
    by_input = over(time(queries, own, inputs * up) - time(queries, own, inputs * down), inputs)
    return np.stack([by_query, by_own, by_input])


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
    return by_token + by_square * square_per_token(serving), by_square


def _static_spread(serving: Serving, choice: Choice, batch: FloatArray) -> Spread:
    """STATIC keeps every row to the end: only prompts vary, in encoding and in every context."""
    m, longest = choice.num_micro_batches, serving.completion.max_iterations
    prompt_s, square_s = _encode_slopes(serving, choice, batch)
    if longest:
        rows = np.repeat(batch[:, None], longest, axis=1)
        inputs = rows * serving.mean_input
        pools = np.stack([rows, inputs + rows * (1 + np.arange(longest)), inputs])
        slopes = _decode_slopes(serving, choice.stages, m, pools.reshape(3, -1))
        prompt_s = prompt_s + slopes[2].reshape(rows.shape).sum(-1)
    per_query = prompt_s**2 * serving.lengths.std_input**2 + square_s**2 * square_residual(serving)
    return _spread(np.zeros_like(batch), np.sqrt(np.maximum(batch - 1, 0) * per_query))
