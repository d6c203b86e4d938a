"""The baselines' search: branch and bound equals exhaustive search, and its knobs say what was meant."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.policies import make_policy
from exegpt.policies.chunked import Chunked
from exegpt.policies.iteration import Iteration
from exegpt.policies.static_hybrid import StaticHybrid
from exegpt.scheduler.solve import Problem, solve
from exegpt.scheduler.space import make_spaces
from exegpt.simulator.planned import candidate_of
from exegpt.simulator.steady import estimate_one
from exegpt.specs import BoundSpec, Policy, SolverName
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import truncated_normal_pmf

pytestmark = pytest.mark.sweep

MODEL = synthetic.tiny_model()
SUMMARIES = independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0])
POLICIES = (Policy.STATIC_HYBRID, Policy.ITERATION, Policy.CHUNKED)


def problem(policy, *, latency_s=np.inf, seed=None, gpus=2):
    profile = synthetic.tiny_profile(MODEL)
    if seed is not None:
        profile = synthetic.wild_profile(MODEL, np.random.default_rng(seed))
    return Problem(
        model=MODEL,
        profile=profile,
        cluster=synthetic.tiny_cluster(gpus),
        lengths=SUMMARIES,
        bound=BoundSpec(latency_s=latency_s),
        policies=(policy,),
        baselines=(),
        max_encode_batch_size=24,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [None, 1, 2, 5])
def test_branch_and_bound_is_exhaustive_search(policy, seed):
    free = solve(replace(problem(policy, seed=seed), method=SolverName.exhaustive)).best
    assert free is not None
    for scale in (np.inf, 0.7):
        asked = problem(policy, seed=seed, latency_s=float(free.latency_s * scale))
        found, oracle = solve(asked).best, solve(replace(asked, method=SolverName.exhaustive)).best
        assert (found is None) == (oracle is None)
        if oracle is not None:
            assert found.throughput_per_s == pytest.approx(oracle.throughput_per_s, rel=1e-9)


@pytest.mark.parametrize(
    ("policy", "machine"),
    [(Policy.STATIC_HYBRID, StaticHybrid), (Policy.ITERATION, Iteration), (Policy.CHUNKED, Chunked)],
)
def test_a_schedule_says_what_was_planned(policy, machine):
    asked = problem(policy)
    solution = solve(asked)
    schedule = solution.schedule()
    assert isinstance(make_policy(schedule), machine)
    choice, batch, extent = candidate_of(schedule)
    assert (choice, batch) == (solution.best.choice, solution.best.batch)
    again = estimate_one(asked.steady(), choice, batch, extent)
    assert again["throughput_per_s"] == pytest.approx(solution.best.throughput_per_s)
    assert again["latency_s"] == pytest.approx(solution.best.latency_s)


def test_enumeration_covers_degrees_replicas_and_micro_batches():
    asked = problem(Policy.ITERATION, gpus=4)
    spaces = make_spaces(asked.steady(), asked.cluster, POLICIES, asked.ranges)
    for policy in (Policy.ITERATION, Policy.CHUNKED):
        found = {(c.tp_size, len(c.stages), c.num_replicas) for c in spaces[policy].choices}
        assert found == {(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)}
        assert {c.num_micro_batches for c in spaces[policy].choices if len(c.stages) == 4} == {1, 2, 4, 8}
    hybrid = {(c.num_micro_batches, c.encode_micro_batches) for c in spaces[Policy.STATIC_HYBRID].choices}
    assert hybrid == {(1, 2), (1, 4), (1, 8), (2, 4), (2, 8)}
    assert spaces[Policy.CHUNKED].extents.tolist() == [128, 256, 512, 1024, 2048, 4096, 8192]
