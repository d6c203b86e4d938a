"""STATIC in closed form: a batch until its longest query ends, K/V at maximum length (FasterTransformer)."""

from __future__ import annotations

import math

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Choice, Estimates, IntArray
from exegpt.simulator.pipeline import finish_s, period_s, phase_s
from exegpt.simulator.serving import Serving, make_estimates


class StaticForm:
    """Estimates of STATIC."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def estimate(self, choice: Choice, batch: FloatArray, extent: IntArray) -> Estimates:
        m = choice.num_micro_batches
        encode = self.serving.encode_s(choice.stages, batch / m)
        ttft = phase_s(encode, m)
        longest = self.serving.completion.max_iterations
        per_micro_batch = batch[:, None] / m
        contexts = per_micro_batch * (self.serving.mean_input + 1 + np.arange(longest))
        if longest == 0:
            total = latency = ttft
        else:
            decode = self.serving.costs(choice.stages).decode_s(
                np.broadcast_to(per_micro_batch, contexts.shape), contexts
            )
            finish = finish_s(encode, decode, m)
            steps = np.diff(finish, axis=1, prepend=ttft[:, None])
            total = ttft + (steps * self._shares(per_micro_batch[:, 0], decode, m)).sum(-1)
            latency = finish[:, -1]
        slot = self.serving.lengths.max_input + self.serving.lengths.max_output + self.serving.page_size - 1
        memory = self.serving.memory(
            choice.stages, batch * slot, batch / m * self.serving.mean_input, batch / m
        )
        return make_estimates(batch / total, latency, ttft, longest, batch, total, memory)

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
