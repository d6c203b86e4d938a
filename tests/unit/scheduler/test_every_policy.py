"""What is solved for can be simulated: from the schedule alone, for every policy."""

import dataclasses

import numpy as np
import pytest
import synthetic

from exegpt.schedule import Knobs, Schedule, read_schedule, write_schedule
from exegpt.scheduler.solve import Problem, solve
from exegpt.simulator.placement import make_stages
from exegpt.simulator.planned import candidate_of
from exegpt.simulator.replay_schedule import Deployment, deal, replay_schedule
from exegpt.simulator.steady import estimate_one
from exegpt.specs import BoundSpec, Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import truncated_normal_pmf
from exegpt.workload.requests import Request, poisson_arrivals, sample_requests

MODEL = synthetic.tiny_model()
PROFILE = synthetic.tiny_profile(MODEL)
CLUSTER = synthetic.tiny_cluster(4)
LENGTHS = independent(truncated_normal_pmf(128, 81, 256)[0], truncated_normal_pmf(32, 13, 80)[0])
DEPLOYMENT = Deployment(
    model=MODEL,
    profile=PROFILE,
    memory_bytes=CLUSTER.memory_bytes,
    page_size=16,
    mean_input_tokens=LENGTHS.mean_input,
)


def problem(policy):
    return Problem(
        model=MODEL,
        profile=PROFILE,
        cluster=CLUSTER,
        lengths=LENGTHS,
        bound=BoundSpec(),
        policies=(policy,),
        baselines=(),
        max_encode_batch_size=24,
    )


def requests(rng, count=60, rate_per_s=None):
    arrivals = None if rate_per_s is None else poisson_arrivals(rate_per_s, count, rng)
    return sample_requests(LENGTHS, count, rng, arrivals_s=arrivals)


@pytest.mark.parametrize("policy", Policy)
def test_every_policys_schedule_is_replayed_and_estimated(policy, tmp_path):
    asked = problem(policy)
    solution = solve(asked)
    path = tmp_path / "schedule.yaml"
    write_schedule(solution.schedule(), path)
    schedule = read_schedule(path)
    assert schedule.policy is policy
    schedule.check(MODEL, num_ranks=CLUSTER.num_gpus)
    predicted = estimate_one(asked.steady(), *candidate_of(schedule))
    for name in ("throughput_per_s", "latency_s", "ttft_s", "tpot_s"):
        assert predicted[name] == pytest.approx(schedule.predicted[name])
    drawn = requests(np.random.default_rng(3))
    result = replay_schedule(schedule, DEPLOYMENT, drawn)
    assert [r.id for r in result.records] == [r.id for r in drawn]
    assert {r.status for r in result.records} == {"ok"}
    assert [r.output_tokens for r in result.records] == [r.forced_output_tokens for r in drawn]
    # First ranks of all stages of all replicas.
    assert len({e.rank for e in result.events}) >= schedule.num_replicas * len(schedule.stages)
    assert max(e.rank for e in result.events) < CLUSTER.num_gpus


@pytest.mark.parametrize("bursts", [False, True])
@pytest.mark.parametrize("policy", Policy)
def test_every_policy_serves_requests_as_they_arrive(policy, bursts):
    schedule = solve(problem(policy)).schedule()
    rng, count = np.random.default_rng(5), 300
    # STATIC starts a batch with what has come while the one before ran: less than it was planned for.
    arrivals = poisson_arrivals(0.3 * schedule.predicted["throughput_per_s"], count, rng)
    if bursts:
        # A trace's: thirty at once, then none for as long as they take to arrive one by one.
        arrivals = np.repeat(arrivals[::30], 30)
    drawn = sample_requests(LENGTHS, count, rng, arrivals_s=arrivals)
    records = replay_schedule(schedule, DEPLOYMENT, drawn).records
    assert [r.output_tokens for r in records] == [r.forced_output_tokens for r in drawn]
    assert all(r.encode_start_s >= r.arrival_s for r in records)
    assert all(np.all(np.diff(r.token_s) > 0) for r in records)
    # It keeps up: the last ones wait no longer than the first ones, but for chance.
    waits = np.array([r.encode_start_s - r.arrival_s for r in records])
    span = records[-1].arrival_s
    assert waits[-60:].mean() < 0.1 * span
    assert max(r.finish_s for r in records) > span


def two_replicas():
    knobs = Knobs(
        encode_batch_size=6,
        decode_batch_size=20,
        decode_iterations=5,
        num_micro_batches=2,
        tp_size=1,
        num_tp_gpus=2,
    )
    stages = make_stages((4, 4), 1)
    return Schedule(model="tiny", policy=Policy.RRA, knobs=knobs, stages=stages, num_replicas=2)


@pytest.mark.parametrize("rate_per_s", [None, 20.0])
def test_replicas_are_replays_of_the_requests_dealt_to_them(rate_per_s):
    schedule, drawn = two_replicas(), requests(np.random.default_rng(4), 41, rate_per_s)
    result = replay_schedule(schedule, DEPLOYMENT, drawn)
    alone = dataclasses.replace(schedule, num_replicas=1)
    for index in range(2):
        own = drawn[index::2]
        expected = replay_schedule(alone, DEPLOYMENT, own)
        mine = [r for r in result.records if r.id % 2 == index]
        assert mine == expected.records
        events = [e for e in result.events if e.rank // 2 == index]
        assert events == [dataclasses.replace(e, rank=e.rank + 2 * index) for e in expected.events]


def test_requests_are_dealt_in_the_order_of_arrival():
    arrivals = (3.0, 1.0, 2.0, 1.0)
    drawn = [Request(id=i, input_tokens=1, max_output_tokens=1, arrival_s=t) for i, t in enumerate(arrivals)]
    assert [[r.id for r in part] for part in deal(drawn, 3)] == [[1, 0], [3], [2]]
    assert [len(part) for part in deal(drawn, 6)] == [1, 1, 1, 1, 0, 0]
