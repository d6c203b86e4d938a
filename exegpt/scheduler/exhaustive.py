"""Exhaustive search: every candidate of every choice is evaluated. The oracle of the other searches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from exegpt.scheduler.branch_and_bound import Found
from exegpt.scheduler.candidates import Constraints, Evaluate, Tally
from exegpt.scheduler.result import Best
from exegpt.scheduler.space import PolicySpace


def search(
    space: PolicySpace,
    evaluate: Evaluate,
    constraints: Constraints,
    *,
    report: Callable[[int], None] | None = None,
) -> Found:
    """Evaluate all of a policy's space and return the candidate with the highest throughput.

    `report` is called with the number of candidates evaluated so far.
    """
    best: Best | None = None
    tally = Tally()
    count = 0
    for index, choice in enumerate(space.choices):
        batches = space.batches(index)
        if not len(batches):
            continue
        for extent in space.extents.tolist():
            extents = np.full(len(batches), extent)
            estimates = evaluate(choice, batches, extents)
            best = tally.take_best(best, choice, batches, extents, estimates, constraints)
            count += len(batches)
            if report is not None:
                report(count)
    return Found(best=best, tally=tally, num_evaluations=count)
