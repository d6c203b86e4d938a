"""CHUNKED in closed form: continuous batching with split prompts and a token budget (Sarathi-Serve).

A micro-batch's q slots hold decoding rows r and queries in line to be encoded; of a turn's budget C the
rows take r and the line up to C - r prompt tokens, first come first served. What is left over is carried to
the next turn, so turns depend on each other: we follow one micro-batch turn by turn (`Lines`), all
candidates at once, and play the turns through the pipeline as ITERATION's are. Rows end with chance
1 / E[D] a turn: how many there are does not depend on the distribution of D, only on its mean.

By Little's law slots = rate x (E[D] + turns in line), which needs only the turns in line from the
sample. Where the budget binds the rate is then C / (E[input] + E[D]), and where it does not, q / (E[D] + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from exegpt.errors import ConfigError
from exegpt.policies.iteration import slots_of
from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray
from exegpt.simulator.forms.chunked_bounds import ChunkedBounds, ChunkLimits
from exegpt.simulator.forms.iteration import SlotTokens, decoding_means
from exegpt.simulator.forms.lines import Lines, LineTable
from exegpt.simulator.forms.stage_parts import LAYER
from exegpt.simulator.forms.turns import play
from exegpt.simulator.memory import OVERFLOW_SIGMAS, MemoryPlan
from exegpt.simulator.pipeline import period_s
from exegpt.simulator.serving import Serving, make_estimates

# Candidates estimated together: their turns fill some 20 MiB.
CANDIDATES_AT_ONCE = 1024


class ChunkedForm:
    """Estimates and bounds of CHUNKED."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.mean_decode = serving.completion.mean_iterations
        self.mean_context, self.mean_own_input = decoding_means(serving)
        self.limits = ChunkLimits(serving, self.mean_decode, self.mean_context)
        self._bounds: ChunkedBounds | None = None
        self.table = LineTable(Lines(serving))

    def estimate(self, choice: Choice, batch: FloatArray, extent: IntArray) -> Estimates:
        """Estimates of candidates; `batch` slots and `extent` tokens of an iteration, shape (n,)."""
        refuse_encoder_decoder(self.serving)
        m, slots, budget = choice.num_micro_batches, batch.astype(np.int64), extent.astype(np.int64)
        rows = self._rows(choice, slots, budget)
        work = self._stage_s(choice, rows)
        beyond = ~np.isfinite(work.sum((0, 1))) | (budget <= slots // m)
        work = np.where(beyond, 0.0, work)
        played = play([work], [work], m)
        done, is_split = (
            self._in_rotation(self.table.done, rows),
            self._in_rotation(self.table.is_split, rows),
        )
        mean_rows, tokens, full = np.moveaxis(self.table.means[rows].mean(0), 1, 0)
        # Counted by tokens: where few prompts end in the sample, many more tokens are encoded.
        sampled = tokens / self.serving.mean_input
        share = batch / m
        in_line = (share - mean_rows) / np.maximum(sampled, 1e-12)
        rate = share / (self.mean_decode + np.maximum(in_line, 1.0))
        # The sample is finite; what no schedule beats, and none falls short of, holds all the same.
        spending = budget.astype(np.float64)
        rate = np.maximum(rate, self.limits.least_joining(share, share, spending))
        rate = np.minimum(rate, self.limits.most_joining(share, spending))
        # A turn in which nobody joins: all that are not in line for a second turn decode.
        calm = self._calm_s(choice, rate * (self.mean_decode + 1))
        added = np.maximum(played.turn_s - calm, 0.0) * rate / np.maximum(sampled, 1e-12)
        kinds = self.serving.tables.kinds([choice.stages]).take(np.zeros(len(batch), dtype=np.int64))
        slowest, passage = self.limits.token_s(kinds)
        calm = np.maximum(calm, np.maximum(slowest, passage / m))
        turn = np.maximum(calm + added, rate * self.limits.work_s(kinds, m, spending))
        turn = np.where(beyond, np.inf, turn)
        interval = np.roll(played.start_s, -m, axis=0) - played.start_s
        interval[-m:] += len(work) * played.turn_s
        joins = np.maximum(done.sum(0), 1e-12)
        begun = (is_split * interval).sum(0) / joins
        ttft = np.maximum(begun + (done * played.pass_s).sum(0) / joins, passage)
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        latency = ttft
        if ends:
            # While it decodes, nobody joins in the query's own slot, unless others fill the budget anyway.
            others = calm + (turn - calm) * (1 - (1 - full) / batch)
            own = (done * interval).sum(0) / joins
            last = np.maximum(played.pass_s.mean(0), passage)
            latency = begun + own + (ends - 1) * m * others + last
        latency, ttft = np.where(beyond, np.inf, latency), np.where(beyond, np.inf, ttft)
        return make_estimates(
            choice.num_replicas * rate / turn,
            latency,
            ttft,
            self.serving.num_gaps,
            m * mean_rows,
            m * turn,
            self._memory(choice, batch, budget),
        )

    def bounds(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes of slots x token budget; see `ChunkedBounds`."""
        refuse_encoder_decoder(self.serving)
        if self._bounds is None or self._bounds.choices is not choices:
            self._bounds = ChunkedBounds(self.limits, choices, self.mean_own_input)
        found = self._bounds.of(which, batches, extents)
        memory = np.zeros(len(which))
        for index in np.unique(which).tolist():
            mine = which == index
            memory[mine] = self.fullest_bytes(choices[index], batches[mine, 0], extents[mine, 0])
        return replace(found, memory_lower_bytes=memory)

    def fullest_bytes(self, choice: Choice, batch: IntArray, extent: IntArray) -> FloatArray:
        """Bytes of the fullest rank of candidates, arrays of shape (n,)."""
        amounts = self._amounts(choice, batch.astype(np.float64), extent)
        return self.serving.fullest_bytes(choice.stages, *amounts)

    def refine(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes: single candidates' estimates, nothing about the others.

        Following turns costs about the same for one candidate as for hundreds.
        """
        per_s, latency, ttft, tpot, memory = np.zeros((5, len(which)))
        single = (batches[:, 0] == batches[:, 1]) & (extents[:, 0] == extents[:, 1])
        per_s[~single] = np.inf
        for index in np.unique(which[single]).tolist():
            mine = np.flatnonzero(single & (which == index))
            for part in np.array_split(mine, -(-len(mine) // CANDIDATES_AT_ONCE)):
                e = self.estimate(choices[index], batches[part, 0].astype(np.float64), extents[part, 0])
                per_s[part], latency[part], ttft[part] = e.throughput_per_s, e.latency_s, e.ttft_s
                tpot[part], memory[part] = e.tpot_s, e.memory.total_bytes.max(-1)
        return Bounds(
            throughput_upper_per_s=per_s,
            latency_lower_s=latency,
            ttft_lower_s=ttft,
            memory_lower_bytes=memory,
            tpot_lower_s=tpot,
        )

    def _rows(self, choice: Choice, slots: IntArray, budget: IntArray) -> IntArray:
        """Rows of the line table for every micro-batch, (m, n)."""
        m = choice.num_micro_batches
        degrees = {degree for degree, _, _ in self.serving.tables.stage_kinds(choice.stages)}
        own = np.stack([slots_of(slots, m, k) for k in range(m)])
        return self.table.find(own.ravel(), np.tile(budget, m), degrees).reshape(own.shape)

    @staticmethod
    def _in_rotation(by_row: FloatArray, rows: IntArray) -> FloatArray:
        """Turns in the micro-batches' rotation, (turns, n), of (pairs, num_turns).

        Each micro-batch has its own part of the sample.
        """
        m, n = rows.shape
        part = by_row.shape[1] // m
        turns = np.empty((part, m, n))
        for k in range(m):
            turns[:, k] = by_row[rows[k], part * k : part * (k + 1)].T
        return turns.reshape(part * m, n)

    def _stage_s(self, choice: Choice, rows: IntArray) -> FloatArray:
        """Stage times of the passes, shape (turns, num_stages, n)."""
        kinds = self.serving.tables.stage_kinds(choice.stages)
        parts = {(degree, part) for degree, _, flags in kinds for part in (LAYER, flags)}
        times = {key: self._in_rotation(self.table.part_s(*key), rows) for key in parts}
        return np.stack([n * times[d, LAYER] + times[d, flags] for d, n, flags in kinds], axis=1)

    def _calm_s(self, choice: Choice, rows: FloatArray) -> FloatArray:
        """Mean time of a turn without prompt tokens, shape (n,)."""
        decode = self.serving.costs(choice.stages).decode_s(
            rows, rows * self.mean_context, rows * self.mean_own_input
        )
        return period_s(decode, choice.num_micro_batches) / choice.num_micro_batches

    def _memory(self, choice: Choice, batch: FloatArray, budget: IntArray) -> MemoryPlan:
        return self.serving.memory(choice.stages, *self._amounts(choice, batch, budget))

    def _amounts(
        self, choice: Choice, batch: FloatArray, budget: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """K/V tokens, tokens encoded at once, rows; see `plan_memory`.

        K/V of a slot that is in line counts as encoded, which it is in part.
        """
        serving = self.serving
        held = SlotTokens.of(serving, 1 / (self.mean_decode + 1))
        kv_tokens = batch * (held.mean + (serving.page_size - 1) / 2)
        kv_tokens = kv_tokens + OVERFLOW_SIGMAS * np.sqrt(batch * held.variance)
        return kv_tokens, budget.astype(np.float64), batch / choice.num_micro_batches


def refuse_encoder_decoder(serving: Serving) -> None:
    """Raise ConfigError for a model whose prompts cannot be split."""
    if serving.model.is_encoder_decoder:
        raise ConfigError(
            f"policy CHUNKED cannot serve {serving.model.name}: its encoder attends to the whole prompt, not "
            "only to what came before, so a prompt cannot be encoded in parts. Take CHUNKED out of "
            "solver.policies."
        )
