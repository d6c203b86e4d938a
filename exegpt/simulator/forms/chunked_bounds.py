"""What no schedule of CHUNKED beats, whatever its turns: by work, by slots and budget, by a single token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray, Grid
from exegpt.profiler.table import LayerCosts
from exegpt.simulator.choice import Bounds, Choice, IntArray
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import LAST, StageKinds


@dataclass(frozen=True)
class ChunkLimits:
    """Limits of pipelines under one workload; `kinds` and arrays by pipeline and budget are (n, kinds).

    Parameters
    ----------
    serving : Serving
    mean_decode, mean_context : float
        Decode iterations of a query, and tokens that a decoding row attends to.
    """

    serving: Serving
    mean_decode: float
    mean_context: float

    def work_s(self, kinds: StageKinds, m: FloatArray | int, budget: FloatArray) -> FloatArray:
        """Least time of a turn per query that joins in it, (n,); `m` micro-batches.

        A pass of n tokens costs no less per token than the cheapest pass of up to `budget` does, and
        a row's attention, head and sampling no less than in the cheapest batch. The busiest stage does
        all of a turn's work, and in m turns a micro-batch's passes all stages.
        """
        row_bytes = self.serving.model.hidden_size * self.serving.profile.dtype.num_bytes
        tokens = self.serving.mean_input + self.mean_decode
        fixed, head = self._of_degrees
        layer = []
        for table, rows_s in zip(self._tables, fixed.tolist(), strict=True):
            per_token = least_ratio(table.linear, 1.0, budget)
            if table.all_reduce is not None:
                per_token = per_token + 2 * least_ratio(table.all_reduce, row_bytes, budget)
            layer.append(per_token * tokens + rows_s)
        per_layer = np.take_along_axis(np.stack(layer, axis=-1), kinds.degree, axis=1)
        ends = head[kinds.degree] * ((kinds.flags & LAST) > 0)
        stages = kinds.layers * per_layer + ends
        return np.asarray(np.maximum(kinds.slowest(stages), kinds.total(stages) / m))

    @property
    def _tables(self) -> list[LayerCosts]:
        return [self.serving.profile.layers[t] for t in self.serving.tables.degrees]

    @cached_property
    def _of_degrees(self) -> tuple[FloatArray, FloatArray]:
        """Least time per query of a layer's attention, and of head and sampling; by degree."""
        fixed, head = [], []
        for table in self._tables:
            rows = np.arange(1.0, table.decode_attention.limit(0) + 1)
            attention = table.decode_attention.at_or_inf(rows, rows * self.mean_context) / rows
            prompt = self._prompt_attention_s(table.encode_attention)
            fixed.append(self.mean_decode * float(attention.min()) + prompt)
            sampled = least_ratio(table.head, 1.0, np.array([table.head.limit()]))
            head.append((1 + self.mean_decode) * float(sampled[0]))
        return np.asarray(fixed), np.asarray(head)

    def _prompt_attention_s(self, grid: Grid) -> float:
        """Encode attention of a query at the least: in the cheapest batch, of prompts like its own or mixed.

        Prompts of one batch are looked up at their root-mean-square length; an uneven table may lie below
        both what mixed and what equal prompts cost there. Our choice: nine tenths of the lesser.
        """
        pmf = self.serving.lengths.input_pmf
        lengths = np.append(np.flatnonzero(pmf), self.serving.rms_input)
        queries = np.append(1.0, grid.axes[0][grid.axes[0] > 1])[:, None]
        cheapest = (grid.at_or_inf(queries, lengths) / queries).min(axis=0)
        return 0.9 * min(float(pmf[pmf > 0] @ cheapest[:-1]), float(cheapest[-1]))

    def token_s(self, kinds: StageKinds) -> tuple[FloatArray, FloatArray]:
        """Least time of the slowest stage, and of all together, for a pass with a token in it; (n,) each."""
        linear = np.asarray(
            [float(self.serving.profile.layers[t].linear.at_or_inf(1.0)) for t in self.serving.tables.degrees]
        )
        times = kinds.layers * linear[kinds.degree]
        return kinds.slowest(times), kinds.total(times)

    def most_joining(self, slots: FloatArray, budget: FloatArray) -> FloatArray:
        """Most queries that can join a micro-batch per turn: its slots, or its budget, bind."""
        return np.minimum(
            slots / (self.mean_decode + 1), budget / (self.serving.mean_input + self.mean_decode)
        )

    def least_joining(self, slots: FloatArray, most_slots: FloatArray, budget: FloatArray) -> FloatArray:
        """Fewest queries that join a micro-batch per turn in the mean.

        A query is in line for one turn, and then as long as the prompts in line take, of which there are
        at most as many as slots and which get at least the budget less a row for every slot. By Little's
        law the rate is no less than slots / (E[D] + 1 + slots E[input] / (budget - slots)).
        """
        spare = np.maximum(budget - most_slots, 0.0)
        in_line = np.divide(
            most_slots * self.serving.mean_input, spare, out=np.full_like(spare, np.inf), where=spare > 0
        )
        return slots / (self.mean_decode + 1 + in_line)


def least_ratio(grid: Grid, scale: float, most: FloatArray) -> FloatArray:
    """Least of cost / n over n from 1 to `most`, where n items are at `scale` x n on the grid.

    On a piecewise linear function a ratio is least at an end of a piece.
    """
    points = grid.axes[0] / scale
    points = np.append(1.0, points[points > 1])
    ratios = np.minimum.accumulate(grid.at_or_inf(points * scale) / points)
    at = np.searchsorted(points, most, side="right") - 1
    within = np.minimum(most, points[-1])
    return np.asarray(np.minimum(ratios[np.maximum(at, 0)], grid.at_or_inf(within * scale) / within))


class ChunkedBounds:
    """Bounds of boxes of slots x token budget; slots are multiples of the micro-batches.

    Notes
    -----
    `ChunkedForm.estimate` keeps to all limits of `ChunkLimits`, so a box keeps to each at its loosest:
    the rate of joining is at most that of its most slots and greatest budget, at least that of its
    fewest slots and least budget with the rows of its most slots. A turn takes at least as long as that
    many rows' decoding (rate x (E[D] + 1) of them, by Little's law), a single token, and the rate
    times a query's work. Work falls with the budget, which lets passes be larger; decoding rises with rows
    since tables are isotone. Latency is at least one passage and D - 1 turns of every micro-batch, less one
    slot's part of what is not decoding.
    """

    def __init__(self, limits: ChunkLimits, choices: Sequence[Choice], mean_own_input: float) -> None:
        self.limits = limits
        self.choices = choices
        self.mean_own_input = mean_own_input
        serving = limits.serving
        self.kinds = serving.tables.kinds([choice.stages for choice in choices])
        self.m = np.asarray([choice.num_micro_batches for choice in choices], dtype=np.float64)
        self.num_replicas = np.asarray([choice.num_replicas for choice in choices])
        self.ends = serving.completion.iterations_of(serving.bound_output_tokens)

    def of(self, which: IntArray, batches: IntArray, extents: IntArray) -> Bounds:
        """Bounds of boxes, memory left at zero."""
        limits, kinds, m = self.limits, self.kinds.take(which), self.m[which]
        slots, budget = batches / m[:, None], extents.astype(np.float64)
        least = limits.least_joining(slots[:, 0], slots[:, 1], budget[:, 0])
        most = limits.most_joining(slots[:, 1], budget[:, 1])
        rows = np.minimum(least, most) * (limits.mean_decode + 1)
        decode = limits.serving.tables.decode_s(
            kinds, rows, rows * limits.mean_context, rows * self.mean_own_input
        )
        calm = np.maximum(kinds.slowest(decode), kinds.total(decode) / m)
        slowest, passage = limits.token_s(kinds)
        calm = np.maximum(calm, np.maximum(slowest, passage / m))
        work = limits.work_s(kinds, m, budget[:, 1])
        turn = np.maximum(calm, least * work)
        per_s = np.minimum(most / turn, 1 / work)
        # Of what a turn takes beyond decoding, at most one slot's part is the query's own.
        others = calm + np.maximum(turn - calm, 0.0) * (1 - 1 / np.maximum(batches[:, 0], 1))
        decoded = max(self.ends - 1, 0) * m * others
        return Bounds(
            throughput_upper_per_s=self.num_replicas[which] * np.where(np.isfinite(turn), per_s, 0.0),
            latency_lower_s=decoded + passage,
            ttft_lower_s=passage,
            memory_lower_bytes=np.zeros(len(which)),
        )
