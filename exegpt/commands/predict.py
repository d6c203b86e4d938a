"""`command=simulate`, and the prediction that a run is compared with."""

from __future__ import annotations

from typing import Any

from exegpt.commands.context import REPORT_FILE, TRACE_FILE, Context
from exegpt.commands.inputs import predicted_requests
from exegpt.commands.profile import load_profile, profile_record
from exegpt.profiler.table import ProfileTable
from exegpt.report.html import write_report
from exegpt.report.result_file import summarise_run
from exegpt.report.tables import simulate_table
from exegpt.report.timeline import write_trace
from exegpt.schedule import Schedule, read_schedule
from exegpt.settings import Command
from exegpt.simulator.planned import candidate_of
from exegpt.simulator.replay_schedule import Deployment, replay_schedule
from exegpt.simulator.steady import SteadyState, estimate_one


def load_schedule(context: Context) -> Schedule:
    """The schedule named by the job, checked against model and cluster; to run, if workers can run it."""
    path = context.job.schedule
    assert path is not None
    schedule = read_schedule(path)
    if context.job.command is Command.run:
        schedule.require_runnable(f"schedule={path}")
    schedule.check(context.job.model, num_ranks=context.cluster.num_gpus, source=f"schedule={path}")
    return schedule


def deployment(context: Context, table: ProfileTable) -> Deployment:
    """What the job's schedule is replayed on."""
    return Deployment(
        model=context.job.model,
        profile=table,
        memory_bytes=context.cluster.memory_bytes,
        page_size=context.job.runner.page_size,
        mean_input_tokens=context.inputs.lengths.mean_input,
    )


def steady_state(context: Context, schedule: Schedule, table: ProfileTable) -> dict[str, float]:
    """Closed-form estimates of a schedule."""
    job = context.job
    steady = SteadyState(
        job.model,
        table,
        context.inputs.lengths,
        counting=job.solver.counting,
        length_percentile=job.bound.length_percentile,
        page_size=job.runner.page_size,
        memory_bytes=context.cluster.memory_bytes,
    )
    return dict(estimate_one(steady, *candidate_of(schedule)))


def simulate(context: Context) -> None:
    """Predict the schedule in closed form and by replay, print both, write result.json and report.html."""
    schedule = load_schedule(context)
    context.check_files(weights=False)
    table, path = load_profile(context)
    requests = predicted_requests(context.inputs, context.job.seed)
    replayed = replay_schedule(schedule, deployment(context, table), requests)
    record: dict[str, Any] = {
        "steady": steady_state(context, schedule, table),
        "replay": {
            **summarise_run(replayed.records, replayed.events),
            "num_replicas": schedule.num_replicas,
        },
    }
    result = context.write(
        "ok", {**context.describe(), "profile": profile_record(table, path, 0.0), "simulate": record}
    )
    simulate_table(record, context.console)
    write_trace(replayed.events, context.output_dir / TRACE_FILE)
    write_report(
        context.output_dir / REPORT_FILE,
        result,
        events=replayed.events,
        records=replayed.records,
        planned_output_pmf=context.inputs.lengths.output_pmf.tolist(),
    )
