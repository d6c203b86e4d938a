"""A schedule as the closed forms take it."""

from __future__ import annotations

from exegpt.schedule import Schedule
from exegpt.simulator.choice import Choice
from exegpt.specs import Policy


def candidate_of(schedule: Schedule) -> tuple[Choice, int, int]:
    """Choice, batch and extent of a schedule; see `Choice`."""
    knobs = schedule.knobs
    choice = Choice(
        policy=schedule.policy,
        stages=schedule.stages,
        num_micro_batches=knobs.num_micro_batches,
        num_replicas=schedule.num_replicas,
        encode_micro_batches=knobs.encode_micro_batches,
        num_encode_instances=knobs.num_encode_instances or 1,
        num_decode_instances=knobs.num_decode_instances or 1,
    )
    match schedule.policy:
        case Policy.ITERATION:
            return choice, knobs.decode_batch_size, 1
        case Policy.CHUNKED:
            return choice, knobs.decode_batch_size, knobs.token_budget or 1
    return choice, knobs.encode_batch_size, knobs.decode_iterations


def encode_tokens_at_once(schedule: Schedule, mean_input: float) -> float:
    """Prompt tokens of the largest encode micro-batch, for mean prompts."""
    knobs = schedule.knobs
    match schedule.policy:
        case Policy.ITERATION:
            return mean_input * knobs.encode_batch_size
        case Policy.CHUNKED:
            return float(knobs.token_budget or 1)
    parts = knobs.encode_micro_batches or knobs.num_micro_batches
    return mean_input * -(-knobs.encode_batch_size // parts)
