"""The books of a job: who waits, who is active in which micro-batch, and the K/V pages they hold.

Replay and runtime keep the same books, so a policy sees the same view in both. What is known is
what stage 0 has received: a token that is still in the pipeline has not been counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from exegpt.errors import CapacityError
from exegpt.policies.base import Query, Step


@dataclass(slots=True)
class _Row:
    """A query in the pool; `context` are the tokens that its next decode iteration attends to."""

    query: Query
    micro_batch: int
    order: int
    context: int
    generated: int = 0
    finished: bool = False
    left_to_encode: int = 0


class Pool:
    """Queries of one pipeline.

    Parameters
    ----------
    num_micro_batches : int
    num_pages, page_size : int
        K/V pages per layer, and tokens per page; every stage has as many.
    first_token_at_encoding : bool
        Whether encoding yields a token; without it decoding starts with a start token.
    """

    def __init__(
        self, *, num_micro_batches: int, num_pages: int, page_size: int, first_token_at_encoding: bool = True
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.members: list[list[int]] = [[] for _ in range(num_micro_batches)]
        self._waiting: deque[Query] = deque()
        self._rows: dict[int, _Row] = {}
        self._num_encoded = 0
        self._keep_finished = False
        # Rows per micro-batch that are finished and have not left.
        self._num_finished = [0] * num_micro_batches
        self._start_token = 0 if first_token_at_encoding else 1
        # Pages of all active queries through their next iteration.
        self._pages_next = 0

    @property
    def waiting(self) -> deque[Query]:
        """Queries that have arrived and are not encoded, first come first."""
        return self._waiting

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Active queries per micro-batch."""
        return [len(ids) for ids in self.members]

    @property
    def num_active(self) -> int:
        """Active queries."""
        return len(self._rows)

    def partly_encoded(self, micro_batch: int) -> list[tuple[int, int]]:
        """See `View.partly_encoded`."""
        rows = (self._rows[i] for i in self.members[micro_batch])
        return [(row.query.id, row.left_to_encode) for row in rows if row.left_to_encode]

    def decoding(self, micro_batch: int) -> list[int]:
        """Ids of the active queries whose prompts are encoded."""
        return [i for i in self.members[micro_batch] if not self._rows[i].left_to_encode]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _pages_after(self, query: Query, generated: int, decode_iterations: int) -> int:
        tokens = min(generated + decode_iterations, self._most_cached(query))
        return self._pages(query.input_tokens + tokens)

    def _most_cached(self, query: Query) -> int:
        # The last token of a query is never cached; iteration u caches what iteration u - 1 yielded, the
        # first one the start token if there is one.
        return max(query.max_output_tokens - 1, 0) + self._start_token

    def arrive(self, query: Query) -> None:
        """Append to the queue.

        Raises
        ------
        CapacityError
            If the query could not be served even alone.
        """
        needed = self._pages(query.input_tokens + self._most_cached(query))
        if needed > self.num_pages:
            raise CapacityError(
                f"request {query.id}: {query.input_tokens} input and up to {query.max_output_tokens} "
                "output tokens need "
                f"{needed} K/V pages of {self.page_size} tokens, but there are {self.num_pages}"
            )
        self._waiting.append(query)

    def admissible(self, decode_iterations: int, most: int | None = None) -> int:
        """See `View.admissible`."""
        held = self._pages_next
        if decode_iterations != 1:
            rows = self._rows.values()
            held = sum([self._pages_after(r.query, r.generated, decode_iterations) for r in rows])
        free = self.num_pages - held
        if free < 0:
            return -1
        count = 0
        for query in islice(self._waiting, most):
            free -= self._pages_after(query, 0, decode_iterations)
            if free < 0:
                break
            count += 1
        return count

    def longest_remaining(self, num_waiting: int) -> int:
        """See `View.longest_remaining`."""
        active = [r.query.max_output_tokens - r.generated for r in self._rows.values()]
        fresh = [q.max_output_tokens for q in islice(self._waiting, num_waiting)]
        return max([*active, *fresh], default=0)

    def surplus(self, decode_iterations: int) -> tuple[int, ...]:
        """See `View.surplus`."""
        needed = {
            r.query.id: self._pages_after(r.query, r.generated, decode_iterations)
            for r in self._rows.values()
        }
        missing = sum(needed.values()) - self.num_pages
        put_back: list[int] = []
        for row in sorted(self._rows.values(), key=lambda row: row.order, reverse=True):
            if missing <= 0:
                break
            missing -= needed[row.query.id]
            put_back.append(row.query.id)
        return tuple(put_back)

    def begin(self, step: Step) -> None:
        """Carry out a step's admissions.

        Preempted queries go to the queue's head, encoded ones become active; chunks count as encoded.
        """
        self._keep_finished = step.keep_finished
        for query_id in step.preempt:
            row = self._leave(query_id)
            # What was generated is encoded again as part of the prompt.
            query = row.query
            again = replace(
                query,
                input_tokens=query.input_tokens + row.generated,
                max_output_tokens=query.max_output_tokens - row.generated,
            )
            self._waiting.appendleft(again)
        self._admit(step)
        for query_id, tokens in step.chunks or ():
            self._rows[query_id].left_to_encode -= tokens
            assert self._rows[query_id].left_to_encode >= 0

    def _admit(self, step: Step) -> None:
        chosen = {query_id: index for index, ids in enumerate(step.encode) for query_id in ids}
        if not chosen:
            return
        found = {q.id: q for q in islice(self._waiting, len(chosen)) if q.id in chosen}
        if len(found) != len(chosen):
            raise AssertionError("a policy may only encode the first waiting queries")
        for _ in range(len(chosen)):
            self._waiting.popleft()
        for index, ids in enumerate(step.encode):
            for query_id in ids:
                query = found[query_id]
                left = 0 if step.chunks is None else query.input_tokens
                context = query.input_tokens + self._start_token
                self._rows[query_id] = _Row(query, index, self._num_encoded, context, left_to_encode=left)
                self._num_encoded += 1
                self._pages_next += self._pages_after(query, 0, 1)
                self.members[index].append(query_id)

    def _leave(self, query_id: int) -> _Row:
        row = self._rows.pop(query_id)
        self.members[row.micro_batch].remove(query_id)
        self._num_finished[row.micro_batch] -= row.finished
        self._pages_next -= self._pages_after(row.query, row.generated, 1)
        return row

    def context_tokens(self, query_id: int) -> int:
        """Tokens that the query's next decode iteration attends to, the new one included."""
        return self._rows[query_id].context

    def summed_context(self, query_ids: Sequence[int]) -> int:
        """`context_tokens` of queries, summed."""
        rows = self._rows
        return sum([rows[i].context for i in query_ids])

    def input_tokens(self, query_id: int) -> int:
        """Prompt tokens of an active query; after it was put back, with what it had generated."""
        return self._rows[query_id].query.input_tokens

    def receive(self, query_id: int, *, finished: bool) -> bool:
        """Count a received token; say whether it belongs to the answer (a finished row's does not)."""
        row = self._rows[query_id]
        row.generated += 1
        row.context += 1
        cached = row.generated + 1
        query = row.query
        # As `_pages_after` of the next iteration: one more where its token opens a page.
        if (query.input_tokens + row.generated) % self.page_size == 0 and cached <= self._most_cached(query):
            self._pages_next += 1
        if row.finished:
            return False
        if finished:
            row.finished = True
            self._num_finished[row.micro_batch] += 1
        return True

    def compact(self, micro_batch: int) -> list[int]:
        """Let finished queries leave a micro-batch; return those that left.

        With `keep_finished` all leave together when the last one has finished.
        """
        ids, count = self.members[micro_batch], self._num_finished[micro_batch]
        if not count or (self._keep_finished and count < len(ids)):
            return []
        finished = [i for i in ids if self._rows[i].finished]
        self._num_finished[micro_batch] = 0
        self.members[micro_batch] = [i for i in ids if not self._rows[i].finished]
        for query_id in finished:
            row = self._rows.pop(query_id)
            self._pages_next -= self._pages_after(row.query, row.generated, 1)
        return finished
