"""STATIC: a batch runs until its longest query ends, then the next one starts (FasterTransformer)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from exegpt.policies.admission import deal
from exegpt.policies.base import Step, View


@dataclass(frozen=True, slots=True)
class Static:
    """Fixed batches without early termination; K/V is reserved at every query's maximum length."""

    batch_size: int

    def next_step(self, view: View) -> Step | None:
        """Encode the next batch when nothing is active, and decode it to its end."""
        if view.num_active:
            return Step(
                tuple(() for _ in view.micro_batch_sizes), view.longest_remaining(0), keep_finished=True
            )
        if not view.waiting:
            return None
        # No iteration count bounds a query's pages below its maximum: all are reserved at once.
        longest = view.longest_remaining(len(view.waiting))
        count = min(self.batch_size, view.admissible(longest), len(view.waiting))
        ids = [query.id for query in islice(view.waiting, count)]
        # One iteration more than tokens remain, so that the last tokens are received within the step.
        iterations = view.longest_remaining(count) + 1
        return Step(deal(ids, view.micro_batch_sizes), iterations, keep_finished=True)
