"""What stops the best candidate: the constraint that the next larger batch breaks, and ranges that bind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exegpt.schedule import SIDED_POLICIES
from exegpt.scheduler.candidates import Constraints, Evaluate
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.scheduler.space import PolicySpace
from exegpt.simulator.choice import Choice, Estimates, constraint_values
from exegpt.specs import Policy

MORE_MEMORY = 1.1
# Less is rounding, or a step of the pool sizes that are looked up.
NOTABLE = 1.001


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBatch:
    """The best candidate with the next larger batch, all else equal.

    Attributes
    ----------
    batch : int
    throughput_per_s : float
        Zero beyond the profile.
    breaks : mapping of str to (float, float)
        Value and limit of each constraint that it breaks; of `profile` nothing is known, both are NaN.
    roomier_per_s : float, optional
        Throughput of the best candidate itself with a tenth more memory, where its decode pool is as large
        as memory lets it be and not a knob; None if that is no more, or does not apply.
    """

    batch: int
    throughput_per_s: float
    breaks: Mapping[str, tuple[float, float]]
    roomier_per_s: float | None = None

    def record(self) -> dict[str, Any]:
        """Under the names of result.json."""
        return {
            "batch": self.batch,
            "throughput_per_s": self.throughput_per_s,
            "throughput_with_more_memory_per_s": self.roomier_per_s,
            "breaks": {
                name: {"value": None, "limit": None}
                if math.isnan(value)
                else {"value": value, "limit": limit}
                for name, (value, limit) in self.breaks.items()
            },
        }


def next_batch(space: PolicySpace, best: Best, estimate: Evaluate, constraints: Constraints) -> NextBatch:
    """The neighbour of `best` with one step more of batch, whether it is searched or not."""
    batch = best.batch + int(space.step[space.choices.index(best.choice)])
    e = _one(estimate, best.choice, batch, best.extent)
    met, limits, values = constraints.met(e), constraints.limits(), constraint_values(e)
    if not met["profile"][0]:
        return NextBatch(batch=batch, throughput_per_s=0.0, breaks={"profile": (math.nan, math.nan)})
    return NextBatch(
        batch=batch,
        throughput_per_s=float(e.throughput_per_s[0]),
        breaks={name: (float(values[name][0]), float(limits[name])) for name in limits if not met[name][0]},
    )


def roomier_per_s(problem: Problem, best: Best) -> float | None:
    """`NextBatch.roomier_per_s`: only policies with two sides size a pool by memory."""
    if best.choice.policy not in SIDED_POLICIES:
        return None
    more = replace(problem.cluster, memory_bytes=int(MORE_MEMORY * problem.cluster.memory_bytes))
    e = _one(replace(problem, cluster=more).steady().estimate, best.choice, best.batch, best.extent)
    rate = float(e.throughput_per_s[0])
    return rate if rate > NOTABLE * best.throughput_per_s else None


def binding_ranges(
    problem: Problem,
    space: PolicySpace,
    best: Best,
    further: NextBatch,
    estimate: Evaluate,
    constraints: Constraints,
) -> tuple[str, ...]:
    """Search ranges that the best candidate lies at the edge of, in words."""
    found = [
        _batch_range(problem, best, further),
        _extent_range(problem, space, best),
        _micro_batch_range(space, best, estimate, constraints),
    ]
    return tuple(text for text in found if text is not None)


def _batch_range(problem: Problem, best: Best, further: NextBatch) -> str | None:
    most = problem.max_encode_batch_size
    if most is not None and further.batch > most:
        return (
            f"encode_batch_size={best.batch} is the largest searched, limited by solver.max_encode_batch_size"
        )
    if "profile" in further.breaks:
        return (
            f"encode_batch_size={best.batch}: a larger one needs batches or contexts beyond the profile "
            "(raise profile.budget_s)"
        )
    return None


def _extent_range(problem: Problem, space: PolicySpace, best: Best) -> str | None:
    """The edge of the second knob; RRA's largest N_D covers the longest output unless it is limited."""
    last = int(space.extents[-1])
    if best.choice.policy is Policy.CHUNKED and best.extent in (int(space.extents[0]), last):
        edge = "largest" if best.extent == last else "least"
        return f"token_budget={best.extent} is the {edge} searched; of {space.extents.tolist()}"
    if best.choice.policy is Policy.RRA and best.extent == last == problem.max_decode_iterations:
        return f"decode_iterations={last} is the most searched, limited by solver.max_decode_iterations"
    return None


def _micro_batch_range(
    space: PolicySpace, best: Best, estimate: Evaluate, constraints: Constraints
) -> str | None:
    """Numbers of micro-batches are a list; its end binds where twice as many would be better."""
    count = best.choice.num_micro_batches
    searched = {c.num_micro_batches for c in space.choices if c.stages == best.choice.stages}
    if count < max(searched) or best.choice.encode_micro_batches is not None:
        return None
    e = _one(estimate, replace(best.choice, num_micro_batches=2 * count), best.batch, best.extent)
    feasible = all(ok[0] for ok in constraints.met(e).values())
    if 2 * count > best.batch or not feasible or e.throughput_per_s[0] <= best.throughput_per_s:
        return None
    return (
        f"num_micro_batches={count} is the most searched for this pipeline; with {2 * count} it would serve "
        f"{e.throughput_per_s[0]:.3g} seq/s (add it to solver.num_micro_batches)"
    )


def _one(estimate: Evaluate, choice: Choice, batch: int, extent: int) -> Estimates:
    return estimate(choice, np.asarray([batch]), np.asarray([extent]))
