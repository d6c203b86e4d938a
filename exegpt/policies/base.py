"""What every policy sees and says.

A policy decides once a cycle, from queue and pool, which queries to encode and how many decode
iterations follow (`PolicyMachine`), or once per micro-batch and iteration (`TurnMachine`, continuous
batching). `simulator.replay` executes the decisions on a profile's clock and `runner` on
real ranks; both keep the books with `policies.pool.Pool`, so what is simulated is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Query:
    """A request as a policy sees it."""

    id: int
    input_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: encode, then decode.

    Attributes
    ----------
    encode : tuple of tuples of query ids
        The queries to encode, one tuple per micro-batch; all empty if there are none.
    decode_iterations : int
        Decode iterations that follow; fewer are run if all micro-batches empty before.
    preempt : tuple of query ids
        Active queries whose K/V is dropped first; they wait at the head of the queue and are
        encoded again with what they had generated.
    keep_finished : bool
        Whether finished rows are computed on until the last of their micro-batch ends
        (FasterTransformer); else they leave at once.
    encode_splits : int
        Encode micro-batches per decode micro-batch: the queries of each tuple of `encode` pass the
        pipeline in that many parts (`encode_parts`).
    chunks : tuple of (query id, prompt tokens), or None
        In a turn of chunked encoding: the prompt tokens that pass together with the decoding rows,
        in this order; queries in `encode` are admitted without anything encoded but their chunk.
        None everywhere else: the queries in `encode` are encoded whole, in a pass of their own.
    """

    encode: tuple[tuple[int, ...], ...]
    decode_iterations: int
    preempt: tuple[int, ...] = ()
    keep_finished: bool = False
    encode_splits: int = 1
    chunks: tuple[tuple[int, int], ...] | None = None

    def encode_parts(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The encode passes in order: micro-batch and query ids, none of them empty."""
        for index, ids in enumerate(self.encode):
            for part in range(self.encode_splits):
                chosen = ids[part :: self.encode_splits]
                if chosen:
                    yield index, chosen

    @property
    def num_encoded(self) -> int:
        """Queries that the step encodes."""
        return sum(len(batch) for batch in self.encode)


class View(Protocol):
    """What a policy may look at when it decides."""

    @property
    def waiting(self) -> Sequence[Query]:
        """Queries that have arrived and are not encoded, first come first."""

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Active queries per micro-batch."""

    @property
    def num_active(self) -> int:
        """Active queries."""

    def partly_encoded(self, micro_batch: int) -> list[tuple[int, int]]:
        """Active queries with prompt tokens still to encode, and how many; first admitted first."""

    def admissible(self, decode_iterations: int, most: int | None = None) -> int:
        """How many of the first waiting queries have K/V pages through `decode_iterations`.

        No more than `most` are looked at; -1 if the active queries alone would run out of pages before.
        """

    def longest_remaining(self, num_waiting: int) -> int:
        """Most tokens that an active query, or one of the first `num_waiting` waiting, may still yield."""

    def surplus(self, decode_iterations: int) -> tuple[int, ...]:
        """Ids of the active queries to put back so that pages last through `decode_iterations`.

        Encoded last first, and no more than are needed; empty if the pages last for all.
        """


class PolicyMachine(Protocol):
    """A policy: from a view to the next step."""

    def next_step(self, view: View) -> Step | None:
        """The next step; None if there is nothing to do until a query arrives."""


@runtime_checkable
class TurnMachine(Protocol):
    """A policy that decides for one micro-batch at a time, each time its tokens have come back.

    The micro-batches take turns; in a turn, one passes the pipeline: prompts that join it, and one
    decode iteration of the queries that were active before. Those that join decode from their next
    turn on, so a turn never waits for first tokens.
    """

    def next_turn(self, view: View, micro_batch: int) -> Step | None:
        """The micro-batch's next step, with its own queries only; None if it has nothing to do.

        `decode_iterations` of the step is 1; `preempt` may name any active query.
        """
