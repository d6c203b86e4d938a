"""ITERATION: a new prompt joins as soon as one ends (ORCA, vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from exegpt.policies.admission import admit
from exegpt.policies.base import Step, View

Slots = TypeVar("Slots", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Iteration:
    """Continuous batching: in every turn of a micro-batch its free slots take waiting prompts.

    A step encodes what joins and decodes one iteration of those that were active before.

    Attributes
    ----------
    slots : int
        Of all micro-batches together.
    most_joining : int, optional
        Most prompts that join in one turn. Without it the first turns encode as many as there are slots.
    """

    slots: int
    most_joining: int | None = None

    def next_turn(self, view: View, micro_batch: int) -> Step | None:
        """Fill the micro-batch's free slots, as far as K/V pages last; decode one iteration."""
        sizes = view.micro_batch_sizes
        free = slots_of(self.slots, len(sizes), micro_batch) - sizes[micro_batch]
        wanted = free if self.most_joining is None else min(free, self.most_joining)
        admission = admit(view, max(wanted, 0), 1)
        ids = tuple(query.id for query in islice(view.waiting, admission.num_queries))
        if not (ids or admission.preempt or sizes[micro_batch]):
            return None
        return Step(only(ids, micro_batch, len(sizes)), 1, admission.preempt)


def slots_of(slots: Slots, num_micro_batches: int, micro_batch: int) -> Slots:
    """Slots of one micro-batch, of a number or an array of them; the first ones get what does not divide."""
    return (slots + num_micro_batches - 1 - micro_batch) // num_micro_batches


def only(ids: Sequence[int], micro_batch: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """`Step.encode` with queries in one micro-batch."""
    return tuple(tuple(ids) if k == micro_batch else () for k in range(num_micro_batches))
