"""A schedule replayed on other lengths than it was planned for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.events import RequestRecord
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.simulator.replay_schedule import Deployment, deal, replay_schedule
from exegpt.specs import Policy
from exegpt.workload.lengths import RequestLengths
from exegpt.workload.requests import Request, sample_requests

# Queries of one replica that are followed: at least so many, and so many encode batches.
LEAST_FOLLOWED, LEAST_BATCHES = 1200, 20
# Generations of the pool before: until queries that began together are out of step.
WARM_UP_GENERATIONS = 5
# Quantiles of the served outputs between which queries get the length of the bound's query.
PROBES = (0.98, 0.999)
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay measured in its steady state.

    `latency_s` is the mean of the bound's query; of STATIC, which is bound on the longest output planned,
    the worst of all queries that are no longer. `in_time` is the share of these queries within the bound.
    """

    throughput_per_s: float
    latency_s: float
    in_time: float


def replay_best(problem: Problem, best: Best, served: RequestLengths, bound_s: float) -> Replayed:
    """Serve requests drawn from `served` by a schedule of the problem."""
    lengths = problem.lengths
    schedule = best.schedule(problem.model.name, lengths.summary(), lengths.mean_output)
    deployment = Deployment(
        model=problem.model,
        profile=problem.profile,
        memory_bytes=problem.cluster.memory_bytes,
        page_size=problem.page_size,
        mean_input_tokens=lengths.mean_input,
    )
    is_static = best.choice.policy is Policy.STATIC
    wanted = lengths.max_output if is_static else lengths.output_percentile(problem.bound.length_percentile)
    pool = schedule.knobs.decode_batch_size
    warm_up = schedule.knobs.encode_batch_size if is_static else WARM_UP_GENERATIONS * pool
    after = pool * (1 if is_static else math.ceil(wanted / served.mean_output))
    followed = max(LEAST_FOLLOWED, LEAST_BATCHES * schedule.knobs.encode_batch_size)
    count = (warm_up + followed + after) * schedule.num_replicas
    requests = sample_requests(served, count, np.random.default_rng(SEED))
    if not is_static:
        requests = with_bound_length(requests, served, wanted)
    by_id = {r.id: r for r in replay_schedule(schedule, deployment, requests).records}
    parts = [[by_id[r.id] for r in part] for part in deal(requests, schedule.num_replicas)]
    return measured(parts, warm_up, wanted, bound_s, shorter_too=is_static)


def with_bound_length(
    requests: Sequence[Request], served: RequestLengths, output_tokens: int
) -> list[Request]:
    """The requests, those with outputs of about the 99th percentile having exactly the bound's length."""
    cdf = np.cumsum(served.output_pmf)
    low, high = (int(np.searchsorted(cdf, q)) for q in PROBES)
    return [
        replace(r, max_output_tokens=output_tokens, forced_output_tokens=output_tokens)
        if low <= r.max_output_tokens <= high
        else r
        for r in requests
    ]


def measured(
    parts: Sequence[Sequence[RequestRecord]],
    warm_up: int,
    output_tokens: int,
    bound_s: float,
    *,
    shorter_too: bool,
) -> Replayed:
    """Throughput of all replicas behind the warm-up, and latencies of queries of (at most) a length.

    While queries wait a replica is full, so the start of its last encode batch is before the drain.
    """
    rate, latencies = 0.0, []
    for records in parts:
        started = [(r, float(r.encode_start_s)) for r in records if r.encode_start_s is not None]
        starts = np.sort([start_s for _, start_s in started])
        first_s, last_s = float(starts[warm_up]), float(starts[-1])
        rate += float(((starts >= first_s) & (starts < last_s)).sum()) / (last_s - first_s)
        latencies += [
            r.finish_s - start_s
            for r, start_s in started
            if r.finish_s is not None and start_s >= first_s and r.finish_s <= last_s
            if r.output_tokens == output_tokens or (shorter_too and r.output_tokens < output_tokens)
        ]
    return Replayed(
        throughput_per_s=rate,
        latency_s=max(latencies) if shorter_too else float(np.mean(latencies)),
        in_time=float(np.mean(np.asarray(latencies) <= bound_s)),
    )
