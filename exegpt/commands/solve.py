"""`command=solve`: the schedule with the highest throughput within the bounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from exegpt.commands.context import REPORT_FILE, SCHEDULE_FILE, Context
from exegpt.commands.pareto import add_frontier
from exegpt.commands.profile import load_profile, profile_record
from exegpt.commands.sizing import QUEUE_NOTE, size_cluster, size_note
from exegpt.errors import CapacityError, ConfigError
from exegpt.profiler.provenance import provenance_of, provenance_summary
from exegpt.profiler.table import ProfileTable
from exegpt.report.html import write_report
from exegpt.report.tables import frontier_table, sizing_table, solution_table
from exegpt.runner.progress import step_progress
from exegpt.schedule import RUNNABLE, Schedule, write_schedule
from exegpt.scheduler.solve import BASELINES, Problem
from exegpt.scheduler.solve import solve as search
from exegpt.settings import SolverSettings
from exegpt.specs import Policy

logger = logging.getLogger(__name__)


def _policies(wanted: Sequence[Policy], *, local: bool) -> tuple[Policy, ...]:
    """The policies that compete: on this machine's own workers, those that can be run."""
    if not local:
        return tuple(wanted)
    kept = tuple(policy for policy in wanted if policy in RUNNABLE)
    if not kept:
        raise ConfigError(
            f"solver.policies={[p.value for p in wanted]}: this machine's workers run "
            f"{[p.value for p in RUNNABLE]} only. Add one of them, or plan for another cluster"
        )
    left_out = [policy.value for policy in wanted if policy not in kept]
    if left_out:
        logger.info("policies that this release plans but does not run are left out: %s", ", ".join(left_out))
    return kept


def _num_replicas(solver: SolverSettings, *, local: bool) -> tuple[int, ...] | None:
    """Replicas that may be chosen: one for this machine, whose workers run the answer as one group."""
    if not local:
        return solver.num_replicas
    if solver.num_replicas not in (None, (1,)):
        raise ConfigError(
            f"solver.num_replicas={list(solver.num_replicas or ())}: this machine's workers are one group; "
            "allowed are [1] and null, or plan for another cluster"
        )
    return (1,)


def _partial_tp(solver: SolverSettings, *, local: bool) -> bool:
    """Whether stages may differ in degree; those of this machine's workers may not."""
    if local and solver.partial_tp:
        raise ConfigError(
            "solver.partial_tp=true: this machine's workers run stages of one degree; allowed are false and "
            "null, or plan for another cluster"
        )
    return not local if solver.partial_tp is None else solver.partial_tp


def make_problem(context: Context, table: ProfileTable) -> Problem:
    """The job's planning problem."""
    job, local = context.job, context.cluster.is_local
    return Problem(
        model=job.model,
        profile=table,
        cluster=context.cluster,
        lengths=context.inputs.lengths,
        bound=job.bound,
        bound_quantile=job.bound_quantile,
        policies=_policies(job.solver.policies, local=local),
        baselines=(Policy.STATIC,) if local else BASELINES,
        counting=job.solver.counting,
        method=job.solver.name,
        latency_tolerance=job.solver.latency_tolerance or 0.0,
        throughput_tolerance=job.solver.throughput_tolerance or 0.0,
        page_size=job.runner.page_size,
        max_encode_batch_size=job.solver.max_encode_batch_size,
        max_decode_iterations=job.solver.max_decode_iterations,
        num_micro_batches=job.solver.num_micro_batches,
        tp_sizes=job.solver.tp_sizes,
        num_replicas=_num_replicas(job.solver, local=local),
        partial_tp=_partial_tp(job.solver, local=local),
        confidence=job.solver.confidence,
        drift_margin=job.solver.drift_margin,
    )


def find_schedule(context: Context, problem: Problem) -> tuple[Schedule | None, dict[str, Any]]:
    """Solve; the schedule (written to schedule.yaml), or None, and the `solve` record."""
    try:
        with step_progress("searching") as report:
            solution = search(problem, report=report, beside=True)
    except CapacityError as error:
        return None, _unplaceable(error)
    schedule = solution.schedule()
    if schedule is not None:
        write_schedule(schedule, context.output_dir / SCHEDULE_FILE)
    return schedule, _with_provenance(solution.record(), problem.profile)


def _with_provenance(record: dict[str, Any], table: ProfileTable) -> dict[str, Any]:
    notes = [*record.get("notes", ()), *provenance_summary(table)]
    return {**record, "notes": notes, "provenance": provenance_of(table)}


def _find_sized_schedule(context: Context, problem: Problem) -> dict[str, Any]:
    """The `solve` record of the fewest GPUs that hold the rate, or that of what comes closest to it."""
    try:
        sizing = size_cluster(context, problem)
    except CapacityError as error:
        return _unplaceable(error)
    if sizing.chosen is not None:
        _, record = find_schedule(context, sizing.chosen.problem)
        notes = [size_note(sizing.chosen.problem.cluster), QUEUE_NOTE, *record["notes"]]
        return {**record, "sizing": sizing.record(), "notes": notes}
    closest = sizing.greatest
    record = {} if closest.solution is None else closest.solution.record()
    record = {**record, **_unplaceable(CapacityError(sizing.reason())), "sizing": sizing.record()}
    return _with_provenance(record, closest.problem.profile)


def _unplaceable(error: CapacityError) -> dict[str, Any]:
    """A `solve` record without any schedule: the model fits nowhere, which is an answer and no fault."""
    return {"status": "infeasible", "reason": str(error), "policies": {}, "baselines": {}}


def solve(context: Context) -> None:
    """Solve, print the comparison, write schedule.yaml, result.json and report.html."""
    context.check_files(weights=False)
    started = time.perf_counter()
    table, path = load_profile(context)
    sections = {"profile": profile_record(table, path, time.perf_counter() - started)}
    problem = make_problem(context, table)
    if context.job.solver.rate_per_s is None:
        _, record = find_schedule(context, problem)
    else:
        record = _find_sized_schedule(context, problem)
    if context.job.solver.pareto is not None:
        record = add_frontier(context, problem, record)
    result = context.write(record["status"], {**context.describe(), **sections, "solve": record})
    solution_table(record, context.console)
    sizing_table(record, context.console)
    frontier_table(record, context.console)
    write_report(
        context.output_dir / REPORT_FILE,
        result,
        planned_output_pmf=context.inputs.lengths.output_pmf.tolist(),
    )
