"""`command=simulate`, and the prediction that a run is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from exegpt.commands.context import REPORT_FILE, TRACE_FILE, Context
from exegpt.commands.inputs import predicted_requests
from exegpt.commands.profile import load_profile, profile_record
from exegpt.policies import make_policy
from exegpt.policies.waa import make_sides
from exegpt.profiler.table import ProfileTable
from exegpt.report.html import write_report
from exegpt.report.result_file import summarise_run
from exegpt.report.tables import simulate_table
from exegpt.report.timeline import write_trace
from exegpt.schedule import SIDED_POLICIES, Schedule, read_schedule
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.memory import num_kv_pages
from exegpt.simulator.planned import candidate_of, encode_tokens_at_once
from exegpt.simulator.replay import ReplayResult, replay
from exegpt.simulator.replay_sides import replay_sides
from exegpt.simulator.steady import SteadyState, estimate_one
from exegpt.simulator.transfer import make_transfer
from exegpt.workload.requests import Request


def load_schedule(context: Context) -> Schedule:
    """The schedule named by the job, checked against model and cluster."""
    path = context.job.schedule
    assert path is not None
    schedule = read_schedule(path)
    schedule.check(context.job.model, num_ranks=context.cluster.num_gpus, source=f"schedule={path}")
    return schedule


def kv_pages(context: Context, schedule: Schedule, requests: Sequence[Request]) -> int:
    """K/V pages per rank: what memory leaves room for, and no more than the requests could ever use.

    Raises
    ------
    CapacityError
        If nothing is left beside weights and activations.
    """
    job, knobs = context.job, schedule.knobs
    lengths = sorted((r.input_tokens for r in requests), reverse=True)
    room = num_kv_pages(
        job.model,
        schedule.stages,
        context.dtype,
        memory_bytes=context.cluster.memory_bytes,
        page_size=job.runner.page_size,
        encode_tokens=encode_tokens_at_once(schedule, float(np.mean(lengths))),
        decode_queries=max(knobs.decode_batch_size, knobs.encode_batch_size) / knobs.num_micro_batches,
    )
    most = sum(-(-(r.input_tokens + r.max_output_tokens) // job.runner.page_size) for r in requests)
    # The warm-up before a run needs a page per micro-batch.
    return min(room, most + knobs.num_micro_batches)


def replay_requests(
    context: Context, schedule: Schedule, table: ProfileTable, requests: Sequence[Request]
) -> ReplayResult:
    """Replay requests of known output lengths under a schedule."""
    if schedule.policy in SIDED_POLICIES:
        return _replay_sides(context, schedule, table, requests)
    return replay(
        make_policy(schedule),
        StageCosts(table, context.job.model, stage_shapes(schedule.stages)),
        requests,
        num_micro_batches=schedule.knobs.num_micro_batches,
        num_pages=kv_pages(context, schedule, requests),
        page_size=context.job.runner.page_size,
        first_token_at_encoding=not context.job.model.is_encoder_decoder,
    )


def _replay_sides(
    context: Context, schedule: Schedule, table: ProfileTable, requests: Sequence[Request]
) -> ReplayResult:
    model, knobs, page_size = context.job.model, schedule.knobs, context.job.runner.page_size
    encode, decode = schedule.stages_of("encode"), schedule.stages_of("decode")
    room = num_kv_pages(
        model,
        decode,
        context.dtype,
        memory_bytes=context.cluster.memory_bytes,
        page_size=page_size,
        encode_tokens=0.0,
        decode_queries=knobs.decode_batch_size / knobs.num_micro_batches,
    )
    return replay_sides(
        make_sides(schedule, context.inputs.lengths.mean_input),
        StageCosts(table, model, stage_shapes(encode)),
        StageCosts(table, model, stage_shapes(decode)),
        make_transfer(table, model, schedule.policy, encode, decode),
        requests,
        num_micro_batches=knobs.num_micro_batches,
        num_pages=room,
        page_size=page_size,
        num_encode_instances=knobs.num_encode_instances or 1,
        num_decode_instances=knobs.num_decode_instances or 1,
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
    replayed = replay_requests(context, schedule, table, requests)
    record: dict[str, Any] = {
        "steady": steady_state(context, schedule, table),
        "replay": summarise_run(replayed.records, replayed.events),
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
