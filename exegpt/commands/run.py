"""`command=run`: execute a schedule on the ranks and compare with what was predicted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exegpt.commands.context import REPORT_FILE, SCHEDULE_FILE, TRACE_FILE, Context
from exegpt.commands.inputs import predicted_requests
from exegpt.commands.predict import deployment, load_schedule, steady_state
from exegpt.commands.profile import load_profile, profile_record
from exegpt.errors import LaunchError, ProfileRangeError
from exegpt.events import RequestRecord, StageEvent
from exegpt.profiler.table import ProfileTable
from exegpt.report.html import write_report
from exegpt.report.result_file import relative_errors, summarise_run
from exegpt.report.tables import run_table
from exegpt.report.timeline import write_trace
from exegpt.runner.job import RunJob, write_job
from exegpt.runner.launcher import launch
from exegpt.runner.worker_files import MEASURED_FILE, REQUESTS_FILE
from exegpt.schedule import Schedule, write_schedule
from exegpt.simulator.replay import ReplayResult
from exegpt.simulator.replay_schedule import num_pages, replay_schedule
from exegpt.workload.requests import Request, with_probes

WORKER_MODULE = "exegpt.runner.worker"


def make_requests(context: Context) -> tuple[tuple[Request, ...], frozenset[int]]:
    """The job's requests with its probes among them, and the probes' ids."""
    inputs, job = context.inputs, context.job
    if not job.runner.num_probes:
        return inputs.requests, frozenset()
    length = inputs.lengths.output_percentile(job.bound.length_percentile)
    rng = np.random.default_rng(job.seed)
    requests = tuple(with_probes(inputs.requests, job.runner.num_probes, length, rng))
    # Only probes differ from the requests they stand for.
    changed = (new.id for new, old in zip(requests, inputs.requests, strict=True) if new is not old)
    return requests, frozenset(changed)


def make_run_job(
    context: Context, schedule: Schedule, table: ProfileTable, requests: Sequence[Request]
) -> RunJob:
    """Everything the ranks need."""
    job = context.job
    return RunJob(
        model=job.model,
        schedule=schedule,
        weights=job.weights,
        cache_dir=job.profile.cache_dir,
        seed=job.seed,
        dtype=context.dtype,
        sampling=job.runner.sampling,
        num_pages=num_pages(schedule, deployment(context, table), requests),
        page_size=job.runner.page_size,
        max_rows=len(requests) + schedule.knobs.num_micro_batches,
        num_threads=context.num_threads,
        eos_token_ids=context.inputs.eos_token_ids,
        requests=tuple(requests),
        output_dir=context.output_dir,
    )


def execute(context: Context, run_job: RunJob) -> None:
    """Run a job on ranks started by the DeepSpeed launcher."""
    handed = context.output_dir / "run.pkl"
    (context.output_dir / REQUESTS_FILE).unlink(missing_ok=True)
    write_job(run_job, handed)
    try:
        launch(
            WORKER_MODULE,
            [str(handed)],
            num_ranks=run_job.schedule.num_ranks,
            output_dir=context.output_dir,
            num_threads=context.num_threads,
            num_nodes=context.cluster.num_nodes,
            device_type=context.cluster.device_type,
            hostfile=context.job.runner.hostfile,
        )
    finally:
        handed.unlink(missing_ok=True)


def read_measured(output_dir: Path) -> tuple[list[RequestRecord], list[StageEvent]]:
    """Records and events that rank 0 wrote at the end of a run."""
    path = output_dir / MEASURED_FILE
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise LaunchError(f"the ranks ended without {path}: {error}") from error
    return [RequestRecord(**r) for r in data["records"]], [StageEvent(**e) for e in data["events"]]


def _run_record(
    context: Context,
    predicted: ReplayResult,
    records: Sequence[RequestRecord],
    events: Sequence[StageEvent],
    probes: frozenset[int],
) -> dict[str, Any]:
    measured = summarise_run(records, events, bound_length_ids=probes)
    before = summarise_run(predicted.records, predicted.events, bound_length_ids=probes)
    return {**measured, "predicted": before, "error": relative_errors(before, measured)}


Execute = Callable[[RunJob], None]


def run_schedule(
    context: Context,
    schedule: Schedule,
    table: ProfileTable,
    execute_on: Execute,
    *,
    sections: dict[str, Any] | None = None,
) -> None:
    """Predict, run, compare; write result.json, trace.json and report.html and print the table."""
    requests, probes = make_requests(context)
    inputs = replace(context.inputs, requests=requests)
    expected = predicted_requests(inputs, context.job.seed)
    predicted = replay_schedule(schedule, deployment(context, table), expected)
    steady: dict[str, Any]
    try:
        steady = steady_state(context, schedule, table)
    except ProfileRangeError as error:
        # A hand-edited schedule may lie outside the profile in its steady state and still finish.
        steady = {"infeasible": str(error)}
    write_schedule(schedule, context.output_dir / SCHEDULE_FILE)
    execute_on(make_run_job(context, schedule, table, requests))
    records, events = read_measured(context.output_dir)
    record = _run_record(context, predicted, records, events, probes)
    result = context.write("ok", {**context.describe(), **(sections or {}), "steady": steady, "run": record})
    run_table(record, context.console)
    write_trace(events, context.output_dir / TRACE_FILE)
    write_report(
        context.output_dir / REPORT_FILE,
        result,
        events=events,
        records=records,
        predicted_events=predicted.events,
        predicted_records=predicted.records,
        planned_output_pmf=context.inputs.lengths.output_pmf.tolist(),
    )
    context.console.print(f"answers: {context.output_dir / REQUESTS_FILE}")
    context.console.print(f"report:  {context.output_dir / REPORT_FILE}")


def run(context: Context) -> None:
    """Execute the schedule named by the job."""
    context.job.model.require_runnable()
    context.require_devices("command=run")
    schedule = load_schedule(context)
    context.check_files(weights=True)
    table, path = load_profile(context)
    sections = {"profile": profile_record(table, path, 0.0)}
    run_schedule(context, schedule, table, lambda job: execute(context, job), sections=sections)


def is_launched() -> bool:
    """Whether the DeepSpeed launcher started this process as one of its ranks."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
