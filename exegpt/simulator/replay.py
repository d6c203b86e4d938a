"""Event-driven replay: a policy's decisions carried out on a profile's clock.

Follows the runtime job by job. Stage j takes a micro-batch when it is free and the micro-batch has
left stage j - 1; stage 0 starts a micro-batch's next iteration when its tokens have come back from
the last stage; the next step is decided when stage 0 has issued the last job of the one before. Where
micro-batches take turns, a micro-batch's step is decided when its tokens have come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from exegpt.errors import CapacityError
from exegpt.events import RequestRecord, StageEvent
from exegpt.policies.base import PolicyMachine, Query, Step, TurnMachine
from exegpt.policies.pool import Pool
from exegpt.simulator.costs import StageCosts
from exegpt.simulator.mixed import mixed_one_s
from exegpt.workload.requests import Request


@dataclass(slots=True)
class ReplayResult:
    """Records of every request and stage, as a run would have written them."""

    records: list[RequestRecord]
    events: list[StageEvent]


@dataclass(slots=True)
class _Clock:
    free_s: list[float]
    # First rank of each stage.
    ranks: list[int]
    events: list[StageEvent] = field(default_factory=list)
    cycle: int = 0

    def run(
        self, stage_s: Sequence[float], ready_s: float, phase: str, at: tuple[int, int, int, int]
    ) -> float:
        """Pass one micro-batch through the stages; the time when it leaves the last one."""
        iteration, micro_batch, queries, tokens = at
        for j, time in enumerate(stage_s):
            start = max(self.free_s[j], ready_s)
            ready_s = self.free_s[j] = start + time
            self.events.append(
                StageEvent(
                    self.ranks[j],
                    j,
                    phase,
                    self.cycle,
                    iteration,
                    micro_batch,
                    queries,
                    tokens,
                    start,
                    ready_s,
                )
            )
        return ready_s


class _Replay:
    def __init__(
        self,
        machine: PolicyMachine | TurnMachine,
        costs: StageCosts,
        pool: Pool,
        requests: Sequence[Request],
        first_token_at_encoding: bool,
    ) -> None:
        self.machine = machine
        self.first_token_at_encoding = first_token_at_encoding
        self.pool = pool
        self.costs = costs
        ranks = [0, *accumulate(stage.tp_size for stage in costs.stages)]
        self.clock = _Clock([0.0] * len(costs.stages), ranks[:-1])
        self.lengths = {r.id: r.forced_output_tokens or r.max_output_tokens for r in requests}
        self.records = {r.id: RequestRecord(r.id, r.input_tokens, r.arrival_s) for r in requests}
        self.arriving = sorted(requests, key=lambda r: (r.arrival_s, r.id), reverse=True)
        # Per micro-batch: (time, ids) of tokens that have left the last stage but were not received.
        self.outstanding: list[list[tuple[float, list[int]]]] = [[] for _ in pool.members]
        self.tokens_s = {i: record.token_s for i, record in self.records.items()}

    def arrivals(self) -> None:
        while self.arriving and self.arriving[-1].arrival_s <= self.clock.free_s[0]:
            request = self.arriving.pop()
            record = self.records[request.id]
            try:
                self.pool.arrive(Query(request.id, request.input_tokens, request.max_output_tokens))
            except CapacityError as error:
                record.status, record.error, record.finish_reason = "failed", str(error), "error"

    def receive(self, micro_batch: int) -> float:
        """Receive a micro-batch's outstanding tokens; the time when the last one came."""
        latest = 0.0
        for time, ids in self.outstanding[micro_batch]:
            latest = max(latest, time)
            for query_id in ids:
                tokens_s = self.tokens_s[query_id]
                ends = len(tokens_s) + 1 >= self.lengths[query_id]
                if self.pool.receive(query_id, finished=ends):
                    tokens_s.append(time)
        self.outstanding[micro_batch] = []
        self.pool.compact(micro_batch)
        return latest

    def decide(self, next_step: Callable[[Pool], Step | None]) -> Step | None:
        step = next_step(self.pool)
        if step is not None and step.preempt and any(self.outstanding):
            # Nobody is put back on stale news: the tokens still under way may free the pages.
            self.clock.free_s[0] = max(
                [self.clock.free_s[0], *(self.receive(k) for k in range(len(self.outstanding)))]
            )
            step = next_step(self.pool)
        return step

    def encode(self, step: Step) -> None:
        start = self.clock.free_s[0]
        for micro_batch, ids in step.encode_parts():
            lengths = [self.pool.context_tokens(i) for i in ids]
            tokens = sum(lengths)
            rms = math.sqrt(sum(n * n for n in lengths) / len(lengths))
            times = self.costs.encode_one_s(len(ids), tokens, rms)
            end = self.clock.run(times, 0.0, "encode", (0, micro_batch, len(ids), tokens))
            self.outstanding[micro_batch].append((end, list(ids) if self.first_token_at_encoding else []))
            for query_id in ids:
                if self.records[query_id].encode_start_s is None:
                    self.records[query_id].encode_start_s = start

    def decode(self, step: Step) -> None:
        for iteration in range(1, step.decode_iterations + 1):
            if not any(self.pool.members):
                return
            for micro_batch in range(len(self.pool.members)):
                ready = self.receive(micro_batch)
                # Stage 0 waits for the tokens even if they are the micro-batch's last ones.
                self.clock.free_s[0] = max(self.clock.free_s[0], ready)
                self.decode_rows(micro_batch, self.pool.members[micro_batch], ready, iteration)

    def decode_rows(self, micro_batch: int, ids: Sequence[int], ready: float, iteration: int) -> None:
        if not ids:
            return
        tokens = self.pool.summed_context(ids)
        # Only the cross attention of encoder-decoder models tells inputs from the rest.
        inputs = 0 if self.first_token_at_encoding else sum(map(self.pool.input_tokens, ids))
        times = self.costs.decode_one_s(len(ids), tokens, inputs)
        end = self.clock.run(times, ready, "decode", (iteration, micro_batch, len(ids), tokens))
        self.outstanding[micro_batch].append((end, list(ids)))

    def mixed(self, micro_batch: int, step: Step, rows: Sequence[int]) -> None:
        """Decoding rows and prompt chunks in one pass; whole prompts yield their first token."""
        left = dict(self.pool.partly_encoded(micro_batch))
        chunks = []
        for query_id, tokens in step.chunks or ():
            end = self.pool.context_tokens(query_id) - left.get(query_id, 0)
            chunks.append((end - tokens, end))
            if self.records[query_id].encode_start_s is None:
                self.records[query_id].encode_start_s = self.clock.free_s[0]
        if not (rows or chunks):
            return
        context = self.pool.summed_context(rows)
        times = mixed_one_s(self.costs, len(rows), context, chunks)
        tokens = context + sum(n for _, n in step.chunks or ())
        at = (1, micro_batch, len(rows) + len(chunks), tokens)
        end_s = self.clock.run(times, 0.0, "mixed" if chunks else "decode", at)
        whole = [i for i, _ in step.chunks or () if i not in left]
        self.outstanding[micro_batch].append((end_s, [*rows, *whole]))

    def turn(self, machine: TurnMachine, micro_batch: int) -> bool:
        """A micro-batch's turn; whether it had anything to do."""
        self.clock.free_s[0] = max(self.clock.free_s[0], self.receive(micro_batch))
        self.arrivals()
        step = self.decide(lambda view: machine.next_turn(view, micro_batch))
        if step is None:
            return False
        rows = [i for i in self.pool.decoding(micro_batch) if i not in step.preempt]
        self.pool.begin(step)
        if step.chunks is None:
            self.encode(step)
            self.decode_rows(micro_batch, rows, 0.0, 1)
        else:
            self.mixed(micro_batch, step, rows)
        return True

    def run_turns(self, machine: TurnMachine, report: Callable[[int], None] | None) -> None:
        while True:
            busy = [self.turn(machine, k) for k in range(len(self.pool.members))]
            if not any(busy):
                if not self.arriving:
                    return
                self.clock.free_s[0] = max(self.clock.free_s[0], self.arriving[-1].arrival_s)
            self.clock.cycle += 1
            self.report(report)

    def run_steps(self, machine: PolicyMachine, report: Callable[[int], None] | None) -> None:
        while True:
            self.arrivals()
            step = self.decide(machine.next_step)
            if step is None:
                if not self.arriving:
                    return
                self.clock.free_s[0] = max(self.clock.free_s[0], self.arriving[-1].arrival_s)
                continue
            self.pool.begin(step)
            self.encode(step)
            self.decode(step)
            self.clock.cycle += 1
            self.report(report)

    def report(self, report: Callable[[int], None] | None) -> None:
        if report is not None:
            report(len(self.records) - len(self.arriving) - self.pool.num_active - len(self.pool.waiting))

    def run(self, report: Callable[[int], None] | None) -> ReplayResult:
        if isinstance(self.machine, TurnMachine):
            self.run_turns(self.machine, report)
        else:
            self.run_steps(self.machine, report)
        for query_id, record in self.records.items():
            if record.output_tokens >= self.lengths[query_id]:
                record.finish_reason = "length"
        return ReplayResult([self.records[i] for i in sorted(self.records)], self.clock.events)


def replay(
    machine: PolicyMachine | TurnMachine,
    costs: StageCosts,
    requests: Sequence[Request],
    *,
    num_micro_batches: int,
    num_pages: int,
    page_size: int,
    first_token_at_encoding: bool = True,
    report: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay requests of known output lengths.

    Parameters
    ----------
    machine : PolicyMachine or TurnMachine
    costs : StageCosts
    requests : sequence of Request
        Each with `forced_output_tokens`, or running to `max_output_tokens`.
    num_micro_batches, num_pages, page_size : int
        As the schedule and the memory formula give them.
    first_token_at_encoding : bool
        False for encoder-decoder models, whose encoding yields no token.
    report : callable, optional
        Called after every step with the number of finished requests.

    Raises
    ------
    ProfileRangeError
        If a batch or context outgrows the profile.
    """
    pool = Pool(
        num_micro_batches=num_micro_batches,
        num_pages=num_pages,
        page_size=page_size,
        first_token_at_encoding=first_token_at_encoding,
    )
    return _Replay(machine, costs, pool, requests, first_token_at_encoding).run(report)
