"""CHUNKED in closed form: continuous batching with split prompts and a token budget (Sarathi-Serve).

A micro-batch's q slots hold decoding rows r and queries in line to be encoded; of a turn's budget C the
rows take r and the line up to C - r prompt tokens, first come first served. What is left over is carried to
the next turn, so turns depend on each other: we follow one micro-batch turn by turn (`_Line`), all
candidates at once, and play the turns through the pipeline as ITERATION's are. Rows end with chance
1 / E[D] a turn: how many there are does not depend on the distribution of D, only on its mean.

By Little's law slots = rate x (E[D] + turns in line), which needs only the turns in line from the
sample. Where the budget binds the rate is then C / (E[input] + E[D]), and where it does not, q / (E[D] + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.errors import ConfigError
from exegpt.profiler.grid import FloatArray, Grid
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray
from exegpt.simulator.costs import composed
from exegpt.simulator.forms.chunked_bounds import ChunkedBounds, ChunkLimits
from exegpt.simulator.forms.iteration import SlotTokens, decoding_means
from exegpt.simulator.forms.turns import NUM_TURNS, STRATA, WARM_UP_TURNS, TurnSample, play
from exegpt.simulator.memory import OVERFLOW_SIGMAS, MemoryPlan
from exegpt.simulator.mixed import mixed_s
from exegpt.simulator.pipeline import period_s
from exegpt.simulator.serving import Serving, make_estimates

# Prompts in the sample; a turn takes them from a ring.
NUM_PROMPTS = 1024
# Candidates estimated together: their turns fill some 40 MiB.
CANDIDATES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class _Turns:
    """Turns of one micro-batch; float arrays of shape (num_turns, n).

    `fresh` prompts begin in a turn, `fresh_squares` the squared tokens of theirs; `resumed_from` and
    `resumed_to` are the places in the prompt that was begun before. `done` prompts end, and
    `is_split` says whether the last one is to be continued, `is_full` whether the budget was used up.
    """

    rows: FloatArray
    tokens: FloatArray
    num_chunks: FloatArray
    fresh: FloatArray
    fresh_squares: FloatArray
    resumed_from: FloatArray
    resumed_to: FloatArray
    done: FloatArray
    is_split: FloatArray
    is_full: FloatArray

    def of_micro_batches(self, first: _Turns, rest: IntArray, m: int) -> _Turns:
        """Turns in rotation: the k-th micro-batch has its own part of the sample.

        The first `rest` of them have a slot more.
        """
        part = len(self.rows) // m
        turns = (np.arange(part)[:, None] + part * np.arange(m)).ravel()
        more = np.tile(np.arange(m), part)[:, None] < rest
        return _Turns(
            *(
                np.where(more, getattr(first, name)[turns], getattr(self, name)[turns])
                for name in self.__dataclass_fields__
            )
        )


class ChunkedForm:
    """Estimates and bounds of CHUNKED."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.mean_decode = serving.completion.mean_iterations
        self.mean_context, self.mean_own_input = decoding_means(serving)
        self.limits = ChunkLimits(serving, self.mean_decode, self.mean_context)
        self._bounds: ChunkedBounds | None = None
        # Chance that a decoding row ends in a turn, and that a query decodes at all.
        self.decodes = float(serving.completion.survival[0])
        ending = self.decodes / self.mean_decode if self.mean_decode else 1.0
        self.sample = TurnSample(serving.lengths, ending)
        self._ending: dict[int, IntArray] = {}
        rng = np.random.default_rng(1)
        # Any few prompts in a row share out the quantiles evenly: a sample sees no more than a part.
        strata = rng.random((NUM_PROMPTS // STRATA, STRATA)).argsort(axis=1)
        quantiles = (strata + rng.random(strata.shape)).ravel() / STRATA
        self._prompts = np.searchsorted(np.cumsum(serving.lengths.input_pmf), quantiles).astype(np.float64)
        self._decoding = rng.permutation(NUM_PROMPTS) < self.decodes * NUM_PROMPTS

    def estimate(self, choice: Choice, batch: FloatArray, extent: IntArray) -> Estimates:
        """Estimates of candidates; `batch` slots and `extent` tokens of an iteration, shape (n,)."""
        refuse_encoder_decoder(self.serving)
        m, slots, budget = choice.num_micro_batches, batch.astype(np.int64), extent.astype(np.int64)
        least = slots // m
        turns = self._line(least, budget)
        rest = slots % m
        turns = turns.of_micro_batches(self._line(least + 1, budget) if rest.any() else turns, rest, m)
        work = self._stage_s(choice, turns)
        beyond = ~np.isfinite(work.sum((0, 1))) | (budget <= least)
        work = np.where(beyond, 0.0, work)
        played = play([work], [work], m)
        # Counted by tokens: where few prompts end in the sample, many more tokens are encoded.
        mean_rows, sampled = turns.rows.mean(0), turns.tokens.mean(0) / self.serving.mean_input
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
        turn = np.maximum(calm + added, rate * self.limits.work_s(kinds, spending))
        turn = np.where(beyond, np.inf, turn)
        interval = np.roll(played.start_s, -m, axis=0) - played.start_s
        interval[-m:] += len(turns.rows) * played.turn_s
        joins = np.maximum(turns.done.sum(0), 1e-12)
        begun = (turns.is_split * interval).sum(0) / joins
        ttft = np.maximum(begun + (turns.done * played.pass_s).sum(0) / joins, passage)
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        latency = ttft
        if ends:
            # While it decodes, nobody joins in the query's own slot, unless others fill the budget anyway.
            others = calm + added * (1 - (1 - turns.is_full.mean(0)) / batch)
            own = (turns.done * interval).sum(0) / joins
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
            plan = self._memory(choices[index], batches[mine, 0].astype(np.float64), extents[mine, 0])
            memory[mine] = plan.total_bytes.max(-1)
        return replace(found, memory_lower_bytes=memory)

    def refine(self, choices: Sequence[Choice], which: IntArray, batch: IntArray, extent: IntArray) -> Bounds:
        """Bounds of single candidates, arrays of shape (n,): their estimates.

        Following turns costs about the same for one candidate as for hundreds.
        """
        per_s, latency, ttft, tpot, memory = np.zeros((5, len(which)))
        for index in np.unique(which).tolist():
            mine = np.flatnonzero(which == index)
            for part in np.array_split(mine, -(-len(mine) // CANDIDATES_AT_ONCE)):
                e = self.estimate(choices[index], batch[part].astype(np.float64), extent[part])
                per_s[part], latency[part], ttft[part] = e.throughput_per_s, e.latency_s, e.ttft_s
                tpot[part], memory[part] = e.tpot_s, e.memory.total_bytes.max(-1)
        return Bounds(
            throughput_upper_per_s=per_s,
            latency_lower_s=latency,
            ttft_lower_s=ttft,
            memory_lower_bytes=memory,
            tpot_lower_s=tpot,
        )

    def _line(self, slots: IntArray, budget: IntArray) -> _Turns:
        """Follow a micro-batch of so many slots, from its mean state on."""
        n, prompts = len(slots), self._prompts
        ends = np.concatenate([[0.0], np.cumsum(np.tile(prompts, 2))])
        squares = np.concatenate([[0.0], np.cumsum(np.tile(prompts, 2) ** 2)])
        decoding = np.concatenate([[0], np.cumsum(np.tile(self._decoding, 2))])
        lap = ends[NUM_PROMPTS]
        steady = np.minimum(
            budget / (self.serving.mean_input + self.mean_decode), slots / (self.mean_decode + 1)
        )
        # Few slots see few prompts join; rows then end more often, and the effect is scaled down again.
        doublings = self.sample.doublings(np.maximum(steady * self.mean_decode, 1e-9))
        doublings[steady * self.serving.mean_input > 0.5 * (budget - steady * self.mean_decode)] = 0
        rows = np.rint(np.minimum(steady * self.mean_decode, slots)).astype(np.int64)
        levels, level = np.unique(doublings, return_inverse=True)
        ending = np.stack([self._ending_rows(int(d), int(slots.max())) for d in levels])
        at, whole = np.zeros(n), np.zeros(n, dtype=np.int64)
        kept = np.zeros((len(_Turns.__dataclass_fields__), NUM_TURNS, n))
        for count in range(-WARM_UP_TURNS, NUM_TURNS):
            turn = count % NUM_TURNS
            left = np.maximum(budget - rows, 0)
            end = np.minimum(at + left, ends[np.minimum(whole + slots - rows, 2 * NUM_PROMPTS)])
            new_whole = np.searchsorted(ends, end, side="right") - 1
            is_split = end > ends[new_whole]
            resumed = (at > ends[whole]) & (end > at)
            resumed_from = np.where(resumed, at - ends[whole], 0.0)
            resumed_to = np.where(
                resumed, np.minimum(end, ends[np.minimum(whole + 1, 2 * NUM_PROMPTS)]) - ends[whole], 0.0
            )
            done = new_whole - whole
            begun_now = is_split & ~(resumed & (done == 0))
            begun_now &= end > at
            fresh_done = done - (resumed & (done > 0))
            tail = np.where(begun_now, end - ends[new_whole], 0.0)
            fresh_squares = squares[new_whole] - squares[whole] + tail**2
            fresh_squares -= np.where(resumed & (done > 0), (resumed_to) ** 2, 0.0)
            fresh = fresh_done + begun_now
            kept[:, turn] = (
                rows,
                end - at,
                fresh + resumed,
                fresh,
                fresh_squares,
                resumed_from,
                resumed_to,
                done,
                is_split,
                end - at >= left,
            )
            rows = rows - ending[level, turn, rows] + decoding[new_whole] - decoding[whole]
            laps = new_whole >= NUM_PROMPTS
            at, whole = end - lap * laps, new_whole - NUM_PROMPTS * laps
        return _Turns(*kept)

    def _ending_rows(self, doublings: int, most: int) -> IntArray:
        """Of 0..most rows, how many end in each turn; shape (num_turns, most + 1)."""
        known = self._ending.get(doublings, np.zeros((NUM_TURNS, 0), dtype=np.int64))
        if known.shape[1] <= most:
            more = np.arange(known.shape[1], max(most + 1, 2 * known.shape[1]))
            drawn = self.sample.joining(more, np.full_like(more, doublings))
            known = self._ending[doublings] = np.concatenate([known, drawn], axis=1)
        return known[:, : most + 1]

    def _stage_s(self, choice: Choice, turns: _Turns) -> FloatArray:
        """Stage times of the passes, shape (num_turns, num_stages, n)."""
        costs = self.serving.costs(choice.stages)
        attention = {
            stage.tp_size: _chunk_attention_s(
                self.serving.profile.layers[stage.tp_size].encode_attention, turns
            )
            for stage in choice.stages
        }
        work = mixed_s(
            costs, turns.rows, turns.rows * self.mean_context, turns.tokens, turns.num_chunks, attention
        )
        return np.ascontiguousarray(np.moveaxis(work, 2, 1))

    def _calm_s(self, choice: Choice, rows: FloatArray) -> FloatArray:
        """Mean time of a turn without prompt tokens, shape (n,)."""
        decode = self.serving.costs(choice.stages).decode_s(
            rows, rows * self.mean_context, rows * self.mean_own_input
        )
        return period_s(decode, choice.num_micro_batches) / choice.num_micro_batches

    def _memory(self, choice: Choice, batch: FloatArray, budget: IntArray) -> MemoryPlan:
        """K/V of a slot that is in line counts as encoded, which it is in part."""
        serving, m = self.serving, choice.num_micro_batches
        held = SlotTokens.of(serving, 1 / (self.mean_decode + 1))
        kv_tokens = batch * (held.mean + (serving.page_size - 1) / 2)
        kv_tokens = kv_tokens + OVERFLOW_SIGMAS * np.sqrt(batch * held.variance)
        return serving.memory(choice.stages, kv_tokens, budget.astype(np.float64), batch / m)


def _chunk_attention_s(grid: Grid, turns: _Turns) -> FloatArray:
    """Encode attention of one layer; see `simulator.mixed`."""
    rms = np.sqrt(np.maximum(turns.fresh_squares, 0.0) / np.maximum(turns.fresh, 1.0))
    resumed = (turns.resumed_to > 0).astype(np.float64)
    known = grid.at_or_inf(resumed, turns.resumed_from)
    return np.asarray(composed(grid, turns.fresh, rms) + grid.at_or_inf(resumed, turns.resumed_to) - known)


def refuse_encoder_decoder(serving: Serving) -> None:
    """Raise ConfigError for a model whose prompts cannot be split."""
    if serving.model.is_encoder_decoder:
        raise ConfigError(
            f"policy CHUNKED cannot serve {serving.model.name}: its encoder attends to the whole prompt, not "
            "only to what came before, so a prompt cannot be encoded in parts. Take CHUNKED out of "
            "solver.policies."
        )
