"""Time to hand the K/V of encoded prompts from an encode pipeline to a decode pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray, Grid
from exegpt.profiler.table import ProfileTable
from exegpt.schedule import Stage
from exegpt.specs import ModelSpec, Policy


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of K/V between the fullest ranks of two pipelines; all ranks copy at once.

    Attributes
    ----------
    grid : Grid
        Seconds of one copy, by bytes. What is larger than was profiled goes in several copies.
    source_bytes, target_bytes : int
        K/V bytes of a token on the fullest rank of the encode and of the decode pipeline; arrays
        for as many pairs of pipelines.
    through_host : bool
        WAA: source -> host memory -> target, two copies one after the other, each of which keeps one
        side's link busy. Else they are one message, which keeps both busy as long as the longer takes.
    """

    grid: Grid
    source_bytes: int | FloatArray
    target_bytes: int | FloatArray
    through_host: bool

    def source_s(self, tokens: FloatArray) -> FloatArray:
        """How long the encode side's link is busy with `tokens` prompt tokens; same shape."""
        if self.through_host:
            return self._copies_s(tokens * self.source_bytes)
        return self._copies_s(tokens * np.maximum(self.source_bytes, self.target_bytes))

    def target_s(self, tokens: FloatArray) -> FloatArray:
        """How long the decode side's link is busy; same shape."""
        if self.through_host:
            return self._copies_s(tokens * self.target_bytes)
        return self.source_s(tokens)

    def latency_s(self, tokens: FloatArray) -> FloatArray:
        """From the end of encoding until the K/V is there; same shape."""
        if self.through_host:
            return np.asarray(self.source_s(tokens) + self.target_s(tokens))
        return self.source_s(tokens)

    def _copies_s(self, num_bytes: FloatArray) -> FloatArray:
        sizes = np.asarray(num_bytes, dtype=np.float64)
        most = self.grid.limit()
        whole = np.floor(sizes / most)
        # Rounding must leave no rest below zero.
        rest = np.maximum(sizes - whole * most, 0.0)
        return np.asarray(whole * self.grid.at_or_inf(most) + self.grid.at_or_inf(rest))


def make_transfer(
    profile: ProfileTable,
    model: ModelSpec,
    policy: Policy,
    encode_stages: Sequence[Stage],
    decode_stages: Sequence[Stage],
) -> Transfer:
    """How a policy hands K/V over: DISAGGREGATED sends it, the others pass it through host memory.

    Where a profile has no copies between GPU and host, messages between stages stand for them.
    """
    through_host = policy is not Policy.DISAGGREGATED
    source, target = (
        max(model.kv_bytes_per_token(profile.dtype, s.num_layers, s.tp_size) for s in stages)
        for stages in (encode_stages, decode_stages)
    )
    host_copy = profile.host_copy if through_host else None
    return Transfer(host_copy or profile.send, source, target, through_host)
