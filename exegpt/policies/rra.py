"""RRA: encode a batch, decode N_D iterations, repeat (paper, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from exegpt.policies.admission import admit, deal
from exegpt.policies.base import Step, View


@dataclass(frozen=True, slots=True)
class RRA:
    """Round-robin allocation: every rank encodes and decodes, in turn.

    Attributes
    ----------
    encode_batch_size : int
        B_E, queries encoded per cycle.
    decode_iterations : int
        N_D, decode iterations per cycle.
    """

    encode_batch_size: int
    decode_iterations: int

    def next_step(self, view: View) -> Step | None:
        """Encode what waits, up to B_E and what fits; then decode N_D iterations."""
        if not view.num_active and not view.waiting:
            return None
        admission = admit(view, self.encode_batch_size, self.decode_iterations)
        ids = [query.id for query in islice(view.waiting, admission.num_queries)]
        return Step(deal(ids, view.micro_batch_sizes), admission.decode_iterations, admission.preempt)
