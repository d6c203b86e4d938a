"""What every policy sees and says.

A policy decides once a cycle, from queue and pool, which queries to encode and how many decode
iterations follow. `simulator.replay` executes the decisions on a profile's clock and `runner` on
real ranks; both keep the books with `policies.pool.Pool`, so what is simulated is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
    """

    encode: tuple[tuple[int, ...], ...]
    decode_iterations: int
    preempt: tuple[int, ...] = ()
    keep_finished: bool = False

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

    def admissible(self, decode_iterations: int) -> int:
        """How many of the first waiting queries have K/V pages through `decode_iterations`.

        -1 if the active queries alone would run out of pages before.
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
