"""Who may enter without running out of K/V pages, and into which micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exegpt.policies.base import View


@dataclass(frozen=True, slots=True)
class Admission:
    """Queries to take from the queue, iterations that the pages last for, queries to put back."""

    num_queries: int
    decode_iterations: int
    preempt: tuple[int, ...] = ()


def admit(view: View, batch_size: int, decode_iterations: int) -> Admission:
    """Admit up to `batch_size` waiting queries so that pages last through `decode_iterations`.

    If the active queries alone would run out, fewer iterations are run; if not even one fits, those
    that were encoded last are put back (they have the least to lose) until one does.
    """
    count = view.admissible(decode_iterations, batch_size)
    if count >= 0:
        return Admission(min(batch_size, count), decode_iterations)
    low, high = 0, decode_iterations  # pages last through `low` iterations (0: unknown), not through `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if view.admissible(middle, 0) >= 0 else (low, middle)
    if low == 0:
        return Admission(0, 1, view.surplus(1))
    return Admission(0, low)


def deal(query_ids: Iterable[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Deal queries to micro-batches, each to the smallest one, first ones first."""
    load = list(sizes)
    dealt: list[list[int]] = [[] for _ in load]
    for query_id in query_ids:
        index = load.index(min(load))
        dealt[index].append(query_id)
        load[index] += 1
    return tuple(tuple(ids) for ids in dealt)
