"""`command=solve solver.pareto=N`: the frontier of throughput and latency beside the answer."""

from __future__ import annotations

import math
from typing import Any

from exegpt.commands.context import Context
from exegpt.errors import CapacityError
from exegpt.report.pareto import write_frontier
from exegpt.runner.progress import step_progress
from exegpt.scheduler.frontier import find_frontier
from exegpt.scheduler.problem import Problem

PARETO_FILE = "pareto.png"


def add_frontier(context: Context, problem: Problem, record: dict[str, Any]) -> dict[str, Any]:
    """The `solve` record with its frontier, which is also plotted to pareto.png.

    The frontier ranges over all latency bounds, whatever the job's own; its other bounds hold everywhere.
    """
    num_bounds = context.job.solver.pareto
    assert num_bounds is not None
    try:
        with step_progress("frontier, bounds") as report:
            frontier = find_frontier(
                problem, num_bounds, also_s=record.get("latency_bound_s") or math.inf, report=report
            )
    except CapacityError:
        # The record says already that the model fits nowhere.
        return {**record, "frontier": []}
    found = {**record, **frontier.record(problem)}
    write_frontier(found, context.output_dir / PARETO_FILE)
    return found
