"""ITERATION: a new prompt joins as soon as one ends (ORCA, vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from exegpt.policies.admission import admit
from exegpt.policies.base import Step, View


@dataclass(frozen=True, slots=True)
class Iteration:
    """Continuous batching: in every turn of a micro-batch its free slots take waiting prompts.

    `slots` are all micro-batches' together. A step encodes what joins and decodes one iteration of
    those that were active before.
    """

    slots: int

    def next_turn(self, view: View, micro_batch: int) -> Step | None:
        """Fill the micro-batch's free slots, as far as K/V pages last; decode one iteration."""
        sizes = view.micro_batch_sizes
        free = slots_of(self.slots, len(sizes), micro_batch) - sizes[micro_batch]
        admission = admit(view, max(free, 0), 1)
        ids = tuple(query.id for query in islice(view.waiting, admission.num_queries))
        if not (ids or admission.preempt or sizes[micro_batch]):
            return None
        return Step(only(ids, micro_batch, len(sizes)), 1, admission.preempt)


def slots_of(slots: int, num_micro_batches: int, micro_batch: int) -> int:
    """Slots of one micro-batch; the first ones get what does not divide."""
    share, rest = divmod(slots, num_micro_batches)
    return share + (micro_batch < rest)


def only(ids: Sequence[int], micro_batch: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """`Step.encode` with queries in one micro-batch."""
    return tuple(tuple(ids) if k == micro_batch else () for k in range(num_micro_batches))
