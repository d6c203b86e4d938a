"""Event-driven replay of policies whose encoding and decoding have GPUs of their own.

An encode pipeline is paced by its slowest stage: stage 0 starts a batch no sooner than the slowest
stage, or the link that takes the K/V away, needs after the batch before. An earlier start would only
wait further down, and count as latency. A decode pipeline's stage 0 takes micro-batches in the order
in which their tokens have come back; what was placed in one joins just before it starts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from exegpt.errors import CapacityError
from exegpt.events import RequestRecord, StageEvent
from exegpt.policies.base import Query
from exegpt.policies.decode_side import DecodeSide
from exegpt.policies.waa import EncodeBatch, SidesMachine
from exegpt.simulator.costs import StageCosts
from exegpt.simulator.replay import ReplayResult
from exegpt.simulator.transfer import Transfer
from exegpt.workload.requests import Request

# What happens at one instant happens in this order: first what frees room, then what takes it.
_NEWS, _ENCODE, _DECODE = range(3)


@dataclass(slots=True)
class _Pipeline:
    """Stages of one instance: when each is free, and where they stand in the records."""

    first_stage: int
    ranks: list[int]
    free_s: list[float]
    link_free_s: float = 0.0
    # Batches encoded, or iterations begun per micro-batch.
    counts: list[int] = field(default_factory=lambda: [0])

    def run(self, stage_s: Sequence[float], start_s: float) -> list[tuple[float, float]]:
        """Start and end on every stage of a micro-batch that stage 0 starts at `start_s`."""
        ready, spans = start_s, []
        for j, time in enumerate(stage_s):
            start = max(self.free_s[j], ready)
            ready = self.free_s[j] = start + time
            spans.append((start, ready))
        return spans


class _Waiting(deque[Query]):
    """The queue, as `SidesView` has it, with the decode pipelines it is admitted to."""

    sides: list[DecodeSide]

    @property
    def waiting(self) -> deque[Query]:
        return self

    @property
    def occupancy(self) -> list[int]:
        return [side.num_held for side in self.sides]

    def admissible(self, decode_instance: int, most: int) -> int:
        return self.sides[decode_instance].admissible(islice(self, most))


class _SidesReplay:
    def __init__(
        self,
        machine: SidesMachine,
        costs: tuple[StageCosts, StageCosts],
        transfer: Transfer,
        sides: list[DecodeSide],
        num_encode_instances: int,
        first_token_at_encoding: bool,
    ) -> None:
        self.machine = machine
        self.encode_costs, self.decode_costs = costs
        self.transfer = transfer
        self.sides = sides
        self.first_token_at_encoding = first_token_at_encoding
        self.queue = _Waiting()
        self.queue.sides = sides
        self.encoders = _instances(self.encode_costs, num_encode_instances, 0, 0)
        ranks = num_encode_instances * sum(s.tp_size for s in self.encode_costs.stages)
        stages = num_encode_instances * len(self.encode_costs.stages)
        self.decoders = _instances(self.decode_costs, len(sides), stages, ranks)
        for decoder, side in zip(self.decoders, sides, strict=True):
            decoder.counts = [0] * len(side.members)
        self.next_start_s = [0.0] * num_encode_instances
        # Micro-batches ready for stage 0, and those in the pipeline, per decode instance.
        self.ready: list[deque[int]] = [deque() for _ in sides]
        self.under_way: list[set[int]] = [set() for _ in sides]
        self.events: list[StageEvent] = []
        self.agenda: list[tuple[float, int, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.num_finished = 0

    def at(self, time: float, kind: int, action: Callable[[float], None]) -> None:
        heapq.heappush(self.agenda, (time, kind, next(self.order), action))

    def arrive(self, request: Request, now: float) -> None:
        query = Query(request.id, request.input_tokens, request.max_output_tokens)
        most, side = self.sides[0].most_pages(query), self.sides[0]
        if most > side.num_pages:
            record = self.records[request.id]
            error = CapacityError(
                f"request {query.id}: {query.input_tokens} input and up to {query.max_output_tokens} output "
                f"tokens need {most} K/V pages of {side.page_size} tokens, but there are {side.num_pages}"
            )
            record.status, record.error, record.finish_reason = "failed", str(error), "error"
            self.num_finished += 1
            return
        self.queue.append(query)
        self.wake_encoders(now)

    def wake_encoders(self, now: float) -> None:
        """Have every idle encode pipeline look for a batch, when all news of this instant is in."""
        for instance, start in enumerate(self.next_start_s):
            if start <= now:
                self.at(now, _ENCODE, lambda time, i=instance: self.encode(i, time))  # type: ignore[misc]

    def encode(self, instance: int, now: float) -> None:
        if self.next_start_s[instance] > now:
            return
        batch = self.machine.next_batch(self.queue)
        if batch is None:
            return
        queries = [self.queue.popleft() for _ in batch.query_ids]
        assert tuple(q.id for q in queries) == batch.query_ids, "only the first waiting queries"
        for query in queries:
            self.sides[batch.decode_instance].take(query)
            record = self.records[query.id]
            record.encode_start_s = now if record.encode_start_s is None else record.encode_start_s
        lengths = [q.input_tokens for q in queries]
        tokens = sum(lengths)
        rms = math.sqrt(sum(n * n for n in lengths) / len(lengths))
        encoder = self.encoders[instance]
        times = self.encode_costs.encode_one_s(len(lengths), tokens, rms)
        spans = encoder.run(times, now)
        self.note(encoder, "encode", (encoder.counts[0], 0, 0, len(lengths), tokens), spans)
        encoder.counts[0] += 1
        slowest = max(*times, self.link_s(float(tokens)))
        self.next_start_s[instance] = now + slowest
        self.at(self.next_start_s[instance], _ENCODE, lambda time: self.encode(instance, time))
        self.at(spans[-1][1], _NEWS, lambda time: self.encoded(encoder, batch, time))

    def link_s(self, tokens: float) -> float:
        """How often a batch of so many tokens can leave an encode pipeline: links of both sides."""
        share = len(self.encoders) / len(self.decoders)
        source, target = (
            self.transfer.source_s(np.asarray(tokens)),
            self.transfer.target_s(np.asarray(tokens)),
        )
        return max(float(source), share * float(target))

    def encoded(self, encoder: _Pipeline, batch: EncodeBatch, now: float) -> None:
        side, decoder = self.sides[batch.decode_instance], self.decoders[batch.decode_instance]
        left = list(batch.query_ids)
        if self.first_token_at_encoding:
            left = [i for i in left if not self.token(side, i, now)]
        tokens = np.asarray(float(sum(map(side.input_tokens, left))))
        if self.transfer.through_host:
            out = max(now, encoder.link_free_s) + float(self.transfer.source_s(tokens))
            there = max(out, decoder.link_free_s) + float(self.transfer.target_s(tokens))
            encoder.link_free_s, decoder.link_free_s = out, there
        else:
            start = max(now, encoder.link_free_s, decoder.link_free_s)
            there = encoder.link_free_s = decoder.link_free_s = start + float(self.transfer.latency_s(tokens))
        if left:
            self.at(there, _NEWS, lambda time: self.handed_over(batch.decode_instance, left, time))
        if len(left) < len(batch.query_ids):
            self.wake_encoders(now)

    def handed_over(self, instance: int, query_ids: list[int], now: float) -> None:
        side = self.sides[instance]
        for micro_batch, ids in enumerate(self.machine.place(query_ids, side.sizes)):
            side.placed[micro_batch] += ids
            self.offer(instance, micro_batch, now)

    def offer(self, instance: int, micro_batch: int, now: float) -> None:
        """Queue a micro-batch for stage 0, unless it is empty, queued, or in the pipeline."""
        if self.sides[instance].sizes[micro_batch] and micro_batch not in self.under_way[instance]:
            self.under_way[instance].add(micro_batch)
            self.ready[instance].append(micro_batch)
            start = max(now, self.decoders[instance].free_s[0])
            self.at(start, _DECODE, lambda time: self.decode(instance, time))

    def decode(self, instance: int, now: float) -> None:
        """Stage 0 takes the next micro-batch, if it is free."""
        side, decoder = self.sides[instance], self.decoders[instance]
        if not self.ready[instance]:
            return
        if decoder.free_s[0] > now:
            self.at(decoder.free_s[0], _DECODE, lambda time: self.decode(instance, time))
            return
        micro_batch = self.ready[instance].popleft()
        side.join(micro_batch)
        for query in side.put_back(micro_batch):
            self.queue.appendleft(query)
            self.wake_encoders(now)
        ids = list(side.members[micro_batch])
        if not ids:
            self.under_way[instance].discard(micro_batch)
            return
        context = side.summed_context(ids)
        # Only the cross attention of encoder-decoder models tells inputs from the rest.
        inputs = 0 if self.first_token_at_encoding else sum(map(side.input_tokens, ids))
        times = self.decode_costs.decode_one_s(len(ids), context, inputs)
        spans = decoder.run(times, now)
        round_ = decoder.counts[micro_batch]
        decoder.counts[micro_batch] += 1
        self.note(decoder, "decode", (round_, 1, micro_batch, len(ids), context), spans)
        self.at(spans[-1][1], _NEWS, lambda time: self.returned(instance, micro_batch, ids, time))

    def returned(self, instance: int, micro_batch: int, query_ids: list[int], now: float) -> None:
        self.under_way[instance].discard(micro_batch)
        ended = [i for i in query_ids if self.token(self.sides[instance], i, now)]
        if ended:
            self.wake_encoders(now)
        self.offer(instance, micro_batch, now)

    def token(self, side: DecodeSide, query_id: int, now: float) -> bool:
        """Count a token of a query; whether it was the last one."""
        side.receive(query_id)
        tokens_s = self.tokens_s[query_id]
        tokens_s.append(now)
        if len(tokens_s) < self.lengths[query_id]:
            return False
        self.records[query_id].finish_reason = "length"
        side.leave(query_id)
        self.num_finished += 1
        return True

    def note(
        self,
        pipeline: _Pipeline,
        phase: str,
        at: tuple[int, int, int, int, int],
        spans: list[tuple[float, float]],
    ) -> None:
        for j, (start, end) in enumerate(spans):
            stage = pipeline.first_stage + j
            self.events.append(StageEvent(pipeline.ranks[j], stage, phase, *at, start, end))

    def run(self, requests: Sequence[Request], report: Callable[[int], None] | None) -> ReplayResult:
        self.lengths = {r.id: r.forced_output_tokens or r.max_output_tokens for r in requests}
        self.records = {r.id: RequestRecord(r.id, r.input_tokens, r.arrival_s) for r in requests}
        self.tokens_s = {i: record.token_s for i, record in self.records.items()}
        for request in sorted(requests, key=lambda r: (r.arrival_s, r.id)):
            self.at(request.arrival_s, _NEWS, lambda time, r=request: self.arrive(r, time))  # type: ignore[misc]
        reported = 0
        while self.agenda:
            time, _, _, action = heapq.heappop(self.agenda)
            action(time)
            if report is not None and self.num_finished != reported:
                reported = self.num_finished
                report(reported)
        return ReplayResult([self.records[i] for i in sorted(self.records)], self.events)


def _instances(costs: StageCosts, count: int, first_stage: int, first_rank: int) -> list[_Pipeline]:
    sizes = [stage.tp_size for stage in costs.stages]
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return [
        _Pipeline(
            first_stage=first_stage + i * len(sizes),
            ranks=[first_rank + i * starts[-1] + start for start in starts[:-1]],
            free_s=[0.0] * len(sizes),
        )
        for i in range(count)
    ]


def replay_sides(
    machine: SidesMachine,
    encode_costs: StageCosts,
    decode_costs: StageCosts,
    transfer: Transfer,
    requests: Sequence[Request],
    *,
    num_micro_batches: int,
    num_pages: int,
    page_size: int,
    num_encode_instances: int = 1,
    num_decode_instances: int = 1,
    report: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay requests of known output lengths.

    Parameters
    ----------
    machine : SidesMachine
    encode_costs, decode_costs : StageCosts
        Of one encode and one decode pipeline.
    transfer : Transfer
    requests : sequence of Request
        Each with `forced_output_tokens`, or running to `max_output_tokens`.
    num_micro_batches : int
        Of a decode pipeline.
    num_pages, page_size : int
        K/V pages of a decode pipeline per layer, as the memory formula gives them.
    num_encode_instances, num_decode_instances : int
    report : callable, optional
        Called with the number of finished requests whenever it has risen.

    Returns
    -------
    ReplayResult
        Stages count the encode pipelines' first, ranks likewise.

    Raises
    ------
    ProfileRangeError
        If a batch or context outgrows the profile.
    """
    first_token_at_encoding = not encode_costs.model.is_encoder_decoder
    sides = [
        DecodeSide(
            num_micro_batches=num_micro_batches,
            num_pages=num_pages,
            page_size=page_size,
            first_token_at_encoding=first_token_at_encoding,
        )
        for _ in range(num_decode_instances)
    ]
    replay = _SidesReplay(
        machine,
        (encode_costs, decode_costs),
        transfer,
        sides,
        num_encode_instances,
        first_token_at_encoding,
    )
    return replay.run(requests, report)
