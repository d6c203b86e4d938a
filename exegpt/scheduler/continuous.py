"""Choices of the baselines: hybrid static batches, continuous batching, split prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from exegpt.scheduler.pipelines import make_pipeline
from exegpt.simulator.choice import Choice
from exegpt.simulator.forms.iteration import joining_limit
from exegpt.specs import Policy

if TYPE_CHECKING:
    from exegpt.scheduler.result import Best
    from exegpt.scheduler.space import Enumerator

# Tokens of an iteration that are searched: Sarathi-Serve's own range and what lies around it.
TOKEN_BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Slots of a micro-batch are searched in these steps. Our choice: with a budget, in steps of four as static
# batches are; the second knob already has seven values, and slots beyond what the budget feeds do nothing.
SLOT_STEPS: Mapping[Policy, int] = {Policy.ITERATION: 1, Policy.CHUNKED: 4}
# Encode micro-batches that are searched, per stage.
ENCODE_PARTS = (1, 2, 4)


def static_hybrid_choices(enumerator: Enumerator) -> list[Choice]:
    """The pipelines of STATIC, decoding in one micro-batch or one per stage, encoding in more."""
    cluster, degree = enumerator.cluster, enumerator.degrees[-1]
    num_stages = cluster.num_gpus // degree
    shape = (degree,) * num_stages
    return [
        Choice(
            policy=Policy.STATIC_HYBRID,
            stages=make_pipeline(shape, counts),
            num_micro_batches=m,
            encode_micro_batches=num_stages * parts,
        )
        for counts in enumerator.dealer.deals(shape)
        for m in sorted({1, num_stages})
        for parts in ENCODE_PARTS
        if num_stages * parts > m
    ]


def iteration_choices(enumerator: Enumerator) -> list[Choice]:
    """Every tensor-parallel degree on every group size, pipelined over the rest of the group."""
    return _pipelined(enumerator, Policy.ITERATION)


def chunked_choices(enumerator: Enumerator) -> list[Choice]:
    """As ITERATION; none for encoder-decoder models, whose prompts cannot be split."""
    if enumerator.serving.model.is_encoder_decoder:
        return []
    return _pipelined(enumerator, Policy.CHUNKED)


def _pipelined(enumerator: Enumerator, policy: Policy) -> list[Choice]:
    choices = []
    for group in enumerator.groups:
        if not enumerator.fits(group):
            continue
        for degree in enumerator.degrees:
            if group % degree:
                continue
            shape = (degree,) * (group // degree)
            choices += [
                Choice(
                    policy=policy,
                    stages=make_pipeline(shape, counts),
                    num_micro_batches=m,
                    num_replicas=enumerator.cluster.num_gpus // group,
                )
                for counts in enumerator.dealer.deals(shape)
                for m in enumerator.micro_batches(len(shape))
            ]
    return choices


def continuous_knobs(best: Best) -> dict[str, int]:
    """Knobs of these policies that differ from RRA's; empty for others."""
    choice, slots = best.choice, best.batch
    match choice.policy:
        case Policy.STATIC_HYBRID:
            assert choice.encode_micro_batches is not None
            return {"encode_micro_batches": choice.encode_micro_batches}
        case Policy.ITERATION:
            return {"encode_batch_size": most_joining(best), "decode_batch_size": slots}
        case Policy.CHUNKED:
            return {"decode_batch_size": slots, "token_budget": best.extent}
    return {}


def most_joining(best: Best) -> int:
    """Most prompts that join a micro-batch in a turn of ITERATION, from the rate and length of turns."""
    choice = best.choice
    slots = best.batch / choice.num_micro_batches
    mean = best.throughput_per_s / choice.num_replicas * best.tpot_s / choice.num_micro_batches
    # Without time between tokens every query ends with its turn.
    return int(joining_limit(np.float64(slots), np.float64(mean if best.tpot_s else slots)))
