"""Closed forms of the steady state, vectorised over candidates.

RRA (paper, sections 4.1 and 6; design, section 4): B_E queries enter per cycle of N_D decode
iterations; before iteration u the pool holds B_E sum_k G(k N_D + u - 1) queries, where
G(a) = P(D > a). Throughput is B_E / T_cycle. A query of D iterations ends floor((D - 1) / N_D)
cycles and 1 + ((D - 1) mod N_D) iterations after its encoding began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from exegpt.errors import ProfileRangeError
from exegpt.profiler.grid import FloatArray
from exegpt.profiler.table import ProfileTable
from exegpt.schedule import Stage
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.memory import OVERFLOW_SIGMAS, MemoryPlan, plan_memory
from exegpt.simulator.pipeline import cycle_s, encode_end_s, finish_s, longest_of, period_s, phase_s, rhythm
from exegpt.specs import Counting, ModelSpec, Policy
from exegpt.workload.completion import Completion
from exegpt.workload.lengths import RequestLengths

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination of the knobs that are enumerated: what no bound ranges over."""

    policy: Policy
    stages: tuple[Stage, ...]
    num_micro_batches: int

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree of the stages."""
        return self.stages[0].tp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Predictions for an array of candidates; shape (n,), memory (n, num_stages).

    Where the profile does not cover a candidate, times are infinite and throughput is zero.
    """

    throughput_per_s: FloatArray
    latency_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    decode_batch_size: FloatArray
    cycle_s: FloatArray
    memory: MemoryPlan


class SteadyState:
    """Estimates of RRA and STATIC for one model, profile and length distribution.

    Parameters
    ----------
    model, profile, lengths
    counting : Counting
        `paper` gives the published completion formulas, for comparison with its tables.
    length_percentile : float
        The bound's query has this percentile of the output lengths.
    page_size : int
        Tokens of a K/V page.
    """

    def __init__(
        self,
        model: ModelSpec,
        profile: ProfileTable,
        lengths: RequestLengths,
        *,
        counting: Counting = Counting.exact,
        length_percentile: float = 99.0,
        page_size: int = 16,
    ) -> None:
        self.model = model
        self.profile = profile
        self.lengths = lengths
        self.page_size = page_size
        self.completion = Completion(lengths, counting)
        self.bound_output_tokens = lengths.output_percentile(length_percentile)
        # Moments are sums over the pmfs; the search asks for them thousands of times.
        self._mean_input = lengths.mean_input
        self._rms_input = float(np.sqrt(lengths.mean_square_input))
        self._costs: dict[tuple[Stage, ...], StageCosts] = {}

    def costs(self, choice: Choice) -> StageCosts:
        """Stage costs of a choice's placement."""
        if choice.stages not in self._costs:
            self._costs[choice.stages] = StageCosts(self.profile, self.model, stage_shapes(choice.stages))
        return self._costs[choice.stages]

    def estimate(self, choice: Choice, encode_batch_size: IntArray, decode_iterations: IntArray) -> Estimates:
        """Estimates for candidates (B_E, N_D), arrays of shape (n,).

        For STATIC `decode_iterations` has no meaning: a batch decodes until its longest query ends.
        """
        batch = np.asarray(encode_batch_size, dtype=np.float64)
        # Beyond the profile times are infinite, and their differences NaN, which meets no bound.
        with np.errstate(invalid="ignore"):
            if choice.policy is Policy.STATIC:
                return self._static(choice, batch)
            return self._rra(choice, batch, np.asarray(decode_iterations, dtype=np.int64))

    def throughput_upper_and_latency_lower(
        self, choice: Choice, batches: IntArray, iterations: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Bounds over boxes of RRA candidates that always hold.

        Parameters
        ----------
        batches, iterations : int arrays, shape (n, 2)
            Each box holds B_E from `batches[i, 0]` to `batches[i, 1]` and N_D likewise.

        Returns
        -------
        throughput_upper_per_s, latency_lower_s, memory_lower_bytes : float arrays, shape (n,)

        Notes
        -----
        Every cost of a profile is monotone in queries, tokens and summed context (tables are isotone).
        So encoding takes at least as long as at the least B_E, and for every u up to the least N_D
        iteration u takes at least as long as with the least active count and the least summed context
        that any N_D of the box has at u, times the least B_E: no corner gives them, since
        (1 + a) G(a) is not monotone in a. `cycle_s` rises with every stage time and with every
        iteration, so evaluated there it is a lower bound T of all cycles of the box, and B_E / T'
        <= max B_E / T. A query of D iterations waits for floor((D - 1) / N_D) >=
        floor((D - 1) / max N_D) cycles of at least T, and then for an encode phase of its own.
        Memory takes the least mean and the least variance of the pool, each over the N_D of the box.
        """
        least = batches[:, 0].astype(np.float64)
        width = int(iterations[:, 0].max())
        active, context = np.zeros((2, len(least), width))
        kv_tokens = np.zeros(len(least))
        for i, (low, high) in enumerate(iterations.tolist()):
            active[i, :low] = self.completion.min_active_per_query(low, high)
            context[i, :low] = self.completion.min_context_per_query(low, high)
            mean, variance = self._pool_moments[:, low - 1 : high].min(axis=1)
            kv_tokens[i] = least[i] * mean + OVERFLOW_SIGMAS * np.sqrt(least[i] * variance)
        m = choice.num_micro_batches
        encode = self._encode_s(choice, least)
        decode = self.costs(choice).decode_s(least[:, None] * active / m, least[:, None] * context / m)
        with np.errstate(invalid="ignore"):
            cycle = cycle_s(encode, decode, m)
        ends = self.completion.iterations_of(self.bound_output_tokens)
        cycles = np.maximum(ends - 1, 0) // iterations[:, 1]
        latency = np.where(cycles > 0, np.maximum(cycles, 1) * cycle, 0.0) + phase_s(encode, m)
        memory = self._memory(choice, least, kv_tokens, least).total_bytes.max(-1)
        return np.asarray(batches[:, 1] / cycle), np.asarray(latency), np.asarray(memory)

    @cached_property
    def _pool_moments(self) -> FloatArray:
        """Mean and variance of the pool's K/V tokens per encoded query, for every useful N_D."""
        most = max(self.completion.max_iterations, 1)
        moments = [self.completion.pool_tokens_moments(n) for n in range(1, most + 1)]
        return np.asarray(np.asarray(moments).T)

    def _encode_s(self, choice: Choice, batch: FloatArray) -> FloatArray:
        per_micro_batch = batch / choice.num_micro_batches
        return self.costs(choice).encode_s(
            per_micro_batch, per_micro_batch * self._mean_input, self._rms_input
        )

    def _encode_spread_s(
        self, choice: Choice, batch: FloatArray, iterations: IntArray, encode_s: FloatArray
    ) -> FloatArray:
        """How much longer than the mean a stage takes for the longest micro-batch of a phase.

        Micro-batches get as many queries as they lost, which vary, with prompts that vary, and the
        pipeline waits for the longest one on every stage but the slowest. Passing a stage with a later
        micro-batch costs what the slowest stage would have done in that time.
        """
        m = choice.num_micro_batches
        if m == 1 or len(choice.stages) == 1:
            return np.zeros_like(encode_s)
        mean, square = self.lengths.mean_input, self.lengths.mean_square_input
        queries = batch / m
        lost = np.unique(iterations, return_inverse=True)
        per_query = np.array([self._lost_variance(int(n)) for n in lost[0]])[lost[1]]
        counts = queries * per_query * (1 - 1 / m) + queries % 1 * (1 - queries % 1)
        variance = queries * self.lengths.std_input**2 + counts * mean**2
        deviation = np.sqrt(variance)
        # One deviation more tokens: so many more queries, and so many more squared tokens.
        share = np.divide(counts * mean**2, variance, out=np.zeros_like(variance), where=variance > 0)
        more_queries = deviation * share / mean
        squares = queries * square + deviation * (
            share * square / mean + (1 - share) * self._square_per_token
        )
        rms = np.sqrt(squares / (queries + more_queries))
        longer = self.costs(choice).encode_s(queries + more_queries, queries * mean + deviation, rms)
        slowest = encode_s.max(-1, keepdims=True)
        return longest_of(np.maximum(longer - encode_s, 0.0), slowest - encode_s, m)

    def _lost_variance(self, n_d: int) -> float:
        """Variance of the queries that a pool loses in a cycle, per encoded query."""
        alive = self.completion.survival[::n_d]
        later = np.append(alive[1:], 0.0)
        kept = np.divide(later, alive, out=np.zeros_like(alive), where=alive > 0)
        return float(((alive - later) * kept).sum())

    @cached_property
    def _square_per_token(self) -> float:
        """Regression of a prompt's squared length on its length, in tokens."""
        pmf = self.lengths.input_pmf
        n = np.arange(len(pmf), dtype=np.float64)
        deviation = n - self.lengths.mean_input
        variance = float(pmf @ deviation**2)
        return float(pmf @ (n**2 * deviation)) / variance if variance > 0 else 0.0

    def _rra(self, choice: Choice, batch: FloatArray, iterations: IntArray) -> Estimates:
        m = choice.num_micro_batches
        # Behind a candidate's own N_D its rows are zero, where every cost is zero.
        active, context = np.zeros((2, len(batch), int(iterations.max())))
        for n_d in np.unique(iterations).tolist():
            rows = iterations == n_d
            active[rows, :n_d] = self.completion.active_per_query(n_d)
            context[rows, :n_d] = self.completion.context_per_query(n_d)
        moments = self._pool_moments[:, np.minimum(iterations, self._pool_moments.shape[1]) - 1]
        encode = self._encode_s(choice, batch)
        decode = self.costs(choice).decode_s(batch[:, None] * active / m, batch[:, None] * context / m)
        spread = self._encode_spread_s(choice, batch, iterations, encode)
        steady = rhythm(encode, decode, m, iterations > self.completion.max_iterations, spread)
        cycle = steady.cycle_s
        ttft = encode_end_s(encode, m, steady.offset_s, spread)
        ends = self.completion.iterations_of(self.bound_output_tokens)
        latency = ttft
        if ends > 0:
            cycles, rest = np.divmod(ends - 1, iterations)
            finish = finish_s(encode, decode, m, steady.offset_s, spread)
            finish = np.take_along_axis(finish, rest[:, None], axis=1)[:, 0]
            latency = np.where(cycles > 0, np.maximum(cycles, 1) * cycle, 0.0) + finish
        pool = batch * active[:, 0]
        kv_tokens = batch * moments[0] + OVERFLOW_SIGMAS * np.sqrt(batch * moments[1])
        kv_tokens = kv_tokens + pool * (self.page_size - 1) / 2
        memory = self._memory(choice, batch, kv_tokens, np.maximum(pool, batch))
        return _estimates(batch / cycle, latency, ttft, ends, pool, cycle, memory)

    def _static(self, choice: Choice, batch: FloatArray) -> Estimates:
        m = choice.num_micro_batches
        encode = self._encode_s(choice, batch)
        ttft = phase_s(encode, m)
        longest = self.completion.max_iterations
        per_micro_batch = batch[:, None] / m
        contexts = per_micro_batch * (self._mean_input + 1 + np.arange(longest))
        if longest == 0:
            total = latency = ttft
        else:
            decode = self.costs(choice).decode_s(np.broadcast_to(per_micro_batch, contexts.shape), contexts)
            finish = finish_s(encode, decode, m)
            steps = np.diff(finish, axis=1, prepend=ttft[:, None])
            total = ttft + (steps * self._static_shares(per_micro_batch[:, 0], decode, m)).sum(-1)
            latency = finish[:, -1]
        slot = self.lengths.max_input + self.lengths.max_output + self.page_size - 1
        memory = self._memory(choice, batch, batch * slot, batch)
        return _estimates(batch / total, latency, ttft, longest, batch, total, memory)

    def _static_shares(self, queries: FloatArray, decode_s: FloatArray, m: int) -> FloatArray:
        """Expected share of each decode iteration's full period that a static batch takes, (n, iterations).

        A micro-batch of b queries is there in iteration u with probability 1 - (1 - G(u - 1))^b, until
        its own longest ends; k of m that are left have the period of k.
        """
        there = 1 - (1 - self.completion.survival[: decode_s.shape[-2]]) ** queries[:, None]
        full = period_s(decode_s, m)
        expected = np.zeros_like(full)
        for k in range(1, m + 1):
            chance = math.comb(m, k) * there**k * (1 - there) ** (m - k)
            expected += chance * period_s(decode_s, k)
        return np.asarray(expected / full)

    def _memory(
        self, choice: Choice, batch: FloatArray, kv_tokens: FloatArray, rows: FloatArray
    ) -> MemoryPlan:
        m = choice.num_micro_batches
        return plan_memory(
            self.model,
            choice.stages,
            self.profile.dtype,
            kv_tokens=kv_tokens,
            encode_tokens=batch / m * self._mean_input,
            decode_queries=rows / m,
        )


def _estimates(
    throughput: FloatArray,
    latency: FloatArray,
    ttft: FloatArray,
    iterations: int,
    pool: FloatArray,
    cycle: FloatArray,
    memory: MemoryPlan,
) -> Estimates:
    # Without decode iterations there is no time between tokens.
    tpot = (latency - ttft) / iterations if iterations else np.zeros_like(latency)
    return Estimates(
        throughput_per_s=throughput,
        latency_s=latency,
        ttft_s=ttft,
        tpot_s=np.where(np.isfinite(latency), tpot, np.inf),
        decode_batch_size=pool,
        cycle_s=cycle,
        memory=memory,
    )


def estimate_one(
    steady: SteadyState, choice: Choice, encode_batch_size: int, decode_iterations: int
) -> Mapping[str, float]:
    """One candidate's estimate as plain numbers.

    Raises
    ------
    ProfileRangeError
        If the profile does not cover it.
    """
    e = steady.estimate(choice, np.asarray([encode_batch_size]), np.asarray([decode_iterations]))
    if not np.isfinite(e.cycle_s[0]):
        raise ProfileRangeError(
            f"encode_batch_size={encode_batch_size}, decode_iterations={decode_iterations} need larger "
            "batches or "
            "contexts than were profiled. Raise profile.budget_s and profile again, or shrink the batch."
        )
    return {
        "throughput_per_s": float(e.throughput_per_s[0]),
        "throughput_tokens_per_s": float(e.throughput_per_s[0]) * steady.lengths.mean_output,
        "latency_s": float(e.latency_s[0]),
        "ttft_s": float(e.ttft_s[0]),
        "tpot_s": float(e.tpot_s[0]),
        "cycle_s": float(e.cycle_s[0]),
    }
