"""Queries in line to be encoded in chunks: one micro-batch followed turn by turn.

What a turn takes in depends on slots and budget alone, and of stages on a layer and on what they have beside
layers. So turns and their times are kept for every pair of slots and budget, whatever pipelines ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields

import numpy as np

from exegpt.profiler.grid import FloatArray, Grid
from exegpt.simulator.choice import IntArray
from exegpt.simulator.costs import StageCosts, composed
from exegpt.simulator.forms.iteration import decoding_means
from exegpt.simulator.forms.stage_parts import stage_parts
from exegpt.simulator.forms.turns import NUM_TURNS, STRATA, WARM_UP_TURNS, TurnSample
from exegpt.simulator.mixed import mixed_s
from exegpt.simulator.serving import Serving

# Prompts in the sample; a turn takes them from a ring.
NUM_PROMPTS = 1024
# Pairs of slots and budget that are kept: some 50 MiB for two degrees.
MOST_KEPT = 2048


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of one micro-batch; float arrays of shape (num_turns, n).

    `fresh` prompts begin in a turn, `fresh_squares` the squared tokens of theirs; `resumed_from` and
    `resumed_to` are the places in the prompt that was begun before. `done` prompts end, `is_split`
    says whether the last one is to be continued, `is_full` whether the budget was used up.
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


class Lines:
    """Turns under one workload."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.mean_decode = serving.completion.mean_iterations
        self.mean_context, _ = decoding_means(serving)
        # Chance that a query decodes at all, and that a decoding row ends in a turn.
        decodes = float(serving.completion.survival[0])
        self.sample = TurnSample(serving.lengths, decodes / self.mean_decode if self.mean_decode else 1.0)
        self._ending: dict[int, IntArray] = {}
        rng = np.random.default_rng(1)
        # Any few prompts in a row share out the quantiles evenly: a sample sees no more than a part.
        strata = rng.random((NUM_PROMPTS // STRATA, STRATA)).argsort(axis=1)
        quantiles = (strata + rng.random(strata.shape)).ravel() / STRATA
        self._prompts = np.searchsorted(np.cumsum(serving.lengths.input_pmf), quantiles).astype(np.float64)
        self._decoding = rng.permutation(NUM_PROMPTS) < decodes * NUM_PROMPTS

    def follow(self, slots: IntArray, budget: IntArray) -> Turns:
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
        kept = np.zeros((len(fields(Turns)), NUM_TURNS, n))
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
        return Turns(*kept)

    def _ending_rows(self, doublings: int, most: int) -> IntArray:
        """Of 0..most rows, how many end in each turn; shape (num_turns, most + 1)."""
        known = self._ending.get(doublings, np.zeros((NUM_TURNS, 0), dtype=np.int64))
        if known.shape[1] <= most:
            more = np.arange(known.shape[1], max(most + 1, 2 * known.shape[1]))
            drawn = self.sample.joining(more, np.full_like(more, doublings))
            known = self._ending[doublings] = np.concatenate([known, drawn], axis=1)
        return known[:, : most + 1]

    def part_times(self, degree: int, turns: Turns) -> Mapping[int, FloatArray]:
        """Times of the turns' passes by part of a stage, (num_turns, n) each; see `stage_parts`."""
        tp_size = self.serving.tables.degrees[degree]
        attention = _chunk_attention_s(self.serving.profile.layers[tp_size].encode_attention, turns)

        def times(costs: StageCosts) -> FloatArray:
            context = turns.rows * self.mean_context
            return mixed_s(costs, turns.rows, context, turns.tokens, turns.num_chunks, {tp_size: attention})

        return stage_parts(self.serving, degree, times)


def _chunk_attention_s(grid: Grid, turns: Turns) -> FloatArray:
    """Encode attention of one layer; see `simulator.mixed`."""
    rms = np.sqrt(np.maximum(turns.fresh_squares, 0.0) / np.maximum(turns.fresh, 1.0))
    resumed = (turns.resumed_to > 0).astype(np.float64)
    known = grid.at_or_inf(resumed, turns.resumed_from)
    return np.asarray(composed(grid, turns.fresh, rms) + grid.at_or_inf(resumed, turns.resumed_to) - known)


@dataclass(slots=True)
class _Block:
    """What is kept of pairs, rows as they came; `means` are of rows, tokens and full turns."""

    done: FloatArray
    is_split: FloatArray
    means: FloatArray
    parts: dict[tuple[int, int], FloatArray]


class LineTable:
    """Turns kept by slots and budget, with the times of the degrees that were asked for."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self._place: dict[tuple[int, int], int] = {}
        self._degrees: set[int] = set()
        self._block: _Block | None = None

    def find(self, slots: IntArray, budget: IntArray, degrees: Set[int]) -> IntArray:
        """Rows of the pairs, which are followed where they are new, with the times of `degrees`; (n,)."""
        self._want(degrees)
        pairs = list(zip(slots.tolist(), budget.tolist(), strict=True))
        fresh = [pair for pair in dict.fromkeys(pairs) if pair not in self._place]
        if fresh and len(self._place) + len(fresh) > MOST_KEPT:
            self._place, self._block = {}, None
            fresh = list(dict.fromkeys(pairs))
        if fresh:
            self._add(np.asarray(fresh, dtype=np.int64))
        return np.asarray([self._place[pair] for pair in pairs], dtype=np.int64)

    def _want(self, degrees: Set[int]) -> None:
        """Keep these degrees' times from now on; pairs are followed again for those that are new."""
        missing = degrees - self._degrees
        self._degrees |= missing
        if missing and self._block is not None:
            pairs = np.asarray(list(self._place), dtype=np.int64)
            self._block.parts.update(self._parts(self.lines.follow(pairs[:, 0], pairs[:, 1]), missing))

    def _parts(self, turns: Turns, degrees: Set[int]) -> dict[tuple[int, int], FloatArray]:
        return {
            (degree, part): np.ascontiguousarray(times.T)
            for degree in sorted(degrees)
            for part, times in self.lines.part_times(degree, turns).items()
        }

    def _add(self, pairs: IntArray) -> None:
        turns = self.lines.follow(pairs[:, 0], pairs[:, 1])
        parts = self._parts(turns, self._degrees)
        means = np.stack([turns.rows.mean(0), turns.tokens.mean(0), turns.is_full.mean(0)], axis=1)
        new = _Block(turns.done.T, turns.is_split.T, means, parts)
        for slots, budget in pairs.tolist():
            self._place[slots, budget] = len(self._place)
        if self._block is not None:
            old = self._block
            new = _Block(
                np.concatenate([old.done, new.done]),
                np.concatenate([old.is_split, new.is_split]),
                np.concatenate([old.means, new.means]),
                {key: np.concatenate([old.parts[key], parts[key]]) for key in parts},
            )
        self._block = new

    @property
    def done(self) -> FloatArray:
        """Prompts that end in each turn, by row; (pairs, num_turns)."""
        assert self._block is not None
        return self._block.done

    @property
    def is_split(self) -> FloatArray:
        """Whether a prompt is left begun after each turn, by row; (pairs, num_turns)."""
        assert self._block is not None
        return self._block.is_split

    @property
    def means(self) -> FloatArray:
        """Mean rows, prompt tokens and share of full turns, by row; (pairs, 3)."""
        assert self._block is not None
        return self._block.means

    def part_s(self, degree: int, part: int) -> FloatArray:
        """Times of a part of a stage in each turn, by row; (pairs, num_turns)."""
        assert self._block is not None
        return self._block.parts[degree, part]
