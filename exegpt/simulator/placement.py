"""Which ranks form a stage and which layers it holds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from exegpt.errors import CapacityError
from exegpt.schedule import Stage


def deal_layers(num_layers: int, layer_s: Sequence[float], extra_s: Sequence[float]) -> tuple[int, ...]:
    """Deal layers to stages so that the slowest stage is as fast as can be.

    Stage j takes `n_j * layer_s[j] + extra_s[j]`, every stage holds at least one layer. Giving each next
    layer to the stage that is then fastest is optimal: costs rise with every layer, so an exchange never
    helps.
    """
    if num_layers < len(layer_s):
        raise CapacityError(f"{num_layers} layers cannot be dealt to {len(layer_s)} stages")
    counts = [1] * len(layer_s)
    heap = [(2 * t + x, j) for j, (t, x) in enumerate(zip(layer_s, extra_s, strict=True))]
    heapq.heapify(heap)
    for _ in range(num_layers - len(layer_s)):
        after, j = heap[0]
        counts[j] += 1
        heapq.heapreplace(heap, (after + layer_s[j], j))
    return tuple(counts)


def make_stages(counts: Sequence[int], tp_size: int) -> tuple[Stage, ...]:
    """Stages of `tp_size` consecutive ranks each, with `counts` layers in order."""
    stages, layer = [], 0
    for index, count in enumerate(counts):
        ranks = tuple(range(index * tp_size, (index + 1) * tp_size))
        stages.append(Stage(role="both", ranks=ranks, layers=(layer, layer + count)))
        layer += count
    return tuple(stages)
