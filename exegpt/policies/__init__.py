"""Scheduling policies: pure state machines that decide what comes next."""

from exegpt.policies.base import PolicyMachine
from exegpt.policies.rra import RRA
from exegpt.policies.static import Static
from exegpt.schedule import Schedule
from exegpt.specs import Policy


def make_policy(schedule: Schedule) -> PolicyMachine:
    """The policy that a schedule names, with its knobs."""
    match schedule.policy:
        case Policy.RRA:
            return RRA(schedule.knobs.encode_batch_size, schedule.knobs.decode_iterations)
        case Policy.STATIC:
            return Static(schedule.knobs.encode_batch_size)
