"""ITERATION in closed form: continuous batching (ORCA, vLLM).

Each of the slots is taken by a new query as soon as its query has ended. A query of D decode iterations
holds it for D + 1 turns of its micro-batch, in the first of which it is encoded, so a slot is taken by a
new one in a turn with chance p = 1 / (E[D] + 1). Of a micro-batch's q slots, K ~ Binomial(q, p) are
encoded in a turn and the q - K others decode. A query's own turn is longer than the mean: it is there
K times as likely as one with one new query, so K is size-biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.policies.iteration import slots_of
from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray
from exegpt.simulator.forms.iteration_bounds import IterationBounds, TurnCurves
from exegpt.simulator.forms.turns import TurnSample, play
from exegpt.simulator.memory import OVERFLOW_SIGMAS, MemoryPlan
from exegpt.simulator.serving import Serving, make_estimates


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """K/V tokens that a slot holds in a turn, page rounding not included."""

    mean: float
    variance: float

    @classmethod
    def of(cls, serving: Serving, chance: float) -> SlotTokens:
        """A new query's prompt with chance p; else a query of age a with chance p G(a)."""
        _, tokens, squares = serving.completion.token_tails
        mean = chance * (serving.mean_input + float(tokens.sum()))
        return cls(mean, chance * (serving.rms_input**2 + float(squares.sum())) - mean**2)


def joining_limit(slots: FloatArray, mean_joining: FloatArray) -> FloatArray:
    """Most prompts that may join a micro-batch of so many slots in one turn.

    Exceeded in less than one turn of a thousand; it keeps the first turns, when all slots are free, from
    encoding everything at once.
    """
    enough = np.ceil(mean_joining + OVERFLOW_SIGMAS * np.sqrt(mean_joining)) + 1
    return np.asarray(np.minimum(enough, np.ceil(slots)))


def decoding_means(serving: Serving) -> tuple[float, float]:
    """Mean tokens that a decoding query attends to, and how many of them are its input."""
    alive, tokens, _ = serving.completion.token_tails
    total = float(alive.sum())
    if not total:
        return 0.0, 0.0
    context = float(tokens.sum()) / total
    return context, context - 1 - float(alive @ np.arange(len(alive))) / total


class IterationForm:
    """Estimates and bounds of ITERATION."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.chance = 1 / (serving.completion.mean_iterations + 1)
        self.sample = TurnSample(serving.lengths, self.chance)
        self.mean_context, self.mean_own_input = decoding_means(serving)
        self.turns = TurnCurves(serving, self.sample, self.mean_context, self.mean_own_input)
        self._bounds: IterationBounds | None = None
        self._encode: dict[tuple[Stage, ...], FloatArray] = {}
        self._decode: dict[tuple[Stage, ...], FloatArray] = {}

    def estimate(self, choice: Choice, batch: FloatArray, extent: IntArray) -> Estimates:
        """Estimates of candidates; `batch` slots, shape (n,)."""
        m = choice.num_micro_batches
        slots = batch.astype(np.int64)
        doublings = self.sample.doublings(batch / m)
        joining, rows, others = self._turns(slots, m, doublings)
        encode, decode = self._encode_s(choice.stages, joining), self._decode_s(choice.stages, rows)
        # Of a micro-batch with the query, one slot less draws who else joins.
        tagged = [
            self._encode_s(choice.stages, others + 1),
            self._decode_s(choice.stages, rows + joining - others - 1),
        ]
        beyond = ~np.isfinite([work.sum((0, 1)) for work in (encode, decode, *tagged)]).all(0)
        encode, decode, *tagged = (np.where(beyond, 0.0, work) for work in (encode, decode, *tagged))
        played = play([encode, decode], tagged, m)
        first, last = played.first_job_s, played.last_job_s
        if doublings.any():
            # Of what the pipeline is found busy with, the part that joining prompts bring was doubled too.
            calm_decode = np.where(beyond, 0.0, self._decode_s(choice.stages, rows + joining))
            idle = play([np.zeros_like(encode), calm_decode], tagged, m)
            first = idle.first_job_s + 0.5**doublings * (first - idle.first_job_s)
            last = idle.last_job_s + 0.5**doublings * (last - idle.last_job_s)
        # What joining prompts add is in proportion to their number, of which the sample has not the mean.
        expected = self.chance * batch / m
        calm = self._calm_s(choice, slots)
        part = expected / joining.mean(0)
        least = np.minimum(calm, played.turn_s)
        turn = np.where(beyond, np.inf, np.maximum(calm + part * (played.turn_s - calm), least))
        ttft = np.where(beyond, np.inf, first)
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        # While it decodes, nobody joins in the query's own slot.
        others = np.maximum(calm + (turn - calm) * (1 - 1 / batch), least)
        latency = last + ends * m * others if ends else ttft
        if ends and not self.serving.first_token_at_encoding:
            ttft = last + m * others
        return make_estimates(
            choice.num_replicas * expected / turn,
            latency,
            ttft,
            self.serving.num_gaps,
            batch * (1 - self.chance),
            m * turn,
            self._memory(choice, batch),
        )

    def bounds(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes of slots; see `IterationBounds`."""
        if self._bounds is None or self._bounds.choices is not choices:
            self._bounds = IterationBounds(self.serving, self.turns, choices)
        found = self._bounds.of(which, batches)
        memory = np.zeros(len(which))
        for index in np.unique(which).tolist():
            mine = which == index
            memory[mine] = self.fullest_bytes(choices[index], batches[mine, 0], extents[mine, 0])
        return replace(found, memory_lower_bytes=memory)

    def fullest_bytes(self, choice: Choice, batch: IntArray, extent: IntArray) -> FloatArray:
        """Bytes of the fullest rank of candidates, arrays of shape (n,)."""
        return self.serving.fullest_bytes(choice.stages, *self._amounts(choice, batch.astype(np.float64)))

    def _turns(self, slots: IntArray, m: int, doublings: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Joining prompts, decoding rows, and who joins beside the bound's query; (num_turns, n) each."""
        joining, rows, others = np.zeros((3, self.sample.num_turns, len(slots)), dtype=np.int64)
        for k in range(m):
            own = slots_of(slots, m, k)
            turns = np.arange(k, self.sample.num_turns, m)
            joining[turns] = self.sample.joining(own, doublings)[turns]
            rows[turns] = own - joining[turns]
            others[turns] = self.sample.joining(own - 1, np.zeros_like(doublings))[turns]
        return joining, rows, others

    def _calm_s(self, choice: Choice, slots: IntArray) -> FloatArray:
        """Mean time of a turn in which no prompt joins, shape (n,)."""
        m = choice.num_micro_batches
        own = np.stack([slots_of(slots, m, k) for k in range(m)])
        decode = self._decode_s(choice.stages, own)
        return np.asarray(np.maximum(decode.sum(0).max(0), decode.sum(1).max(0)) / m)

    def _encode_s(self, stages: tuple[Stage, ...], joining: IntArray) -> FloatArray:
        """Stage times to encode the first k prompts of each turn; shape (num_turns, num_stages, n)."""
        table = self._encode.get(stages)
        if table is None or table.shape[1] <= int(joining.max()):
            most = max(int(joining.max()), 8 if table is None else 2 * table.shape[1])
            tokens, squares = self.sample.prompts(most)
            queries = np.broadcast_to(np.arange(most + 1.0), tokens.shape)
            rms = np.sqrt(squares / np.maximum(queries, 1.0))
            table = self._encode[stages] = self.serving.costs(stages).encode_s(queries, tokens, rms)
        turns = np.arange(len(joining))[:, None]
        return np.ascontiguousarray(np.moveaxis(table[turns, joining], 2, 1))

    def _decode_s(self, stages: tuple[Stage, ...], rows: IntArray) -> FloatArray:
        """Stage times of decoding so many rows; shape (num_turns, num_stages, n)."""
        table = self._decode.get(stages)
        if table is None or table.shape[0] <= int(rows.max()):
            most = max(int(rows.max()), 8 if table is None else 2 * table.shape[0])
            counts = np.arange(most + 1.0)
            table = self._decode[stages] = self.serving.costs(stages).decode_s(
                counts, counts * self.mean_context, counts * self.mean_own_input
            )
        return np.ascontiguousarray(np.moveaxis(table[rows], 2, 1))

    def _memory(self, choice: Choice, batch: FloatArray) -> MemoryPlan:
        return self.serving.memory(choice.stages, *self._amounts(choice, batch))

    def _amounts(self, choice: Choice, batch: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """K/V tokens, tokens encoded at once, rows; see `plan_memory`."""
        serving, m = self.serving, choice.num_micro_batches
        held = SlotTokens.of(serving, self.chance)
        kv_tokens = batch * (held.mean + (serving.page_size - 1) / 2)
        kv_tokens = kv_tokens + OVERFLOW_SIGMAS * np.sqrt(batch * held.variance)
        encoded = joining_limit(batch / m, batch / m * self.chance) * serving.mean_input
        return kv_tokens, encoded, batch / m
