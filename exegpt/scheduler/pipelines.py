"""Pipelines that a group of GPUs can form: tensor-parallel groups, single GPUs, and the layers of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.schedule import Stage
from exegpt.simulator.placement import deal_layers
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import FIRST, LAST, SENDS, StageKinds
from exegpt.specs import ClusterSpec

# Working points at which layers are dealt: micro-batches that decode, and that encode, so many queries.
DECODE_POINTS = (4, 64, 512)
ENCODE_POINTS = (1, 16)


def group_sizes(cluster: ClusterSpec) -> list[int]:
    """GPUs of one of several equal groups: parts of a node, or whole nodes; in falling order."""
    node = cluster.gpus_per_node
    sizes = [g for g in range(1, node + 1) if node % g == 0]
    sizes += [node * n for n in range(2, cluster.num_nodes + 1) if cluster.num_nodes % n == 0]
    return sorted(sizes, reverse=True)


def shapes(num_gpus: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Degrees of a pipeline's stages: single GPUs, then groups of one degree (partial tensor parallelism).

    The groups come last since the output matrix is split among the ranks of the last stage. Numbers of
    single GPUs are multiples of the degree, so a group never spans two nodes.
    """
    for degree in degrees:
        if degree == 1:
            yield (1,) * num_gpus
            continue
        for num_groups in range(1, num_gpus // degree + 1):
            singles = num_gpus - num_groups * degree
            # Without degree 1 in the profile or the search there are no single GPUs.
            if singles == 0 or 1 in degrees:
                yield (1,) * singles + (degree,) * num_groups


def make_pipeline(
    degrees: Sequence[int], counts: Sequence[int], *, role: str = "both", first_rank: int = 0
) -> tuple[Stage, ...]:
    """Stages of consecutive ranks with `counts` layers in order."""
    stages, layer, rank = [], 0, first_rank
    for degree, count in zip(degrees, counts, strict=True):
        ranks = tuple(range(rank, rank + degree))
        stages.append(Stage(role=role, ranks=ranks, layers=(layer, layer + count)))
        layer, rank = layer + count, rank + degree
    return tuple(stages)


@dataclass(frozen=True, slots=True)
class _Point:
    """One working point: time of a layer, and of the rest of a stage by flags; both by degree."""

    layer_s: np.ndarray
    rest_s: np.ndarray


class Dealer:
    """Deals a model's layers at the working points of a workload.

    The best deal depends on the working point, since embedding and head weigh more in decoding than in
    encoding; each deal that is best at one of them is a choice for the solver.
    """

    def __init__(
        self,
        serving: Serving,
        *,
        phases: Sequence[str] = ("decode", "encode"),
        points: Sequence[int] | None = None,
    ) -> None:
        self.num_layers = serving.model.num_hidden_layers
        self.degrees = serving.tables.degrees
        default = {"decode": DECODE_POINTS, "encode": ENCODE_POINTS}
        self.points = [_point(serving, phase, q) for phase in phases for q in points or default[phase]]

    def deals(self, degrees: Sequence[int]) -> list[tuple[int, ...]]:
        """Different deals for stages of these degrees; none if there are more stages than layers."""
        if len(degrees) > self.num_layers:
            return []
        last = len(degrees) - 1
        index = [self.degrees.index(degree) for degree in degrees]
        flags = [FIRST * (i == 0) + LAST * (i == last) + SENDS * (last > 0) for i in range(last + 1)]
        found: dict[tuple[int, ...], None] = {}
        for point in self.points:
            layer = [float(point.layer_s[d]) for d in index]
            rest = [float(point.rest_s[d, f]) for d, f in zip(index, flags, strict=True)]
            if np.isfinite(layer).all() and np.isfinite(rest).all():
                found[deal_layers(self.num_layers, layer, rest)] = None
        return list(found)


def _point(serving: Serving, phase: str, queries: float) -> _Point:
    """Stages of no layer and of one layer under every degree and flags."""
    count = len(serving.tables.degrees)
    degree, flags, layers = (a.ravel() for a in np.meshgrid(range(count), range(8), range(2), indexing="ij"))
    kinds = StageKinds(
        degree[None, :], layers[None, :].astype(np.float64), flags[None, :], np.ones((1, len(degree)))
    )
    q = np.asarray([float(queries)])
    # Beyond the profile times are infinite, and none of them is NaN; `deals` leaves such points out.
    with np.errstate(invalid="ignore"):
        if phase == "encode":
            times = serving.tables.encode_s(kinds, q)
        else:
            times = serving.tables.decode_s(kinds, q, q * serving.mean_context, q * serving.mean_input)
    table = times.reshape(count, 8, 2)
    return _Point(table[:, 0, 1] - table[:, 0, 0], table[..., 0])
