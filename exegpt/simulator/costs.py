"""Time of each pipeline stage for a micro-batch, from a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from exegpt.errors import ProfileError, ProfileRangeError
from exegpt.profiler.grid import FloatArray, Grid
from exegpt.profiler.table import LayerCosts, ProfileTable
from exegpt.schedule import Stage
from exegpt.specs import ModelSpec

# What the last stage hands on per query: the id of the token sampled.
TOKEN_BYTES = 8


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
        Of an encoder-decoder model a stage has as many encoder layers as decoder layers.

    Raises
    ------
    ProfileRangeError
        If the profile lacks a stage's degree.
    ProfileError
        If it lacks the tables that an encoder-decoder model needs.

    Notes
    -----
    A stage costs layers x (linear + attention + all-reduces) + overhead, the first one also the
    embedding, the last one head and sampling; handing on to the next stage is part of the sender's
    time. A layer has two all-reduces, T5's decoder layer a third one behind its cross attention. Encode
    attention of more queries than were profiled is that of several batches one after another, which the
    runtime could always do.

    Encoding an encoder-decoder model yields no token, so its last stage samples none; it hands the
    encoder's output to the other stages, whose decoder layers project it to cross K/V.
    """

    def __init__(self, profile: ProfileTable, model: ModelSpec, stages: Sequence[StageShape]) -> None:
        for stage in stages:
            if stage.tp_size not in profile.layers:
                raise ProfileRangeError(
                    f"tp_size={stage.tp_size} was not profiled for {model.name}; "
                    f"profiled: {sorted(profile.layers)}. Profile again with more workers."
                )
            costs = profile.layers[stage.tp_size]
            if model.is_encoder_decoder and (costs.encode_linear is None or costs.cross_attention is None):
                raise ProfileError(
                    f"the profile of {model.name} lacks encode_linear or cross_attention at tp_size="
                    f"{stage.tp_size}, which an encoder-decoder model needs; use an analytic profile"
                )
        self.profile = profile
        self.model = model
        self.stages = tuple(stages)
        # Stages alike take equally long.
        self.degrees = tuple(sorted({stage.tp_size for stage in self.stages}))
        self.kinds = tuple(dict.fromkeys(self.stages))
        self.kind_of_stage = [self.kinds.index(stage) for stage in self.stages]
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
        return self._stages(q, n, lambda costs: composed(costs.encode_attention, q, r), _ENCODE)

    def decode_s(
        self, queries: ArrayLike, context_tokens: ArrayLike, input_tokens: ArrayLike | None = None
    ) -> FloatArray:
        """Stage times of one decode iteration.

        Parameters
        ----------
        queries, context_tokens : arrays, broadcast to shape (...)
            Queries, and the tokens they attend to, input and generated ones, summed.
        input_tokens : array, optional
            The input tokens among them. Read for encoder-decoder models, which need it: cross attention
            covers the input, self attention the rest.

        Returns
        -------
        float array, shape (..., num_stages)
            Infinity where the profile does not reach.

        Raises
        ------
        ValueError
            If an encoder-decoder model's input tokens are not given.
        """
        if not self.model.is_encoder_decoder:
            q, n = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (queries, context_tokens)))
            return self._stages(q, q, lambda costs: costs.decode_attention.at_or_inf(q, n), _DECODE)
        if input_tokens is None:
            raise ValueError(
                f"decode_s of {self.model.name} needs input_tokens, which its decoder attends to"
            )
        q, n, crossed = np.broadcast_arrays(
            *(np.asarray(a, dtype=np.float64) for a in (queries, context_tokens, input_tokens))
        )

        def attention(costs: LayerCosts) -> FloatArray:
            assert costs.cross_attention is not None
            own = costs.decode_attention.at_or_inf(q, n - crossed)
            return np.asarray(own + costs.cross_attention.at_or_inf(q, crossed))

        return self._stages(q, q, attention, _DECODE)

    def encode_one_s(self, queries: int, tokens: int, rms_tokens: float) -> list[float]:
        """Stage times to encode one micro-batch; raises ProfileRangeError outside the profile."""
        attention = {
            tp_size: _composed_one(self.profile.layers[tp_size].encode_attention, queries, rms_tokens)
            for tp_size in self.degrees
        }
        return self._one_s(queries, tokens, attention, _ENCODE)

    def decode_one_s(self, queries: int, context_tokens: int, input_tokens: int = 0) -> list[float]:
        """Stage times of one decode iteration of one micro-batch; arguments as of `decode_s`.

        Raises
        ------
        ProfileRangeError
            Outside the profile.
        ValueError
            If an encoder-decoder model's queries have no input tokens: every prompt has one.
        """
        if self.model.is_encoder_decoder and queries > 0 and input_tokens < 1:
            raise ValueError(
                f"decode_one_s of {self.model.name} needs the input tokens of its {queries} queries"
            )
        attention = {
            tp_size: self._decode_attention_one(tp_size, queries, context_tokens, input_tokens)
            for tp_size in self.degrees
        }
        return self._one_s(queries, queries, attention, _DECODE)

    def _decode_attention_one(
        self, tp_size: int, queries: int, context_tokens: int, input_tokens: int
    ) -> float:
        costs = self.profile.layers[tp_size]
        if not self.model.is_encoder_decoder:
            return costs.decode_attention.at(queries, context_tokens)
        assert costs.cross_attention is not None
        own = costs.decode_attention.at(queries, context_tokens - input_tokens)
        return own + costs.cross_attention.at(queries, input_tokens)

    def _one_s(
        self, queries: int, tokens: int, attention_s: Mapping[int, float], phase: _Phase
    ) -> list[float]:
        layer = {}
        for tp_size in self.degrees:
            costs = self.profile.layers[tp_size]
            layer[tp_size] = phase.linear(costs).at(tokens) + attention_s[tp_size]
            if costs.all_reduce is not None:
                reduced = costs.all_reduce.at(tokens * self._row_bytes)
                layer[tp_size] += self._num_all_reduces(phase) * reduced
        times = [self._one(kind, queries, tokens, layer[kind.tp_size], phase) for kind in self.kinds]
        return [times[kind] for kind in self.kind_of_stage]

    def _stages(
        self,
        queries: FloatArray,
        tokens: FloatArray,
        attention: Callable[[LayerCosts], FloatArray],
        phase: _Phase,
    ) -> FloatArray:
        per_degree: dict[int, tuple[FloatArray, FloatArray]] = {}
        times = []
        for stage in self.stages:
            costs = self.profile.layers[stage.tp_size]
            if stage.tp_size not in per_degree:
                layer = phase.linear(costs).at_or_inf(tokens) + attention(costs)
                if costs.all_reduce is not None:
                    reduced = costs.all_reduce.at_or_inf(tokens * self._row_bytes)
                    layer = layer + self._num_all_reduces(phase) * reduced
                per_degree[stage.tp_size] = layer, phase.overhead(costs).at_or_inf(queries)
            layer, fixed = per_degree[stage.tp_size]
            times.append(stage.num_layers * layer + fixed + self._ends(stage, costs, queries, tokens, phase))
        return np.stack(times, axis=-1)

    def _ends(
        self, stage: StageShape, costs: LayerCosts, queries: FloatArray, tokens: FloatArray, phase: _Phase
    ) -> FloatArray:
        time = np.zeros_like(queries)
        samples = stage.is_last and self._samples(phase)
        if stage.is_first:
            time = time + costs.embed.at_or_inf(tokens)
        if samples:
            time = time + costs.head.at_or_inf(queries)
        if len(self.stages) > 1:
            sent = queries * TOKEN_BYTES if samples else tokens * self._row_bytes
            time = time + self.profile.send.at_or_inf(sent)
        return time

    def _one(self, stage: StageShape, queries: int, tokens: int, layer_s: float, phase: _Phase) -> float:
        costs = self.profile.layers[stage.tp_size]
        samples = stage.is_last and self._samples(phase)
        time = stage.num_layers * layer_s + phase.overhead(costs).at(queries)
        if stage.is_first:
            time += costs.embed.at(tokens)
        if samples:
            time += costs.head.at(queries)
        if len(self.stages) > 1:
            time += self.profile.send.at(queries * TOKEN_BYTES if samples else tokens * self._row_bytes)
        return time

    def _samples(self, phase: _Phase) -> bool:
        """Whether the phase ends with tokens."""
        return phase is _DECODE or not self.model.is_encoder_decoder

    def _num_all_reduces(self, phase: _Phase) -> int:
        """Sums over the group in one layer: behind attention, feed-forward block and cross attention."""
        return 3 if phase is _DECODE and self.model.is_encoder_decoder else 2


@dataclass(frozen=True, slots=True)
class _Phase:
    """Which tables a phase reads."""

    linear: Callable[[LayerCosts], Grid]
    overhead: Callable[[LayerCosts], Grid]


_ENCODE = _Phase(
    linear=lambda costs: costs.linear if costs.encode_linear is None else costs.encode_linear,
    overhead=lambda costs: costs.encode_overhead,
)
_DECODE = _Phase(linear=lambda costs: costs.linear, overhead=lambda costs: costs.decode_overhead)


def composed(grid: Grid, queries: FloatArray, rms_tokens: FloatArray) -> FloatArray:
    """Encode attention of any number of queries: whole batches of the most profiled, and a rest."""
    most = grid.limit(0)
    whole = np.floor(queries / most)
    return whole * grid.at_or_inf(most, rms_tokens) + grid.at_or_inf(queries - whole * most, rms_tokens)


def _composed_one(grid: Grid, queries: int, rms_tokens: float) -> float:
    whole, rest = divmod(queries, grid.limit(0))
    return whole * grid.at(grid.limit(0), rms_tokens) + grid.at(rest, rms_tokens)
