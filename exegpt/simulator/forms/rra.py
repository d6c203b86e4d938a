"""RRA in closed form (paper, sections 4.1 and 6; design, section 4).

B_E queries enter per cycle of N_D decode iterations; before iteration u the pool holds
B_E sum_k G(k N_D + u - 1) queries, where G(a) = P(D > a). Throughput is B_E / T_cycle. A query of D
iterations ends floor((D - 1) / N_D) cycles and 1 + ((D - 1) mod N_D) iterations after its encoding began.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Choice, Estimates, IntArray
from exegpt.simulator.memory import OVERFLOW_SIGMAS, MemoryPlan
from exegpt.simulator.pipeline import cycle_s, encode_end_s, finish_s, longest_of, phase_s, rhythm
from exegpt.simulator.serving import Serving, make_estimates


class RraForm:
    """Estimates and bounds of RRA."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

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
            active[i, :low] = self.serving.completion.min_active_per_query(low, high)
            context[i, :low] = self.serving.completion.min_context_per_query(low, high)
            mean, variance = self.serving.pool_moments[:, low - 1 : high].min(axis=1)
            kv_tokens[i] = least[i] * mean + OVERFLOW_SIGMAS * np.sqrt(least[i] * variance)
        m = choice.num_micro_batches
        encode = self.serving.encode_s(choice.stages, least / m)
        decode = self.serving.costs(choice.stages).decode_s(
            least[:, None] * active / m, least[:, None] * context / m
        )
        with np.errstate(invalid="ignore"):
            cycle = cycle_s(encode, decode, m)
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        cycles = np.maximum(ends - 1, 0) // iterations[:, 1]
        latency = np.where(cycles > 0, np.maximum(cycles, 1) * cycle, 0.0) + phase_s(encode, m)
        memory = self._memory(choice, least, kv_tokens, least).total_bytes.max(-1)
        return np.asarray(batches[:, 1] / cycle), np.asarray(latency), np.asarray(memory)

    def estimate(self, choice: Choice, batch: FloatArray, iterations: IntArray) -> Estimates:
        m = choice.num_micro_batches
        # Behind a candidate's own N_D its rows are zero, where every cost is zero.
        active, context = np.zeros((2, len(batch), int(iterations.max())))
        for n_d in np.unique(iterations).tolist():
            rows = iterations == n_d
            active[rows, :n_d] = self.serving.completion.active_per_query(n_d)
            context[rows, :n_d] = self.serving.completion.context_per_query(n_d)
        moments = self.serving.pool_moments[:, np.minimum(iterations, self.serving.pool_moments.shape[1]) - 1]
        encode = self.serving.encode_s(choice.stages, batch / m)
        decode = self.serving.costs(choice.stages).decode_s(
            batch[:, None] * active / m, batch[:, None] * context / m
        )
        spread = self._encode_spread_s(choice, batch, iterations, encode)
        steady = rhythm(encode, decode, m, iterations > self.serving.completion.max_iterations, spread)
        cycle = steady.cycle_s
        ttft = encode_end_s(encode, m, steady.offset_s, spread)
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        latency = ttft
        if ends > 0:
            cycles, rest = np.divmod(ends - 1, iterations)
            finish = finish_s(encode, decode, m, steady.offset_s, spread)
            finish = np.take_along_axis(finish, rest[:, None], axis=1)[:, 0]
            latency = np.where(cycles > 0, np.maximum(cycles, 1) * cycle, 0.0) + finish
        pool = batch * active[:, 0]
        kv_tokens = batch * moments[0] + OVERFLOW_SIGMAS * np.sqrt(batch * moments[1])
        kv_tokens = kv_tokens + pool * (self.serving.page_size - 1) / 2
        memory = self._memory(choice, batch, kv_tokens, np.maximum(pool, batch))
        return make_estimates(batch / cycle, latency, ttft, ends, pool, cycle, memory)

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
        mean, square = self.serving.lengths.mean_input, self.serving.lengths.mean_square_input
        queries = batch / m
        lost = np.unique(iterations, return_inverse=True)
        per_query = np.array([self._lost_variance(int(n)) for n in lost[0]])[lost[1]]
        counts = queries * per_query * (1 - 1 / m) + queries % 1 * (1 - queries % 1)
        variance = queries * self.serving.lengths.std_input**2 + counts * mean**2
        deviation = np.sqrt(variance)
        # One deviation more tokens: so many more queries, and so many more squared tokens.
        share = np.divide(counts * mean**2, variance, out=np.zeros_like(variance), where=variance > 0)
        more_queries = deviation * share / mean
        squares = queries * square + deviation * (
            share * square / mean + (1 - share) * self._square_per_token
        )
        rms = np.sqrt(squares / (queries + more_queries))
        longer = self.serving.costs(choice.stages).encode_s(
            queries + more_queries, queries * mean + deviation, rms
        )
        slowest = encode_s.max(-1, keepdims=True)
        return longest_of(np.maximum(longer - encode_s, 0.0), slowest - encode_s, m)

    def _lost_variance(self, n_d: int) -> float:
        """Variance of the queries that a pool loses in a cycle, per encoded query."""
        alive = self.serving.completion.survival[::n_d]
        later = np.append(alive[1:], 0.0)
        kept = np.divide(later, alive, out=np.zeros_like(alive), where=alive > 0)
        return float(((alive - later) * kept).sum())

    @cached_property
    def _square_per_token(self) -> float:
        """Regression of a prompt's squared length on its length, in tokens."""
        pmf = self.serving.lengths.input_pmf
        n = np.arange(len(pmf), dtype=np.float64)
        deviation = n - self.serving.lengths.mean_input
        variance = float(pmf @ deviation**2)
        return float(pmf @ (n**2 * deviation)) / variance if variance > 0 else 0.0

    def _memory(
        self, choice: Choice, batch: FloatArray, kv_tokens: FloatArray, rows: FloatArray
    ) -> MemoryPlan:
        m = choice.num_micro_batches
        return self.serving.memory(choice.stages, kv_tokens, batch / m * self.serving.mean_input, rows / m)
