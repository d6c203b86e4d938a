"""Choices of policies whose encoding and decoding have GPUs of their own: WAA and DISAGGREGATED.

What is searched is stated here, since all combinations would be tens of thousands: each side's layers are
dealt for its own phase at one working point; in groups of more than `LARGEST_FREE_GROUP` GPUs splits go in
steps of half a node and every stage of a side has the same degree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from exegpt.schedule import Stage
from exegpt.scheduler.pipelines import Dealer, make_pipeline, shapes
from exegpt.simulator.choice import Choice
from exegpt.simulator.memory import stage_weight_bytes
from exegpt.specs import Policy

if TYPE_CHECKING:
    from exegpt.scheduler.space import Enumerator

LARGEST_FREE_GROUP = 16
# Working points, in queries of a micro-batch, at which a side's layers are dealt and its work is measured.
ENCODE_POINT, DECODE_POINT = 16, 64


class Sides:
    """What the choices of both sides are made from."""

    def __init__(self, enumerator: Enumerator) -> None:
        self.enumerator = enumerator
        self._encode = Dealer(enumerator.serving, phases=("encode",), points=(ENCODE_POINT,))
        self._decode = Dealer(enumerator.serving, phases=("decode",), points=(DECODE_POINT,))

    def pipelines(self, role: str, num_gpus: int, first_rank: int, *, free: bool) -> list[tuple[Stage, ...]]:
        """Pipelines of a side on `num_gpus` GPUs from `first_rank` on that hold its weights."""
        dealer = self._encode if role == "encode" else self._decode
        found = []
        for shape in shapes(num_gpus, self.enumerator.degrees):
            if not free and len(set(shape)) > 1:
                continue
            for counts in dealer.deals(shape):
                stages = make_pipeline(shape, counts, role=role, first_rank=first_rank)
                if self._inside_nodes(stages) and self._hold(stages):
                    found.append(stages)
        return found

    def _inside_nodes(self, stages: Sequence[Stage]) -> bool:
        node = self.enumerator.cluster.gpus_per_node
        return all(stage.ranks[0] // node == stage.ranks[-1] // node for stage in stages)

    def _hold(self, stages: tuple[Stage, ...]) -> bool:
        serving = self.enumerator.serving
        needed = stage_weight_bytes(serving.model, stages, serving.profile.dtype).max()
        return float(needed) < self.enumerator.cluster.memory_bytes

    def by_compute(self, num_gpus: int) -> int:
        """WAA_C: encode GPUs in proportion to measured work, round(N C_E / (C_E + C_D)) (paper, section 4.1).

        C_E and C_D are a layer's times per query, at degree 1 and the working points.
        """
        serving = self.enumerator.serving
        encode = float(self._encode.points[0].layer_s[0]) / ENCODE_POINT
        decode = float(self._decode.points[0].layer_s[0]) / DECODE_POINT * serving.completion.mean_iterations
        return min(max(round(num_gpus * encode / (encode + decode)), 1), num_gpus - 1)

    def by_memory(self, num_gpus: int) -> int:
        """WAA_M: the split at which all GPUs are equally full.

        K/V takes what weights leave, so every GPU is full: the encode side, which keeps none, has as many
        GPUs as its weights fill. Our reading: the paper gives no formula.
        """
        serving, memory = self.enumerator.serving, self.enumerator.cluster.memory_bytes
        stages = make_pipeline((1,), (serving.model.num_hidden_layers,), role="encode")
        weights = float(stage_weight_bytes(serving.model, stages, serving.profile.dtype).sum())
        return min(max(math.ceil(weights / memory), 1), num_gpus - 1)

    def splits(self, policy: Policy, num_gpus: int) -> list[int]:
        """Numbers of GPUs that encode."""
        if policy is Policy.WAA_C:
            return [self.by_compute(num_gpus)]
        if policy is Policy.WAA_M:
            return [self.by_memory(num_gpus)]
        if num_gpus <= LARGEST_FREE_GROUP:
            return list(range(1, num_gpus))
        step = max(self.enumerator.cluster.gpus_per_node // 2, 1)
        return list(range(step, num_gpus, step))


def waa_choices(enumerator: Enumerator, policy: Policy) -> list[Choice]:
    """Every group size, split of its GPUs, pipeline of either side, and number of decode micro-batches."""
    sides = Sides(enumerator)
    choices = []
    for group in enumerator.groups:
        if group < 2 or not enumerator.fits(group):
            continue
        free = group <= LARGEST_FREE_GROUP and enumerator.settings.partial_tp
        for split in sides.splits(policy, group):
            encoders = sides.pipelines("encode", split, 0, free=free)
            decoders = sides.pipelines("decode", group - split, split, free=free) if encoders else []
            choices += [
                Choice(
                    policy=policy,
                    stages=encode + decode,
                    num_micro_batches=m,
                    num_replicas=enumerator.cluster.num_gpus // group,
                )
                for encode in encoders
                for decode in decoders
                for m in enumerator.micro_batches(len(decode))
            ]
    return choices


def disaggregated_choices(enumerator: Enumerator) -> list[Choice]:
    """Instances of one degree each, pipelined only where a tensor-parallel group cannot hold the weights."""
    sides = Sides(enumerator)
    num_gpus = enumerator.cluster.num_gpus
    choices = []
    encoders, decoders = (list(_instances(sides, role)) for role in ("encode", "decode"))
    for encode in encoders:
        for decode in decoders:
            size = sum(s.tp_size for s in encode)
            for num_encode in range(1, num_gpus // size + 1):
                left = num_gpus - num_encode * size
                num_decode, rest = divmod(left, sum(s.tp_size for s in decode))
                if rest == 0 and num_decode > 0:
                    moved = make_pipeline(
                        [s.tp_size for s in decode],
                        [s.num_layers for s in decode],
                        role="decode",
                        first_rank=size,
                    )
                    choices += [
                        Choice(
                            policy=Policy.DISAGGREGATED,
                            stages=encode + moved,
                            num_micro_batches=m,
                            num_encode_instances=num_encode,
                            num_decode_instances=num_decode,
                        )
                        for m in sorted({1, len(decode)})
                    ]
    return choices


def _instances(sides: Sides, role: str) -> Iterator[tuple[Stage, ...]]:
    """For every degree the shortest pipeline that holds the weights of a side."""
    enumerator = sides.enumerator
    for degree in enumerator.degrees:
        for num_stages in range(1, enumerator.cluster.num_gpus // degree + 1):
            shape = (degree,) * num_stages
            found = [
                p for p in sides.pipelines(role, degree * num_stages, 0, free=False) if _shape(p) == shape
            ]
            if found:
                yield found[0]
                break


def _shape(stages: Sequence[Stage]) -> tuple[int, ...]:
    return tuple(stage.tp_size for stage in stages)
