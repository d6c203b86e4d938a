"""What a replay of a case says, over several samples of requests, beside its closed form."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agree.cases import Case
from exegpt.events import RequestRecord
from exegpt.profiler.grid import FloatArray
from exegpt.simulator.replay_schedule import Deployment, deal, replay_schedule
from exegpt.specs import Policy
from exegpt.workload.requests import Request

# Queries that one replica is followed for in the steady state: at least so many, and so many encode batches.
LEAST_FOLLOWED = 1200
LEAST_BATCHES = 40
# Generations of the pool until the slots of continuous batching are out of step with each other.
WARM_UP_GENERATIONS = 5
# Quantiles of the output lengths around the bound's 99th percentile, all of which get its length.
PROBES = (0.98, 0.999)
# The same for the static policies, bound on the longest output: every micro-batch has one.
STATIC_PROBES = (0.85, 1.0)
_BATCHED = (Policy.STATIC, Policy.STATIC_HYBRID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Relative differences of the closed form from replay, with standard errors of what replay says."""

    case: Case
    throughput_per_s: float
    latency_s: float
    throughput_error: float
    throughput_sem: float
    latency_error: float
    latency_sem: float
    num_requests: int
    wall_s: float


def compare(case: Case, num_pairs: int) -> Agreement:
    """Replay `num_pairs` pairs of samples.

    The two samples of a pair are antithetic: where one has a quantile q, the other has 1 - q. Each is
    an ordinary sample, but the means of the two together vary little.
    """
    started = time.perf_counter()
    count = num_requests(case)
    rates, latencies = np.zeros((2, num_pairs, 2))
    for pair in range(num_pairs):
        for twin in range(2):
            rates[pair, twin], latencies[pair, twin] = _replay(case, count, pair, twin)
    predicted = case.schedule.predicted
    rate, rate_sem = _mean(rates.mean(1))
    latency, latency_sem = _mean(latencies.mean(1))
    return Agreement(
        case=case,
        throughput_per_s=rate,
        latency_s=latency,
        throughput_error=predicted["throughput_per_s"] / rate - 1,
        throughput_sem=rate_sem,
        latency_error=predicted["latency_s"] / latency - 1,
        latency_sem=latency_sem,
        num_requests=2 * num_pairs * count * case.choice.num_replicas,
        wall_s=time.perf_counter() - started,
    )


def _mean(values: FloatArray) -> tuple[float, float]:
    """Mean, and its standard error relative to it."""
    mean = float(values.mean())
    return mean, float(values.std(ddof=1)) / math.sqrt(len(values)) / mean


def warm_up(case: Case) -> int:
    """Queries of one replica until it is in its steady state."""
    knobs = case.schedule.knobs
    if case.policy in _BATCHED:
        return knobs.encode_batch_size
    return WARM_UP_GENERATIONS * knobs.decode_batch_size * case.choice.num_decode_instances


def num_requests(case: Case) -> int:
    """Queries of one replica: warm-up, what is followed, and what keeps it full until the last probes end."""
    knobs = case.schedule.knobs
    pool = knobs.decode_batch_size * case.choice.num_decode_instances
    return warm_up(case) + max(LEAST_FOLLOWED, LEAST_BATCHES * knobs.encode_batch_size) + 3 * pool


def _replay(case: Case, count: int, pair: int, twin: int) -> tuple[float, float]:
    """Throughput of all replicas and mean latency of probes of one sample."""
    # The longest outputs make a static batch longer: its probes are measured by themselves.
    apart = case.policy in _BATCHED
    followed = _replay_parts(case, count, _Sample(pair, twin, *((1.0, 1.0) if apart else PROBES)))
    rate = sum(part.rate_per_s for part in followed)
    if apart:
        followed = _replay_parts(case, count, _Sample(pair, twin, *STATIC_PROBES))
    return rate, float(np.mean([latency for part in followed for latency in part.latencies_s]))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Which sample: a pair and a twin of it, and the quantiles of output lengths that are probes."""

    pair: int
    twin: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Part:
    """A replica's throughput and its probes' latencies."""

    rate_per_s: float
    latencies_s: list[float]


def deployment(case: Case) -> Deployment:
    """What a case is replayed on."""
    problem = case.problem
    return Deployment(
        model=problem.model,
        profile=problem.profile,
        memory_bytes=problem.cluster.memory_bytes,
        page_size=problem.page_size,
        mean_input_tokens=problem.lengths.mean_input,
    )


def _replay_parts(case: Case, count: int, wanted: _Sample) -> list[_Part]:
    schedule = case.schedule
    requests = sample(case, count * schedule.num_replicas, wanted)
    by_id = {r.id: r for r in replay_schedule(schedule, deployment(case), requests).records}
    parts = [[by_id[r.id] for r in part] for part in deal(requests, schedule.num_replicas)]
    return [_part(case, part) for part in parts]


def _part(case: Case, records: Sequence[RequestRecord]) -> _Part:
    """Between the starts of two encode batches, behind the warm-up.

    While queries wait the system is full, so the last batch's start is still before the drain.
    """
    starts = np.sort([r.encode_start_s for r in records])
    first_s, last_s = float(starts[warm_up(case)]), float(starts[-1])
    began = int(((starts >= first_s) & (starts < last_s)).sum())
    wanted = bound_length(case)
    latencies = [
        r.finish_s - r.encode_start_s
        for r in records
        if r.output_tokens == wanted and r.encode_start_s >= first_s and r.finish_s <= last_s
    ]
    return _Part(began / (last_s - first_s), latencies)


def bound_length(case: Case) -> int:
    """Output tokens of the query whose latency is predicted.

    STATIC and STATIC_HYBRID compute all rows until a batch's longest query ends, and are bound on that one.
    """
    lengths = case.problem.lengths
    if case.policy in _BATCHED:
        return lengths.max_output
    return lengths.output_percentile(case.problem.bound.length_percentile)


def sample(case: Case, count: int, wanted: _Sample) -> list[Request]:
    """Requests drawn at random; a few of about the bound's length have exactly that."""
    lengths, rng = case.problem.lengths, np.random.default_rng([wanted.pair, count])
    quantiles = rng.random((2, count))
    inputs, outputs = 1 - quantiles if wanted.twin else quantiles
    input_tokens = np.searchsorted(np.cumsum(lengths.input_pmf), inputs)
    output_tokens = np.searchsorted(np.cumsum(lengths.output_pmf), outputs)
    output_tokens[(outputs > wanted.low) & (outputs < wanted.high)] = bound_length(case)
    return [
        Request(
            id=i,
            input_tokens=int(input_tokens[i]),
            max_output_tokens=int(output_tokens[i]),
            forced_output_tokens=int(output_tokens[i]),
        )
        for i in range(count)
    ]
