"""Which ranks form a stage and which layers it holds."""

from __future__ import annotations

from collections.abc import Sequence

from exegpt.errors import CapacityError
from exegpt.profiler.table import ProfileTable
from exegpt.schedule import Stage
from exegpt.simulator.costs import StageCosts, StageShape
from exegpt.specs import ModelSpec


def deal_layers(num_layers: int, layer_s: Sequence[float], extra_s: Sequence[float]) -> tuple[int, ...]:
    """Deal layers to stages so that the slowest stage is as fast as can be.

    Stage j takes `n_j * layer_s[j] + extra_s[j]`, every stage holds at least one layer. Giving each
    next layer to the stage that is then fastest is optimal: costs rise with every layer, so an
    exchange never helps.
    """
    if num_layers < len(layer_s):
        raise CapacityError(f"{num_layers} layers cannot be dealt to {len(layer_s)} stages")
    counts = [1] * len(layer_s)
    for _ in range(num_layers - len(layer_s)):
        after = [(n + 1) * t + x for n, t, x in zip(counts, layer_s, extra_s, strict=True)]
        counts[after.index(min(after))] += 1
    return tuple(counts)


def make_stages(counts: Sequence[int], tp_size: int) -> tuple[Stage, ...]:
    """Stages of `tp_size` consecutive ranks each, with `counts` layers in order."""
    stages, layer = [], 0
    for index, count in enumerate(counts):
        ranks = tuple(range(index * tp_size, (index + 1) * tp_size))
        stages.append(Stage(role="both", ranks=ranks, layers=(layer, layer + count)))
        layer += count
    return tuple(stages)


def placements(
    model: ModelSpec, profile: ProfileTable, num_gpus: int, tp_size: int
) -> list[tuple[Stage, ...]]:
    """Candidate placements on `num_gpus` at one degree, without repetition.

    The best deal depends on the working point, since embedding and head weigh more in decoding than
    in encoding. Each deal that is best at some decode batch or encode size of the profile is one
    choice for the solver, as is the deal that is best for a mix of both.
    """
    num_stages = num_gpus // tp_size
    if num_stages > model.num_hidden_layers:
        return []
    found: dict[tuple[int, ...], None] = {}
    costs = profile.layers[tp_size]
    times = [
        _point_s(model, profile, tp_size, num_stages, "decode", q) for q in costs.decode_overhead.axes[0]
    ]
    times += [
        _point_s(model, profile, tp_size, num_stages, "encode", n) for n in costs.linear.axes[0] if n >= 128
    ]
    for layer_s, extra_s in times:
        found[deal_layers(model.num_hidden_layers, [layer_s] * num_stages, extra_s)] = None
    return [make_stages(counts, tp_size) for counts in found]


def _point_s(
    model: ModelSpec, profile: ProfileTable, tp_size: int, num_stages: int, phase: str, size: float
) -> tuple[float, list[float]]:
    """Time per layer, and of everything else per stage, at one working point (contexts of 128 tokens)."""

    def total(num_layers: int) -> list[float]:
        shapes = [
            StageShape(num_layers=num_layers, tp_size=tp_size, is_first=j == 0, is_last=j == num_stages - 1)
            for j in range(num_stages)
        ]
        stage_costs = StageCosts(profile, model, shapes)
        if phase == "decode":
            context = min(size * 128, profile.layers[tp_size].decode_attention.limit(1))
            return [float(t) for t in stage_costs.decode_s(size, context)]
        queries = max(size / 128, 1.0)
        return [float(t) for t in stage_costs.encode_s(queries, size, min(128.0, size))]

    none, one = total(0), total(1)
    return one[0] - none[0], none
