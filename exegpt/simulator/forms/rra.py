"""RRA in closed form (paper, sections 4.1 and 6; design, section 4).

B_E queries enter per cycle of N_D decode iterations; before iteration u the pool holds
B_E sum_k G(k N_D + u - 1) queries, where G(a) = P(D > a). Throughput is B_E / T_cycle. A query of D
iterations ends floor((D - 1) / N_D) cycles and 1 + ((D - 1) mod N_D) iterations after its encoding began.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray
from exegpt.simulator.forms.encode_spread import EncodeSpread
from exegpt.simulator.forms.rra_bounds import Prepared, pool_kv_tokens, prepare, rra_bounds
from exegpt.simulator.forms.rra_refined import refined_bounds
from exegpt.simulator.iteration_blocks import Blocks
from exegpt.simulator.memory import MemoryPlan
from exegpt.simulator.pipeline import encode_end_s, finish_s, rhythm
from exegpt.simulator.ragged import ragged_gains_s
from exegpt.simulator.serving import Serving, make_estimates


class RraForm:
    """Estimates and bounds of RRA."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.spread = EncodeSpread(serving)
        self._prepared: Prepared | None = None

    def bounds(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes of B_E x N_D; see `rra_bounds`."""
        return rra_bounds(self.serving, self._prepare(choices), which, batches, extents)

    def refine(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Closer bounds of boxes; see `refined_bounds`."""
        return refined_bounds(self.serving, self.spread, self._prepare(choices), which, batches, extents)

    def _prepare(self, choices: Sequence[Choice]) -> Prepared:
        if self._prepared is None or self._prepared.choices is not choices:
            self._prepared = prepare(self.serving, choices)
        return self._prepared

    def estimate(self, choice: Choice, batch: FloatArray, iterations: IntArray) -> Estimates:
        """Estimates of candidates; arrays of shape (n,)."""
        serving, m = self.serving, choice.num_micro_batches
        encode = serving.encode_s(choice.stages, batch / m)
        blocks = serving.iteration_blocks.of(iterations)
        decode, weights = self._decode_s(choice, batch, blocks), blocks.weights
        ends = serving.completion.iterations_of(serving.bound_output_tokens)
        if len(choice.stages) == 1:
            cycle, ttft, finish = _one_stage(m * encode[:, 0], m * decode[..., 0] * weights)
        else:
            longer, spread = self.spread.of_stages(choice.stages, m, batch, iterations, encode)
            encode = encode + longer
            gains = ragged_gains_s(encode, spread, m)
            drains = iterations > serving.completion.max_iterations
            steady = rhythm(encode, decode, m, drains, gains, weights)
            cycle, ttft = steady.cycle_s, encode_end_s(encode, m, steady.offset_s, gains)
            finish = finish_s(encode, decode, m, steady.offset_s, gains, weights=weights)
        latency = ttft
        if ends > 0:
            cycles, rest = np.divmod(ends - 1, iterations)
            waited = np.where(cycles > 0, np.maximum(cycles, 1) * cycle, 0.0)
            latency = waited + _at_iteration(blocks, finish, rest + 1)
        if not serving.first_token_at_encoding:
            ttft = finish[:, 0]
        pool = batch * blocks.active[:, 0]
        kv_tokens = pool_kv_tokens(serving, batch, iterations, pool)
        memory = self._memory(choice, batch, kv_tokens, np.maximum(pool, batch))
        throughput = choice.num_replicas * batch / cycle
        return make_estimates(throughput, latency, ttft, serving.num_gaps, pool, cycle, memory)

    def _decode_s(self, choice: Choice, batch: FloatArray, blocks: Blocks) -> FloatArray:
        """Stage times of the iterations of every block, (n, blocks, stages); zero where there is none."""
        share = batch[:, None] / choice.num_micro_batches
        return self.serving.decode_s(
            choice.stages, share * blocks.active, share * blocks.context, share * blocks.inputs
        )

    def _memory(
        self, choice: Choice, batch: FloatArray, kv_tokens: FloatArray, rows: FloatArray
    ) -> MemoryPlan:
        m = choice.num_micro_batches
        return self.serving.memory(choice.stages, kv_tokens, batch / m * self.serving.mean_input, rows / m)


def _one_stage(encode_s: FloatArray, decode_s: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Cycle, end of encoding and end of every iteration where nothing overlaps."""
    finish = encode_s[:, None] + np.cumsum(decode_s, axis=1)
    return finish[:, -1], encode_s, finish


def _at_iteration(blocks: Blocks, finish_s: FloatArray, iteration: IntArray) -> FloatArray:
    """End of each candidate's iteration (from 1 on), from the ends of blocks of equally long ones."""
    at, left = blocks.place(iteration)
    end = np.take_along_axis(finish_s, at[:, None], axis=1)[:, 0]
    # A block of one iteration has nothing left of it, so what stands in front of the first one is no matter.
    before = np.take_along_axis(finish_s, np.maximum(at - 1, 0)[:, None], axis=1)[:, 0]
    return np.where(left > 0, end - left * (end - before), end)
