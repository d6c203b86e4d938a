"""STATIC and STATIC_HYBRID in closed form: a batch until its longest query ends, K/V at maximum length.

STATIC is FasterTransformer's way. STATIC_HYBRID (DeepSpeed-Inference) encodes in more micro-batches
than it decodes in. Both are bound on the longest output, as finished rows are computed until then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from exegpt.errors import ConfigError
from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray
from exegpt.simulator.forms.spread import ragged_spread_s
from exegpt.simulator.pipeline import encode_end_s, finish_s, period_s, phase_s
from exegpt.simulator.ragged import ragged_gains_s
from exegpt.simulator.serving import Serving, make_estimates


class StaticForm:
    """Estimates of STATIC and STATIC_HYBRID."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def estimate(self, choice: Choice, batch: FloatArray, extent: IntArray) -> Estimates:
        m, splits = choice.num_micro_batches, encode_splits_of(choice)
        encode = self.serving.encode_s(choice.stages, batch / (m * splits))
        spread = ragged_spread_s(self.serving, choice.stages, batch / (m * splits), m * splits, encode)
        gains = ragged_gains_s(encode, spread, m * splits)
        ttft = encode_end_s(encode, m * splits, np.zeros_like(encode), gains)
        longest = self.serving.completion.max_iterations
        per_micro_batch = batch[:, None] / m
        contexts = per_micro_batch * (self.serving.mean_input + 1 + np.arange(longest))
        if longest == 0:
            total = latency = ttft
        else:
            rows = np.broadcast_to(per_micro_batch, contexts.shape)
            decode = self.serving.decode_s(choice.stages, rows, contexts, rows * self.serving.mean_input)
            finish = finish_s(encode, decode, m, gains_s=gains, encode_splits=splits)
            steps = np.diff(finish, axis=1, prepend=ttft[:, None])
            total = ttft + (steps * self._shares(per_micro_batch[:, 0], decode, m)).sum(-1)
            latency = finish[:, -1]
        slot = self.serving.lengths.max_input + self.serving.lengths.max_output + self.serving.page_size - 1
        memory = self.serving.memory(
            choice.stages, batch * slot, batch / (m * splits) * self.serving.mean_input, batch / m
        )
        return make_estimates(batch / total, latency, ttft, longest, batch, total, memory)

    def bounds(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes: a batch takes its encode phase at least, and K/V for every query's maximum."""
        serving = self.serving
        phase, memory = np.zeros((2, len(which)))
        slot = serving.lengths.max_input + serving.lengths.max_output + serving.page_size - 1
        for index in np.unique(which).tolist():
            mine, choice = which == index, choices[index]
            least, m = batches[mine, 0].astype(np.float64), choice.num_micro_batches
            parts = m * encode_splits_of(choice)
            phase[mine] = phase_s(serving.encode_s(choice.stages, least / parts), parts)
            ones, encoded = np.ones_like(least), least / parts * serving.mean_input
            amounts = np.stack([ones, least * slot, encoded, least / m], axis=-1)
            memory[mine] = (serving.memory_coefficients(choice.stages) @ amounts.T).max(0)
        return Bounds(
            throughput_upper_per_s=batches[:, 1] / phase,
            latency_lower_s=phase,
            ttft_lower_s=phase,
            memory_lower_bytes=memory,
        )

    def _shares(self, queries: FloatArray, decode_s: FloatArray, m: int) -> FloatArray:
        """Expected share of each decode iteration's full period that a static batch takes, (n, iterations).

        A micro-batch of b queries is there in iteration u with probability 1 - (1 - G(u - 1))^b, until
        its own longest ends; k of m that are left have the period of k.
        """
        there = 1 - (1 - self.serving.completion.survival[: decode_s.shape[-2]]) ** queries[:, None]
        full = period_s(decode_s, m)
        expected = np.zeros_like(full)
        for k in range(1, m + 1):
            chance = math.comb(m, k) * there**k * (1 - there) ** (m - k)
            expected += chance * period_s(decode_s, k)
        return np.asarray(expected / full)


def encode_splits_of(choice: Choice) -> int:
    """Encode micro-batches per decode micro-batch.

    Raises
    ------
    ConfigError
        If they do not divide.
    """
    splits, rest = divmod(choice.encode_micro_batches or choice.num_micro_batches, choice.num_micro_batches)
    if rest or splits < 1:
        raise ConfigError(
            f"encode_micro_batches={choice.encode_micro_batches} must be a multiple of "
            f"num_micro_batches={choice.num_micro_batches}"
        )
    return splits
