"""The books of one decode pipeline that has GPUs of its own: who holds K/V pages, in which micro-batch.

Replay and runtime keep them alike. A query holds pages from the moment its encoding begins, since the
room must be there when its K/V arrives; it decodes from the iteration boundary at which it joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exegpt.policies.base import Query


@dataclass(slots=True)
class _Row:
    """A query that holds pages; `context` are the tokens that its next decode iteration attends to."""

    query: Query
    order: int
    context: int
    generated: int = 0


class DecodeSide:
    """Queries of one decode pipeline.

    Parameters
    ----------
    num_micro_batches : int
    num_pages, page_size : int
        K/V pages per layer, and tokens per page; every stage has as many.
    first_token_at_encoding : bool
        Whether encoding yields a token; without it decoding starts with a start token.

    Attributes
    ----------
    members : list of lists of query ids
        Per micro-batch, those that decode.
    placed : list of lists of query ids
        Per micro-batch, those whose K/V is there and that join at its next iteration boundary.
    """

    def __init__(
        self, *, num_micro_batches: int, num_pages: int, page_size: int, first_token_at_encoding: bool = True
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.members: list[list[int]] = [[] for _ in range(num_micro_batches)]
        self.placed: list[list[int]] = [[] for _ in range(num_micro_batches)]
        self._start_token = 0 if first_token_at_encoding else 1
        self._rows: dict[int, _Row] = {}
        self._num_taken = 0
        self._pages_held = 0

    @property
    def num_held(self) -> int:
        """Queries that hold pages."""
        return len(self._rows)

    @property
    def sizes(self) -> list[int]:
        """Queries per micro-batch, those that wait to join included."""
        return [len(m) + len(p) for m, p in zip(self.members, self.placed, strict=True)]

    def pages_for(self, query: Query, generated: int = 0) -> int:
        """Pages through the iteration after `generated` tokens, or through the first one."""
        tokens = min(max(generated, 1), self._most_cached(query))
        return -(-(query.input_tokens + tokens) // self.page_size)

    def _most_cached(self, query: Query) -> int:
        # The last token of a query is never cached.
        return query.max_output_tokens - 1 + self._start_token

    def most_pages(self, query: Query) -> int:
        """Pages that the query can come to hold."""
        return self.pages_for(query, query.max_output_tokens)

    def admissible(self, queries: Iterable[Query]) -> int:
        """How many of the queries, first ones first, have pages beside those held."""
        free, count = self.num_pages - self._pages_held, 0
        for query in queries:
            free -= self.pages_for(query)
            if free < 0:
                break
            count += 1
        return count

    def take(self, query: Query) -> None:
        """Reserve pages for a query whose encoding begins."""
        self._rows[query.id] = _Row(query, self._num_taken, query.input_tokens + self._start_token)
        self._num_taken += 1
        self._pages_held += self.pages_for(query)

    def input_tokens(self, query_id: int) -> int:
        """Tokens of the query's prompt."""
        return self._rows[query_id].query.input_tokens

    def context_tokens(self, query_id: int) -> int:
        """Tokens that the query's next decode iteration attends to, the new one included."""
        return self._rows[query_id].context

    def summed_context(self, query_ids: Sequence[int]) -> int:
        """`context_tokens` of queries, summed."""
        rows = self._rows
        return sum([rows[i].context for i in query_ids])

    def receive(self, query_id: int) -> None:
        """Count a token."""
        row = self._rows[query_id]
        query, cached = row.query, row.generated + 1
        row.generated = cached
        row.context += 1
        # As `pages_for`: one more where the token opens a page; the first one has its room from the start.
        opens = (query.input_tokens + cached - 1) % self.page_size == 0
        if opens and 1 < cached <= self._most_cached(query):
            self._pages_held += 1

    def leave(self, query_id: int) -> None:
        """A query has ended: its pages are free."""
        row = self._rows.pop(query_id)
        self._pages_held -= self.pages_for(row.query, row.generated)
        for ids in (*self.members, *self.placed):
            if query_id in ids:
                ids.remove(query_id)

    def join(self, micro_batch: int) -> None:
        """Placed queries join their micro-batch."""
        self.members[micro_batch] += self.placed[micro_batch]
        self.placed[micro_batch] = []

    def put_back(self, micro_batch: int) -> list[Query]:
        """Drop members of a micro-batch, encoded last first, until pages last for all that are held.

        Returns
        -------
        list of Query
            To be encoded again with what they had generated, first encoded last.
        """
        dropped: list[Query] = []
        if self._pages_held <= self.num_pages:
            return dropped
        by_order = sorted(self.members[micro_batch], key=lambda i: self._rows[i].order)
        while by_order and self._pages_held > self.num_pages:
            row = self._rows[by_order.pop()]
            query = row.query
            self.leave(query.id)
            dropped.append(
                Query(
                    query.id,
                    query.input_tokens + row.generated,
                    query.max_output_tokens - row.generated,
                )
            )
        return dropped
