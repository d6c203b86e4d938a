"""Scheduling policies: pure state machines that decide what comes next."""

from exegpt.errors import ConfigError
from exegpt.policies.base import PolicyMachine, TurnMachine
from exegpt.policies.chunked import Chunked
from exegpt.policies.iteration import Iteration
from exegpt.policies.rra import RRA
from exegpt.policies.static import Static
from exegpt.policies.static_hybrid import StaticHybrid
from exegpt.schedule import Schedule
from exegpt.specs import Policy


def make_policy(schedule: Schedule) -> PolicyMachine | TurnMachine:
    """The policy that a schedule names, with its knobs."""
    knobs = schedule.knobs
    match schedule.policy:
        case Policy.RRA:
            return RRA(knobs.encode_batch_size, knobs.decode_iterations)
        case Policy.STATIC:
            return Static(knobs.encode_batch_size)
        case Policy.STATIC_HYBRID:
            return StaticHybrid(
                knobs.encode_batch_size, _needed("encode_micro_batches", knobs.encode_micro_batches)
            )
        case Policy.ITERATION:
            return Iteration(knobs.decode_batch_size, knobs.encode_batch_size)
        case Policy.CHUNKED:
            return Chunked(knobs.decode_batch_size, _needed("token_budget", knobs.token_budget))
        case policy:
            raise ConfigError(f"schedule: policy={policy.value} has no machine; solve for another policy")


def _needed(name: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"schedule: knobs.{name} is missing, which the policy needs; solve again")
    return value
