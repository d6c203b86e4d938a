"""Stage times of many choices at once, and lower bounds on them.

`StageCosts` looks every operator up by itself, for one pipeline. A search asks for thousands of
pipelines, so here everything of a stage that depends on one number is summed into one piecewise linear
function of the queries in a micro-batch: for decoding as it is, for encoding at the mean prompt. What is
left are attention's tables. Sums of piecewise linear functions on the union of their points are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray, Grid
from exegpt.profiler.table import LayerCosts, ProfileTable
from exegpt.schedule import Stage
from exegpt.simulator.choice import IntArray
from exegpt.simulator.curves import AttentionTable, CurveTable
from exegpt.simulator.memory import OVERFLOW_SIGMAS
from exegpt.specs import ModelSpec

# Bits of a stage's flags: it embeds, it samples, it hands on.
FIRST, LAST, SENDS = 1, 2, 4
NUM_FLAGS = 8


@dataclass(frozen=True, slots=True)
class StageKinds:
    """The different stages of pipelines; every array has shape (pipelines, kinds).

    Attributes
    ----------
    degree : int array
        Index into `StageTables.degrees`.
    layers : float array
    flags : int array
    count : float array
        Stages of this kind in the pipeline; 0 pads.
    """

    degree: IntArray
    layers: FloatArray
    flags: IntArray
    count: FloatArray

    def take(self, which: IntArray) -> StageKinds:
        """The pipelines at `which`, in that order."""
        return StageKinds(self.degree[which], self.layers[which], self.flags[which], self.count[which])

    def total(self, times: FloatArray) -> FloatArray:
        """Sum over a pipeline's stages of `times`, shape (n, kinds)."""
        return np.asarray(np.where(self.count > 0, self.count * times, 0.0).sum(-1))

    def slowest(self, times: FloatArray) -> FloatArray:
        """Greatest of `times` among a pipeline's stages, shape (n, kinds)."""
        return np.asarray(np.where(self.count > 0, times, -np.inf).max(-1))


class StageTables:
    """Stage times for one model, profile and mean prompt.

    Parameters
    ----------
    profile : ProfileTable
    model : ModelSpec
    mean_input, rms_input : float
        Mean and root-mean-square prompt length, in tokens.

    Notes
    -----
    Prompts vary: a micro-batch to encode is covered if the profile has its tokens with a reserve of
    `OVERFLOW_SIGMAS` deviations.
    """

    def __init__(self, profile: ProfileTable, model: ModelSpec, mean_input: float, rms_input: float) -> None:
        self.model = model
        deviation = np.sqrt(max(rms_input**2 - mean_input**2, 0.0))
        self._reserve = float(OVERFLOW_SIGMAS * deviation / mean_input)
        self.degrees = sorted(profile.layers)
        self._row_bytes = model.hidden_size * profile.dtype.num_bytes
        layers = [profile.layers[degree] for degree in self.degrees]
        crossed = [c.cross_attention for c in layers if c.cross_attention is not None]
        self.has_cross = bool(crossed)
        self._rms_input = rms_input
        self._encode_attention = AttentionTable([c.encode_attention for c in layers])
        self.self_attention = AttentionTable([c.decode_attention for c in layers])
        self.cross_attention = AttentionTable(crossed) if crossed else None
        decode, encode = [], []
        for costs in layers:
            decode += self._decode(profile, costs)
            encode += self._encode(profile, costs, mean_input, rms_input)
        self.decode = CurveTable(decode)
        self.encode = CurveTable(encode)

    def _decode(self, profile: ProfileTable, costs: LayerCosts) -> list[list[_Part]]:
        """A layer without attention, then the rest of a stage under each of its flags."""
        reduces = 3 if costs.cross_attention is not None else 2
        layer = [_Part(costs.linear, 1.0)]
        if costs.all_reduce is not None:
            layer.append(_Part(costs.all_reduce, self._row_bytes, reduces))
        return [layer] + [
            self._rest(profile, costs, flags, _Part(costs.decode_overhead, 1.0), 1.0)
            for flags in range(NUM_FLAGS)
        ]

    def _encode(
        self, profile: ProfileTable, costs: LayerCosts, mean_input: float, rms_input: float
    ) -> list[list[_Part]]:
        reserve = self._reserve
        layer = [
            _Part(costs.encode_linear or costs.linear, mean_input, reserve=reserve),
            _Part(costs.encode_attention, 1.0, second=rms_input),
        ]
        if costs.all_reduce is not None:
            layer.append(_Part(costs.all_reduce, mean_input * self._row_bytes, 2, reserve=reserve))
        return [layer] + [
            self._rest(profile, costs, flags, _Part(costs.encode_overhead, 1.0), mean_input, reserve)
            for flags in range(NUM_FLAGS)
        ]

    def _rest(
        self,
        profile: ProfileTable,
        costs: LayerCosts,
        flags: int,
        overhead: _Part,
        tokens: float,
        reserve: float = 0.0,
    ) -> list[_Part]:
        """Everything of a stage but its layers; `tokens` per query, which vary by `reserve`."""
        parts = [overhead]
        if flags & FIRST:
            parts.append(_Part(costs.embed, tokens, reserve=reserve))
        if flags & LAST:
            parts.append(_Part(costs.head, 1.0))
        if flags & SENDS:
            # The last stage hands token ids back to the first one.
            sent = _Part(profile.send, tokens * self._row_bytes, reserve=reserve)
            parts.append(_Part(profile.send, 8.0) if flags & LAST else sent)
        return parts

    def kinds(self, pipelines: Sequence[tuple[Stage, ...]]) -> StageKinds:
        """The different stages of each pipeline."""
        rows = [self._kinds(stages) for stages in pipelines]
        width = max(len(row) for row in rows)
        filled = [list(row.items()) + [((0, 0, 0), 0)] * (width - len(row)) for row in rows]
        table = np.asarray([[(*kind, count) for kind, count in row] for row in filled])
        return StageKinds(
            table[..., 0], table[..., 1].astype(np.float64), table[..., 2], table[..., 3].astype(np.float64)
        )

    def _kinds(self, stages: tuple[Stage, ...]) -> dict[tuple[int, int, int], int]:
        found: dict[tuple[int, int, int], int] = {}
        for kind in self.stage_kinds(stages):
            found[kind] = found.get(kind, 0) + 1
        return found

    def stage_kinds(self, stages: tuple[Stage, ...]) -> list[tuple[int, int, int]]:
        """Degree index, layers and flags of every stage."""
        last = len(stages) - 1
        return [
            (
                self.degrees.index(stage.tp_size),
                stage.num_layers,
                FIRST * (i == 0) + LAST * (i == last) + SENDS * (last > 0),
            )
            for i, stage in enumerate(stages)
        ]

    def encode_s(self, kinds: StageKinds, queries: FloatArray) -> FloatArray:
        """Times of kinds (n, kinds) to encode micro-batches of `queries` (n,) mean prompts, (n, kinds)."""
        at = self.encode.locate(queries)
        layer, rest = self._functions(kinds)
        times = kinds.layers * self.encode.at(layer, at) + self.encode.at(rest, at)
        return np.where(kinds.count > 0, times, 0.0)

    def encode_ragged_s(
        self, kinds: StageKinds, queries: FloatArray, mean_prompts: FloatArray, rms_tokens: FloatArray
    ) -> FloatArray:
        """Times of kinds for prompts of another root-mean-square length; (n, kinds).

        `queries` prompts with the tokens of `mean_prompts` mean ones; each (n,).
        """
        other = self._encode_attention_s(kinds, queries, rms_tokens)
        usual = self._encode_attention_s(kinds, mean_prompts, np.full_like(mean_prompts, self._rms_input))
        return self.encode_s(kinds, mean_prompts) + kinds.layers * (other - usual)

    def _encode_attention_s(
        self, kinds: StageKinds, queries: FloatArray, rms_tokens: FloatArray
    ) -> FloatArray:
        """One layer's; more queries than the table holds are several batches (see `StageCosts`)."""
        table, most = self._encode_attention, self._encode_attention.q[-1]
        whole = np.floor(queries / most)
        full = table.at(kinds.degree, np.full_like(queries, most)[:, None], rms_tokens[:, None])
        rest = table.at(kinds.degree, (queries - whole * most)[:, None], rms_tokens[:, None])
        return np.asarray(np.where(whole[:, None] > 0, whole[:, None] * full, 0.0) + rest)

    def decode_s(
        self, kinds: StageKinds, queries: FloatArray, context: FloatArray, inputs: FloatArray
    ) -> FloatArray:
        """Times of kinds (n, kinds) for one decode iteration of micro-batches; (n, kinds).

        `queries`, their summed `context` tokens and, within them, their summed `inputs`, each (n,).
        """
        at = self.decode.locate(queries)
        layer, rest = self._functions(kinds)
        times = self.decode.at(layer, at) + self._attention(kinds, queries, context, inputs)
        return np.where(kinds.count > 0, kinds.layers * times + self.decode.at(rest, at), 0.0)

    def _attention(
        self, kinds: StageKinds, queries: FloatArray, context: FloatArray, inputs: FloatArray
    ) -> FloatArray:
        q, n = queries[:, None], context[:, None]
        if self.cross_attention is None:
            return self.self_attention.at(kinds.degree, q, n)
        own = self.self_attention.at(kinds.degree, q, n - inputs[:, None])
        return np.asarray(own + self.cross_attention.at(kinds.degree, q, inputs[:, None]))

    def _functions(self, kinds: StageKinds) -> tuple[IntArray, IntArray]:
        """Rows of `decode` and `encode`: of a layer, and of the rest of a stage."""
        base = kinds.degree * (1 + NUM_FLAGS)
        return base, base + 1 + kinds.flags

    def encode_least_per_query_s(self, kinds: StageKinds, low: FloatArray, high: FloatArray) -> FloatArray:
        """Least time per query over micro-batches of `low` to `high` queries, by kind; (n, kinds)."""
        layer, rest = self._functions(kinds)
        a, b = low[:, None], high[:, None]
        return np.asarray(
            kinds.layers * self.encode.least_ratio(layer, a, b) + self.encode.least_ratio(rest, a, b)
        )

    def decode_linear_s(self, kinds: StageKinds, queries: FloatArray) -> FloatArray:
        """Times of a decode iteration without attention, by kind; (n, kinds)."""
        at = self.decode.locate(queries)
        layer, rest = self._functions(kinds)
        return kinds.layers * self.decode.at(layer, at) + self.decode.at(rest, at)

    def decode_least_per_query_s(
        self, kinds: StageKinds, least: FloatArray, low: FloatArray, high: FloatArray
    ) -> FloatArray:
        """Least mean time per query of decode iterations without attention, by kind; (n, kinds).

        No micro-batch has fewer than `least` queries, and over a cycle they have `low` to `high` on average.
        """
        layer, rest = self._functions(kinds)
        i, a, b = self.decode.locate(least)[0][:, None], low[:, None], high[:, None]
        return np.asarray(
            kinds.layers * self.decode.convex_ratio(layer, i, a, b) + self.decode.convex_ratio(rest, i, a, b)
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """`weight` x a grid at `scale` x queries (and at `second` on its second axis).

    So many queries are covered as the grid holds with `reserve` x their root more.
    """

    grid: Grid
    scale: float
    weight: float = 1.0
    second: float | None = None
    reserve: float = 0.0

    def points(self, limit: float) -> FloatArray:
        """Where its slope changes, in queries, up to `limit`."""
        points = self.grid.axes[0] / self.scale
        if self.second is None:
            return points
        # More queries than the table holds are several batches (see `StageCosts`).
        most = points[-1]
        repeats = np.arange(0, np.ceil(limit / most) + 1)
        again = np.asarray((repeats[:, None] * most + np.append(0.0, points)[None, :]).ravel())
        return again[(again > 0) & (again <= limit)]

    def limit(self) -> float:
        """Most queries that it covers."""
        if self.second is not None:
            return np.inf
        held = self.grid.limit(0) / self.scale
        return (math.sqrt(self.reserve**2 / 4 + held) - self.reserve / 2) ** 2

    def at(self, queries: FloatArray) -> FloatArray:
        """Times in seconds."""
        if self.second is None:
            # Rounding must not push the last point out of the table.
            return self.weight * self.grid.at_or_inf(np.minimum(queries * self.scale, self.grid.limit(0)))
        most = self.grid.limit(0)
        whole = np.floor(queries / most)
        rest = self.grid.at_or_inf(queries - whole * most, self.second)
        return np.asarray(whole * self.grid.at_or_inf(most, self.second) + rest)
