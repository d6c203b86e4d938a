"""Rank 0: queue, policy and files; tells all ranks what to do, once a cycle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exegpt.errors import CapacityError, RequestError
from exegpt.events import RequestRecord
from exegpt.policies.base import PolicyMachine, Query, Step
from exegpt.policies.pool import Pool
from exegpt.report.result_file import append_request
from exegpt.runner.engine import IntArray, NewRow, Plan, StageEngine
from exegpt.runner.transport import Transport
from exegpt.workload.requests import Request

STOP = "stop"


class Controller:
    """Serves requests with a policy.

    Parameters
    ----------
    machine : PolicyMachine
    pool : Pool
    engine : StageEngine
        This rank's; the controller is the first rank of stage 0.
    transport : Transport
    requests : sequence of Request
    eos_token_ids : frozenset of int
    path : Path
        `requests.jsonl`; a line is appended as each request finishes.
    decode : callable, optional
        Token ids to text.
    report : callable, optional
        Called with (finished requests, output tokens) as tokens come in.
    """

    def __init__(
        self,
        machine: PolicyMachine,
        pool: Pool,
        engine: StageEngine,
        transport: Transport,
        requests: Sequence[Request],
        *,
        eos_token_ids: frozenset[int],
        path: Path,
        decode: Callable[[list[int]], str] | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        self.machine = machine
        self.pool = pool
        self.engine = engine
        self.transport = transport
        self.eos_token_ids = eos_token_ids
        self.path = path
        self.decode = decode
        self.report = report
        self.requests = {r.id: r for r in requests}
        self.records = {r.id: RequestRecord(r.id, r.input_tokens, r.arrival_s) for r in requests}
        self.tokens: dict[int, list[int]] = {r.id: [] for r in requests}
        self.arriving = sorted(requests, key=lambda r: (r.arrival_s, r.id), reverse=True)
        self.num_finished = 0
        self.num_tokens = 0
        self.start_s = 0.0
        # Ended while tokens were drained ahead of a decision: their pages are free already.
        self.left_early: list[int] = []
        self._draining = False
        engine.on_tokens = self._on_tokens

    def run(self) -> list[RequestRecord]:
        """Serve every request; returns their records, times counted from the first encoding."""
        self.start_s = time.perf_counter()
        cycle = 0
        while True:
            self._arrivals()
            step = self._decide()
            if step is None:
                if not self.arriving:
                    break
                time.sleep(max(self.arriving[-1].arrival_s - self._now(), 0.0))
                continue
            self._execute(step, cycle)
            cycle += 1
        self.transport.send_control(STOP)
        return [self.records[i] for i in sorted(self.records)]

    def _now(self) -> float:
        return time.perf_counter() - self.start_s

    def _arrivals(self) -> None:
        while self.arriving and self.arriving[-1].arrival_s <= self._now():
            request = self.arriving.pop()
            try:
                self._check(request)
                self.pool.arrive(Query(request.id, request.input_tokens, request.max_output_tokens))
            except (CapacityError, RequestError) as error:
                record = self.records[request.id]
                record.status, record.error = "failed", str(error)
                self._finish(record, "error")

    def _check(self, request: Request) -> None:
        """Raise RequestError for a request that the model cannot serve."""
        if request.error:
            raise RequestError(request.error)
        model = self.engine.model.model
        token_ids, limit = request.token_ids or (), self._limit(request)
        if not token_ids:
            raise RequestError(f"request {request.id}: the prompt is empty; it must have at least one token")
        if limit < 1:
            raise RequestError(f"request {request.id}: max_output_tokens={limit} must be at least 1")
        # The last token is never fed back.
        if len(token_ids) + limit - 1 > model.max_position_embeddings:
            raise RequestError(
                f"request {request.id}: {len(token_ids)} input and up to {limit} output tokens exceed the "
                f"window of {model.max_position_embeddings} tokens of {model.name}. Shorten the prompt, or "
                "lower runner.max_output_tokens."
            )
        outside = next((t for t in token_ids if not 0 <= t < model.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"request {request.id}: token id {outside} is outside 0..{model.vocab_size - 1}, the "
                f"vocabulary of {model.name}. Encode the prompt with the model's own tokenizer."
            )

    def _decide(self) -> Step | None:
        step = self.machine.next_step(self.pool)
        if step is None or not step.preempt:
            return step
        # Nobody is put back on stale news: the tokens still under way may free the pages.
        self._draining = True
        for index in range(len(self.pool.members)):
            self.engine.receive_tokens(index)
        self._draining = False
        step = self.machine.next_step(self.pool)
        if step is None and self.left_early:
            # All have ended, but the ranks hold their rows and tokens until a plan comes.
            step = Step(tuple(() for _ in self.pool.members), 1)
        return step

    def _execute(self, step: Step, cycle: int) -> None:
        generated = {i: self.records[i].output_tokens for ids in step.encode for i in ids}
        self.pool.begin(step)
        plan = Plan(
            cycle=cycle,
            release=[*self.left_early, *step.preempt],
            encode=[[self._new_row(i, generated[i]) for i in ids] for ids in step.encode],
            decode_iterations=step.decode_iterations,
            keep_finished=step.keep_finished,
        )
        self.left_early = []
        self.transport.send_control(plan.to_message(with_tokens=self.engine.stages[0].tp_size > 1))
        now = self._now()
        for query_id in generated:
            if self.records[query_id].encode_start_s is None:
                self.records[query_id].encode_start_s = now
        self.engine.execute(plan)

    def _new_row(self, query_id: int, generated: int) -> NewRow:
        request = self.requests[query_id]
        token_ids = [*(request.token_ids or ()), *self.tokens[query_id]]
        return NewRow(
            id=query_id,
            input_tokens=len(token_ids),
            max_output_tokens=self._limit(request) - generated,
            generated=generated,
            ignore_eos=request.forced_output_tokens is not None,
            token_ids=token_ids,
        )

    @staticmethod
    def _limit(request: Request) -> int:
        return request.forced_output_tokens or request.max_output_tokens

    def _on_tokens(self, micro_batch: int, ids: list[int], tokens: IntArray, at_s: float) -> None:
        for query_id, token in zip(ids, tokens.tolist(), strict=True):
            request, record = self.requests[query_id], self.records[query_id]
            reason = None
            if request.forced_output_tokens is None and token in self.eos_token_ids:
                reason = "stop"
            elif record.output_tokens + 1 >= self._limit(request):
                reason = "length"
            if self.pool.receive(query_id, finished=reason is not None):
                record.token_s.append(at_s - self.start_s)
                self.tokens[query_id].append(token)
                self.num_tokens += 1
                if reason is not None:
                    self._finish(record, reason)
        left = self.pool.compact(micro_batch)
        if self._draining:
            self.left_early += left
        if self.report is not None:
            self.report(self.num_finished, self.num_tokens)

    def _finish(self, record: RequestRecord, reason: str) -> None:
        record.finish_reason = reason
        self.num_finished += 1
        request, token_ids = self.requests[record.id], self.tokens[record.id]
        text = self.decode(token_ids) if self.decode is not None and record.status == "ok" else None
        append_request(self.path, record, prompt=request.prompt, token_ids=token_ids, text=text)
