"""One rank's share of the work: its stage's layers and K/V, for every job of a plan in order.

All ranks execute the same jobs in the same order. Hidden states go from stage to stage; the last
stage samples and sends the tokens to every other stage, which lets each of them drop finished rows
by the same rule without a word from the controller.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exegpt.events import StageEvent
from exegpt.runner.kv_cache import BatchRows, KVCache, PageAllocator, PromptTokens
from exegpt.runner.models import StageModel
from exegpt.runner.sampling import SamplingSpec, sample
from exegpt.runner.transport import Transport
from exegpt.schedule import Stage

IntArray = NDArray[np.int64]
Tokens = tuple[list[int], IntArray, float]
OnTokens = Callable[[int, list[int], IntArray, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A query to encode. `generated` is above 0 if it was put back and what it had said is encoded again."""

    id: int
    input_tokens: int
    max_output_tokens: int
    generated: int = 0
    ignore_eos: bool = False
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A policy's step as it is sent to the ranks.

    `release`: queries whose K/V is dropped before anything else (put back, or known to have ended).
    """

    cycle: int
    release: list[int]
    encode: list[list[NewRow]]
    decode_iterations: int
    keep_finished: bool

    def to_message(self, *, with_tokens: bool) -> dict[str, Any]:
        """Plain values for the control channel."""
        message = asdict(self)
        if not with_tokens:
            for batch in message["encode"]:
                for row in batch:
                    row["token_ids"] = None
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Plan:
        """The plan that `to_message` was called on."""
        encode = [[NewRow(**row) for row in batch] for batch in message.pop("encode")]
        return cls(encode=encode, **message)


@dataclass(slots=True)
class _MicroBatch:
    """Rows of one micro-batch with what the finish rule needs, all in the same order."""

    rows: BatchRows
    generated: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    limit: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    stoppable: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    finished: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    last_tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Messages of (ids, tokens, time): sampled on this rank and not yet looked at, like those that
    # are still under way; and received ones that the rows have not taken in.
    sampled: deque[Tokens] = field(default_factory=deque)
    received: deque[Tokens] = field(default_factory=deque)

    def add(self, rows: Sequence[NewRow]) -> PromptTokens:
        prompt = self.rows.add([r.id for r in rows], [r.input_tokens for r in rows])
        self.generated = np.append(self.generated, [r.generated for r in rows])
        self.limit = np.append(self.limit, [r.generated + r.max_output_tokens for r in rows])
        self.stoppable = np.append(self.stoppable, [not r.ignore_eos for r in rows])
        self.finished = np.append(self.finished, np.zeros(len(rows), bool))
        self.last_tokens = np.append(self.last_tokens, np.zeros(len(rows), np.int64))
        return prompt

    def keep(self, mask: NDArray[np.bool_]) -> None:
        self.rows.keep(mask)
        for name in ("generated", "limit", "stoppable", "finished", "last_tokens"):
            setattr(self, name, getattr(self, name)[mask])


class StageEngine:
    """Executes plans on this rank.

    Parameters
    ----------
    model : StageModel
        This rank's shard of this stage's layers.
    cache, allocator : KVCache, PageAllocator
        This stage's K/V pages and the books of who owns them.
    stages : sequence of Stage
    stage_index : int
    transport : Transport
    num_micro_batches, max_rows : int
        Micro-batches, and the most rows that each may have.
    sampling : SamplingSpec
    eos_token_ids : set of int
        Tokens that end a query unless its row ignores them.
    on_tokens : callable, optional
        Called on the controller with (micro-batch, ids, tokens, time in s) when tokens are received.
    """

    def __init__(
        self,
        model: StageModel,
        cache: KVCache,
        allocator: PageAllocator,
        *,
        stages: Sequence[Stage],
        stage_index: int,
        transport: Transport,
        num_micro_batches: int,
        max_rows: int,
        sampling: SamplingSpec,
        eos_token_ids: frozenset[int],
        on_tokens: OnTokens | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.allocator = allocator
        self.stages = stages
        self.stage_index = stage_index
        self.transport = transport
        self.sampling = sampling
        self.eos = np.asarray(sorted(eos_token_ids), dtype=np.int64)
        self.on_tokens = on_tokens
        width = min(allocator.num_pages, allocator.num_needed(model.model.max_position_embeddings))
        self.micro_batches = [
            _MicroBatch(BatchRows(allocator, max_rows, width, model.device)) for _ in range(num_micro_batches)
        ]
        # Token messages that the last stage has sent or will: micro-batch and ids, in order.
        self.expected: deque[tuple[int, list[int]]] = deque()
        self.released: set[int] = set()
        self.events: list[StageEvent] = []
        place = stages[stage_index].ranks.index(transport.rank)
        self._records = place == 0
        self._next = self._peers_after(stage_index, place)
        self._previous = self._peer_before(stage_index, place)

    def _peers_after(self, stage_index: int, place: int) -> list[int]:
        """Ranks of the next stage that this rank sends hidden states to."""
        if stage_index + 1 == len(self.stages):
            return []
        ranks = self.stages[stage_index + 1].ranks
        width = self.stages[stage_index].tp_size
        return [rank for i, rank in enumerate(ranks) if i % width == place]

    def _peer_before(self, stage_index: int, place: int) -> int:
        """Rank of the stage before that this rank receives from; hidden states are equal in a group."""
        ranks = self.stages[stage_index - 1].ranks
        return ranks[place % len(ranks)]

    def execute(self, plan: Plan) -> None:
        """Run a plan's jobs: encode every micro-batch, then decode.

        A query must not be released and encoded in one plan: its released row leaves in the first
        decode iteration.
        """
        encoded = {row.id for batch in plan.encode for row in batch}
        if encoded.intersection(plan.release):
            raise AssertionError(
                f"queries {sorted(encoded.intersection(plan.release))} come and go in one plan"
            )
        for micro_batch in self.micro_batches:
            self.released.update(micro_batch.rows.release(plan.release))
        for index, batch in enumerate(plan.encode):
            if batch:
                self._encode(plan, index, batch)
        for iteration in range(1, plan.decode_iterations + 1):
            busy = [self._decode(plan, iteration, index) for index in range(len(self.micro_batches))]
            if not any(busy):
                break
        if self.released:
            raise AssertionError(
                f"released rows {sorted(self.released)} were not dropped by the decode phase"
            )

    @torch.inference_mode()
    def _encode(self, plan: Plan, index: int, batch: list[NewRow]) -> None:
        micro_batch = self.micro_batches[index]
        lengths = [row.input_tokens for row in batch]
        hidden = None
        if not self.model.is_first:
            hidden = self._receive_hidden(sum(lengths))
        start = time.perf_counter()
        prompt = micro_batch.add(batch)
        if hidden is None:
            token_ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in batch])
            hidden = self.model.embed(torch.from_numpy(token_ids).to(self.model.device), prompt.positions)
        hidden = self.model.encode(hidden, prompt.positions, lengths, self.cache, prompt.slots)
        ids = [row.id for row in batch]
        steps = [row.generated for row in batch]
        last = torch.from_numpy(np.cumsum(lengths) - 1).to(hidden.device)
        self._hand_on(index, hidden, ids, steps, last)
        self._event(plan, "encode", 0, index, len(batch), sum(lengths), start)

    @torch.inference_mode()
    def _decode(self, plan: Plan, iteration: int, index: int) -> bool:
        micro_batch = self.micro_batches[index]
        self.receive_tokens(index)
        self._apply_tokens(plan, index)
        rows = micro_batch.rows
        if not len(rows):
            return False
        hidden = None
        if not self.model.is_first:
            hidden = self._receive_hidden(len(rows))
        start = time.perf_counter()
        rows.advance(frozen=micro_batch.finished)
        if hidden is None:
            tokens = torch.from_numpy(micro_batch.last_tokens).to(self.model.device)
            hidden = self.model.embed(tokens, rows.positions)
        hidden = self.model.decode(
            hidden, rows.positions, self.cache, rows.page_table, rows.context_lens, rows.slots
        )
        self._hand_on(index, hidden, rows.row_ids.tolist(), micro_batch.generated.tolist(), None)
        self._event(plan, "decode", iteration, index, len(rows), int(rows.stored_tokens.sum()), start)
        return True

    def _hand_on(
        self,
        index: int,
        hidden: torch.Tensor,
        ids: list[int],
        steps: list[int],
        last: torch.Tensor | None,
    ) -> None:
        """Send hidden states on, or sample and tell everyone."""
        if not self.model.is_last:
            for rank in self._next:
                self.transport.send(hidden, rank)
            self.expected.append((index, ids))
            return
        logits, first_id = self.model.head(hidden if last is None else hidden[last])
        tokens = sample(logits, first_id, self.model.tp, self.sampling, ids, steps).cpu().numpy()
        now = time.perf_counter()
        self.micro_batches[index].sampled.append((ids, tokens, now))
        if self._records and len(self.stages) > 1:
            # From host to host: the host reads it, and on CUDA it must not queue behind the hidden
            # states that the same two ranks pass the other way.
            message = torch.from_numpy(np.append(tokens, int(now * 1e9)))
            for stage in self.stages[:-1]:
                for rank in stage.ranks:
                    self.transport.send(message, rank)

    def _receive_hidden(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self.model.model.hidden_size)
        return self.transport.receive(shape, self.model.dtype, self._previous)

    def receive_tokens(self, index: int) -> None:
        """Wait for the tokens of a micro-batch that are still under way."""
        micro_batch = self.micro_batches[index]
        while any(of == index for of, _ in self.expected):
            # Messages come in the order in which the last stage worked, whichever is asked for.
            of, ids = self.expected.popleft()
            source = self.stages[-1].ranks[0]
            message = self.transport.receive([len(ids) + 1], torch.int64, source, on_host=True).numpy()
            self._received(of, (ids, message[:-1], float(message[-1]) / 1e9))
        while micro_batch.sampled:
            self._received(index, micro_batch.sampled.popleft())

    def _received(self, index: int, message: Tokens) -> None:
        self.micro_batches[index].received.append(message)
        if self.on_tokens is not None:
            self.on_tokens(index, *message)

    def _apply_tokens(self, plan: Plan, index: int) -> None:
        """Enter received tokens into the rows and let finished ones leave."""
        micro_batch = self.micro_batches[index]
        place = {query_id: i for i, query_id in enumerate(micro_batch.rows.row_ids.tolist())}
        for ids, tokens, _ in micro_batch.received:
            at = np.asarray([place[i] for i in ids], dtype=np.int64)
            running = ~micro_batch.finished[at]
            micro_batch.last_tokens[at] = tokens
            micro_batch.generated[at] += running
            stop = micro_batch.stoppable[at] & np.isin(tokens, self.eos)
            micro_batch.finished[at] |= stop | (micro_batch.generated[at] >= micro_batch.limit[at])
        micro_batch.received.clear()
        gone = micro_batch.finished
        if plan.keep_finished and not gone.all():
            gone = np.zeros_like(gone)
        if self.released:
            ids = micro_batch.rows.row_ids.tolist()
            dropped = np.asarray([i in self.released for i in ids], dtype=bool)
            self.released.difference_update(ids)
            gone = gone | dropped
        if gone.any():
            micro_batch.keep(~gone)

    def _event(
        self, plan: Plan, phase: str, iteration: int, index: int, queries: int, tokens: int, start: float
    ) -> None:
        if self._records:
            at = (self.transport.rank, self.stage_index, phase, plan.cycle, iteration, index, queries, tokens)
            self.events.append(StageEvent(*at, start_s=start, end_s=time.perf_counter()))
