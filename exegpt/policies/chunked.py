"""CHUNKED: a token budget per iteration, prompts split to fill what decoding leaves of it (Sarathi-Serve)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from exegpt.policies.admission import admit
from exegpt.policies.base import Step, View
from exegpt.policies.iteration import only, slots_of


@dataclass(frozen=True, slots=True)
class Chunked:
    """Continuous batching with split prompts.

    Attributes
    ----------
    slots : int
        Of all micro-batches together.
    token_budget : int
        Tokens of one micro-batch in one iteration: a row of decoding counts one, and prompts fill the
        rest, first come first served. Decoding rows are never held back.
    """

    slots: int
    token_budget: int

    def next_turn(self, view: View, micro_batch: int) -> Step | None:
        """Decode every row, go on with the prompts begun, begin new ones while budget and slots last."""
        sizes = view.micro_batch_sizes
        begun = view.partly_encoded(micro_batch)
        left = self.token_budget - (sizes[micro_batch] - len(begun))
        chunks: list[tuple[int, int]] = []
        for query_id, tokens in begun:
            chunks.append((query_id, max(min(tokens, left), 0)))
            left -= tokens
        free = slots_of(self.slots, len(sizes), micro_batch) - sizes[micro_batch]
        admission = admit(view, max(free, 0), 1)
        joining: list[int] = []
        for query in islice(view.waiting, admission.num_queries):
            if left <= 0:
                break
            joining.append(query.id)
            chunks.append((query.id, min(query.input_tokens, left)))
            left -= query.input_tokens
        if not (joining or admission.preempt or sizes[micro_batch]):
            return None
        chosen = tuple((i, n) for i, n in chunks if n > 0 and i not in admission.preempt)
        return Step(only(joining, micro_batch, len(sizes)), 1, admission.preempt, chunks=chosen)
