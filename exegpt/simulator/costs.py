"""Time of each pipeline stage for a micro-batch, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from exegpt.errors import ProfileRangeError
from exegpt.profiler.grid import FloatArray, Grid
from exegpt.profiler.table import LayerCosts, ProfileTable
from exegpt.schedule import Stage
from exegpt.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """What a stage's time depends on: its layers, degree, and whether it embeds or samples."""

    num_layers: int
    tp_size: int
    is_first: bool
    is_last: bool


def stage_shapes(stages: Sequence[Stage]) -> tuple[StageShape, ...]:
    """Shapes of a pipeline's stages, in order."""
    last = len(stages) - 1
    return tuple(
        StageShape(num_layers=s.num_layers, tp_size=s.tp_size, is_first=i == 0, is_last=i == last)
        for i, s in enumerate(stages)
    )


class StageCosts:
    """Stage times of one pipeline.

    Parameters
    ----------
    profile : ProfileTable
    model : ModelSpec
    stages : sequence of StageShape

    Notes
    -----
    A stage costs layers x (linear + attention + two all-reduces) + overhead, the first one also the
    embedding, the last one head and sampling; handing on to the next stage is part of the sender's
    time. Encode attention of more queries than were profiled is that of several batches one after
    another, which the runtime could always do.
    """

    def __init__(self, profile: ProfileTable, model: ModelSpec, stages: Sequence[StageShape]) -> None:
        for stage in stages:
            if stage.tp_size not in profile.layers:
                raise ProfileRangeError(
                    f"tp_size={stage.tp_size} was not profiled for {model.name}; "
                    f"profiled: {sorted(profile.layers)}. Profile again with more workers."
                )
        self.profile = profile
        self.model = model
        self.stages = tuple(stages)
        self._row_bytes = model.hidden_size * profile.dtype.num_bytes

    def encode_s(self, queries: ArrayLike, tokens: ArrayLike, rms_tokens: ArrayLike) -> FloatArray:
        """Stage times to encode a micro-batch.

        Parameters
        ----------
        queries, tokens, rms_tokens : arrays, broadcast to shape (...)
            Queries, their summed prompt tokens, the root-mean-square prompt length.

        Returns
        -------
        float array, shape (..., num_stages)
            Infinity where the profile does not reach.
        """
        q, n, r = np.broadcast_arrays(
            *(np.asarray(a, dtype=np.float64) for a in (queries, tokens, rms_tokens))
        )
        return self._stages(q, n, lambda c: _composed(c.encode_attention, q, r), "encode_overhead")

    def decode_s(self, queries: ArrayLike, context_tokens: ArrayLike) -> FloatArray:
        """Stage times of one decode iteration; shapes as in `encode_s`."""
        q, n = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (queries, context_tokens)))
        return self._stages(q, q, lambda c: c.decode_attention.at_or_inf(q, n), "decode_overhead")

    def _stages(self, queries: FloatArray, tokens: FloatArray, attention, overhead: str) -> FloatArray:  # type: ignore[no-untyped-def]
        per_degree: dict[int, tuple[FloatArray, FloatArray]] = {}
        times = []
        for stage in self.stages:
            costs = self.profile.layers[stage.tp_size]
            if stage.tp_size not in per_degree:
                layer = costs.linear.at_or_inf(tokens) + attention(costs)
                if costs.all_reduce is not None:
                    layer = layer + 2 * costs.all_reduce.at_or_inf(tokens * self._row_bytes)
                per_degree[stage.tp_size] = layer, getattr(costs, overhead).at_or_inf(queries)
            layer, fixed = per_degree[stage.tp_size]
            times.append(stage.num_layers * layer + fixed + self._ends(stage, costs, queries, tokens))
        return np.stack(times, axis=-1)

    def _ends(
        self, stage: StageShape, costs: LayerCosts, queries: FloatArray, tokens: FloatArray
    ) -> FloatArray:
        time = np.zeros_like(queries)
        if stage.is_first:
            time = time + costs.embed.at_or_inf(tokens)
        if stage.is_last:
            time = time + costs.head.at_or_inf(queries)
        if len(self.stages) > 1:
            sent = queries * 8 if stage.is_last else tokens * self._row_bytes
            time = time + self.profile.send.at_or_inf(sent)
        return time

    def encode_one_s(self, queries: int, tokens: int, rms_tokens: float) -> list[float]:
        """Stage times to encode one micro-batch; raises ProfileRangeError outside the profile."""
        return [
            self._one(
                stage,
                queries,
                tokens,
                _composed_one(c.encode_attention, queries, rms_tokens),
                c.encode_overhead,
            )
            for stage, c in ((s, self.profile.layers[s.tp_size]) for s in self.stages)
        ]

    def decode_one_s(self, queries: int, context_tokens: int) -> list[float]:
        """Stage times of one decode iteration of one micro-batch; raises outside the profile."""
        return [
            self._one(
                stage, queries, queries, c.decode_attention.at(queries, context_tokens), c.decode_overhead
            )
            for stage, c in ((s, self.profile.layers[s.tp_size]) for s in self.stages)
        ]

    def _one(self, stage: StageShape, queries: int, tokens: int, attention_s: float, overhead: Grid) -> float:
        costs = self.profile.layers[stage.tp_size]
        layer = costs.linear.at(tokens) + attention_s
        if costs.all_reduce is not None:
            layer += 2 * costs.all_reduce.at(tokens * self._row_bytes)
        time = stage.num_layers * layer + overhead.at(queries)
        if stage.is_first:
            time += costs.embed.at(tokens)
        if stage.is_last:
            time += costs.head.at(queries)
        if len(self.stages) > 1:
            time += self.profile.send.at(queries * 8 if stage.is_last else tokens * self._row_bytes)
        return time


def _composed(grid: Grid, queries: FloatArray, rms_tokens: FloatArray) -> FloatArray:
    most = grid.limit(0)
    whole = np.floor(queries / most)
    return whole * grid.at_or_inf(most, rms_tokens) + grid.at_or_inf(queries - whole * most, rms_tokens)


def _composed_one(grid: Grid, queries: int, rms_tokens: float) -> float:
    whole, rest = divmod(queries, grid.limit(0))
    return whole * grid.at(grid.limit(0), rms_tokens) + grid.at(rest, rms_tokens)
