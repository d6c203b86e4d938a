"""Policies whose encoding and decoding have GPUs of their own (paper, section 4.1; WAA and DISAGGREGATED).

One or more encode pipelines take batches of prompts; the K/V of a batch goes to a decode pipeline,
where its queries join micro-batches at iteration boundaries. The two sides never wait for each
other but in one way: a batch is encoded only when a decode pipeline has room for all its queries, so
what was encoded is handed over at once and K/V never piles up between the sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from exegpt.policies.admission import deal
from exegpt.policies.base import Query
from exegpt.schedule import Schedule
from exegpt.specs import Policy

# Batches of fewer queries are counted, not weighed: a whole prompt is too coarse to balance them with.
LEAST_WEIGHED_BATCH = 4


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """Queries to encode together, and the decode pipeline that keeps room for them."""

    query_ids: tuple[int, ...]
    decode_instance: int


class SidesView(Protocol):
    """What a policy with two sides may look at."""

    @property
    def waiting(self) -> Sequence[Query]:
        """Queries that have arrived and are not encoded, first come first."""

    @property
    def occupancy(self) -> list[int]:
        """Queries of every decode pipeline: active, being encoded for it, or on their way to it."""

    def admissible(self, decode_instance: int, most: int) -> int:
        """How many of the first `most` waiting queries a decode pipeline has K/V pages for now."""


class SidesMachine(Protocol):
    """A policy with two sides: when to encode what, and which micro-batch it joins."""

    def next_batch(self, view: SidesView) -> EncodeBatch | None:
        """What an idle encode pipeline should start with now; None if it should wait."""

    def place(self, query_ids: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Micro-batch of each query handed over; `sizes` counts those that still wait to join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """WAA and DISAGGREGATED.

    Attributes
    ----------
    encode_batch_size : int
        B_E, queries of an encode batch.
    decode_room : int
        Most queries that one decode pipeline takes, those on their way to it included.
    mean_input_tokens : float, optional
        If given, a batch ends where its summed prompts come nearest to B_E times this, so that
        encode times stay even (the paper's dynamic adjustment); else it has B_E prompts.
    """

    encode_batch_size: int
    decode_room: int
    mean_input_tokens: float | None = None

    def next_batch(self, view: SidesView) -> EncodeBatch | None:
        """A batch of what waits, if the emptiest decode pipeline has room for all of it."""
        if not view.waiting:
            return None
        count = self._batch_size(view.waiting)
        instance = view.occupancy.index(min(view.occupancy))
        held = view.occupancy[instance]
        free = min(self.decode_room - held, view.admissible(instance, count))
        if free < count:
            if held:
                return None
            # An empty pipeline will never have more room than now.
            count = max(min(free, count), 1)
        return EncodeBatch(tuple(q.id for q in islice(view.waiting, count)), instance)

    def place(self, query_ids: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Each query joins the micro-batch that is then smallest."""
        return deal(query_ids, sizes)

    def _batch_size(self, waiting: Sequence[Query]) -> int:
        size = self.encode_batch_size
        if self.mean_input_tokens is None or size < LEAST_WEIGHED_BATCH:
            return min(size, len(waiting))
        planned, tokens, count = size * self.mean_input_tokens, 0, 0
        # Twice the planned number bounds the room that a run of short prompts asks for.
        for query in islice(waiting, 2 * size):
            if count and tokens + query.input_tokens / 2 > planned:
                break
            tokens += query.input_tokens
            count += 1
        return count


def make_sides(schedule: Schedule, mean_input_tokens: float) -> Sides:
    """The policy of a schedule with two sides; `mean_input_tokens` as planned.

    DISAGGREGATED counts prompts, as DistServe's first-come-first-served encode instances do.
    """
    return Sides(
        encode_batch_size=schedule.knobs.encode_batch_size,
        decode_room=schedule.knobs.decode_batch_size,
        mean_input_tokens=None if schedule.policy is Policy.DISAGGREGATED else mean_input_tokens,
    )
