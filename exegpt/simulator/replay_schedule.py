"""Replay of a whole schedule: its policy, pipelines, memory and replicas.

Replicas share nothing, so each is replayed by itself with its part of the requests, which are dealt in turn
in the order of their arrival, as a round-robin router would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.events import RequestRecord, StageEvent
from exegpt.policies import make_policy
from exegpt.policies.waa import make_sides
from exegpt.profiler.table import ProfileTable
from exegpt.schedule import SIDED_POLICIES, Schedule
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.memory import num_kv_pages
from exegpt.simulator.planned import encode_tokens_at_once
from exegpt.simulator.replay import ReplayResult, replay
from exegpt.simulator.replay_sides import replay_sides
from exegpt.simulator.transfer import make_transfer
from exegpt.specs import ModelSpec
from exegpt.workload.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a schedule is replayed on.

    Attributes
    ----------
    model : ModelSpec
    profile : ProfileTable
    memory_bytes : int
        Of a GPU.
    page_size : int
        Tokens of a K/V page.
    mean_input_tokens : float
        Of the planned lengths; WAA weighs its encode batches with it.
    """

    model: ModelSpec
    profile: ProfileTable
    memory_bytes: int
    page_size: int
    mean_input_tokens: float


def replay_schedule(
    schedule: Schedule,
    deployment: Deployment,
    requests: Sequence[Request],
    *,
    report: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay requests of known output lengths under a schedule.

    Parameters
    ----------
    schedule : Schedule
    deployment : Deployment
    requests : sequence of Request
        Each with `forced_output_tokens`, or running to `max_output_tokens`.
    report : callable, optional
        Called with the number of finished requests whenever it may have risen.

    Returns
    -------
    ReplayResult
        Records of all requests by id; events of all replicas, whose ranks follow each other.

    Raises
    ------
    CapacityError
        If nothing is left for K/V beside weights and activations.
    ProfileRangeError
        If a batch or context outgrows the profile.
    """
    records: list[RequestRecord] = []
    events: list[StageEvent] = []
    for index, part in enumerate(deal(requests, schedule.num_replicas)):
        if not part:
            continue
        done = len(records)
        told = None if report is None else (lambda count, done=done: report(done + count))
        result = _replay_one(schedule, deployment, part, told)
        records += result.records
        events += _moved(result.events, index * schedule.num_ranks)
    return ReplayResult(sorted(records, key=lambda record: record.id), events)


def deal(requests: Sequence[Request], num_replicas: int) -> list[list[Request]]:
    """Each replica's requests: dealt in turn, in the order of arrival."""
    order = sorted(requests, key=lambda request: (request.arrival_s, request.id))
    return [order[index::num_replicas] for index in range(num_replicas)]


def num_pages(schedule: Schedule, deployment: Deployment, requests: Sequence[Request]) -> int:
    """K/V pages of a pipeline that encodes and decodes, per rank.

    What memory leaves room for, and no more than the requests could ever use.

    Raises
    ------
    CapacityError
        If nothing is left beside weights and activations.
    """
    knobs, page_size = schedule.knobs, deployment.page_size
    room = num_kv_pages(
        deployment.model,
        schedule.stages,
        deployment.profile.dtype,
        memory_bytes=deployment.memory_bytes,
        page_size=page_size,
        encode_tokens=encode_tokens_at_once(schedule, float(np.mean([r.input_tokens for r in requests]))),
        decode_queries=max(knobs.decode_batch_size, knobs.encode_batch_size) / knobs.num_micro_batches,
    )
    most = sum(-(-(r.input_tokens + r.max_output_tokens) // page_size) for r in requests)
    # The warm-up before a run needs a page per micro-batch.
    return min(room, most + knobs.num_micro_batches)


def _replay_one(
    schedule: Schedule,
    deployment: Deployment,
    requests: Sequence[Request],
    report: Callable[[int], None] | None,
) -> ReplayResult:
    if schedule.policy in SIDED_POLICIES:
        return _replay_sides(schedule, deployment, requests, report)
    return replay(
        make_policy(schedule),
        StageCosts(deployment.profile, deployment.model, stage_shapes(schedule.stages)),
        requests,
        num_micro_batches=schedule.knobs.num_micro_batches,
        num_pages=num_pages(schedule, deployment, requests),
        page_size=deployment.page_size,
        first_token_at_encoding=not deployment.model.is_encoder_decoder,
        report=report,
    )


def _replay_sides(
    schedule: Schedule,
    deployment: Deployment,
    requests: Sequence[Request],
    report: Callable[[int], None] | None,
) -> ReplayResult:
    model, profile, knobs = deployment.model, deployment.profile, schedule.knobs
    encode, decode = schedule.stages_of("encode"), schedule.stages_of("decode")
    room = num_kv_pages(
        model,
        decode,
        profile.dtype,
        memory_bytes=deployment.memory_bytes,
        page_size=deployment.page_size,
        encode_tokens=0.0,
        decode_queries=knobs.decode_batch_size / knobs.num_micro_batches,
    )
    return replay_sides(
        make_sides(schedule, deployment.mean_input_tokens),
        StageCosts(profile, model, stage_shapes(encode)),
        StageCosts(profile, model, stage_shapes(decode)),
        make_transfer(profile, model, schedule.policy, encode, decode),
        requests,
        num_micro_batches=knobs.num_micro_batches,
        num_pages=room,
        page_size=deployment.page_size,
        num_encode_instances=knobs.num_encode_instances or 1,
        num_decode_instances=knobs.num_decode_instances or 1,
        report=report,
    )


def _moved(events: list[StageEvent], first_rank: int) -> list[StageEvent]:
    return [replace(event, rank=event.rank + first_rank) for event in events] if first_rank else events
