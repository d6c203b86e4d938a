"""Algorithm 1: exact where estimates are monotonic, blind where they are not, and it says so."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.scheduler import exhaustive, monotone
from exegpt.scheduler.candidates import Constraints
from exegpt.scheduler.monotone import Block
from exegpt.scheduler.solve import Problem, solve
from exegpt.scheduler.space import PolicySpace
from exegpt.simulator.choice import Choice, Estimates
from exegpt.simulator.memory import MemoryPlan
from exegpt.simulator.placement import make_stages
from exegpt.specs import BoundSpec, Policy, SolverName
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import empirical_pmf

MODEL = synthetic.tiny_model()
STAGES = make_stages((8,), 1)


def toy_space(policy, num_choices, batches, extents):
    """Choices that differ in micro-batches, each with the same ranges."""
    choices = tuple(Choice(policy=policy, stages=STAGES, num_micro_batches=m + 1) for m in range(num_choices))
    of_each = np.ones(num_choices, dtype=np.int64)
    return PolicySpace(
        policy=policy,
        choices=choices,
        first=of_each,
        step=of_each,
        count=batches * of_each,
        extents=np.arange(1, extents + 1),
    )


def rising(rng, shape, size):
    """Random values that rise along both axes, mostly in jumps."""
    steps = rng.exponential(size=shape) * (rng.random(shape) < 0.3)
    return 1 + size * np.cumsum(np.cumsum(steps, axis=0), axis=1)


def toy_estimates(rng, space):
    """An evaluation whose throughput and latency rise with the batch and, for RRA, fall with N_D."""
    shape = (len(space.choices), int(space.count[0]), len(space.extents))
    tables = [np.stack([rising(rng, shape[1:], size) for _ in range(shape[0])]) for size in (0.1, 0.01)]
    if space.policy is Policy.RRA:
        tables = [table[..., ::-1] for table in tables]
    calls = []

    def evaluate(choice, batches, extents):
        at = choice.num_micro_batches - 1, batches - 1, extents - 1
        throughput, latency = (table[at] for table in tables)
        calls.extend(zip([choice] * len(batches), batches.tolist(), extents.tolist(), strict=True))
        nothing = np.zeros((len(batches), 1))
        return Estimates(
            throughput_per_s=throughput,
            latency_s=latency,
            ttft_s=0 * latency,
            tpot_s=0 * latency,
            decode_batch_size=throughput,
            cycle_s=latency,
            memory=MemoryPlan(weights_bytes=nothing, kv_bytes=nothing, activation_bytes=nothing),
        )

    return evaluate, tables[1], calls


@pytest.mark.parametrize("policy", [Policy.RRA, Policy.WAA])
@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_monotonic_estimates_are_searched_exactly(policy, tolerance):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        extents = int(rng.integers(1, 40)) if policy is Policy.RRA else 1
        space = toy_space(policy, int(rng.integers(1, 4)), int(rng.integers(1, 60)), extents)
        evaluate, latencies, calls = toy_estimates(rng, space)
        bound = float(np.quantile(latencies, rng.random()))
        constraints = Constraints(bound=BoundSpec(latency_s=bound), memory_bytes=2**40)
        oracle = exhaustive.search(space, evaluate, constraints)
        calls.clear()
        found = monotone.search(
            space, evaluate, constraints, latency_tolerance=tolerance, throughput_tolerance=tolerance
        )
        assert found.best.throughput_per_s == oracle.best.throughput_per_s, seed
        assert found.best.latency_s <= bound
        # No cell is looked at twice, and the count is honest.
        assert len(set(calls)) == len(calls) == found.num_evaluations


def test_it_looks_at_a_small_part():
    rng = np.random.default_rng(0)
    space = toy_space(Policy.RRA, 1, 400, 300)
    evaluate, latencies, _ = toy_estimates(rng, space)
    constraints = Constraints(bound=BoundSpec(latency_s=float(np.median(latencies))), memory_bytes=2**40)
    found = monotone.search(space, evaluate, constraints, latency_tolerance=0.0, throughput_tolerance=0.0)
    assert found.num_evaluations < space.size / 50


def test_nothing_feasible_is_no_answer():
    space = toy_space(Policy.RRA, 2, 10, 10)
    evaluate, latencies, calls = toy_estimates(np.random.default_rng(0), space)
    constraints = Constraints(bound=BoundSpec(latency_s=float(latencies.min()) / 2), memory_bytes=2**40)
    found = monotone.search(space, evaluate, constraints, latency_tolerance=0.05, throughput_tolerance=0.05)
    assert found.best is None
    # Both corners of both choices, and no more.
    assert len(calls) == 4


def test_halves_share_no_cell_and_lose_none():
    for block in (Block(0, 4, 0, 2), Block(3, 3, 0, 7), Block(0, 9, 5, 5)):
        for vertically in (True, False):
            cells = [
                (x, y)
                for half in block.halves(vertically=vertically)
                for x in range(half.left, half.right + 1)
                for y in range(half.bottom, half.top + 1)
            ]
            size = (block.right - block.left + 1) * (block.top - block.bottom + 1)
            assert len(cells) == len(set(cells)) == size


def wild_problem(seed):
    """Isotone costs with cliffs: estimates are not monotonic."""
    rng = np.random.default_rng(seed)
    outputs = rng.integers(1, rng.integers(2, 25), size=30)
    return Problem(
        model=MODEL,
        profile=synthetic.wild_profile(MODEL, rng),
        cluster=synthetic.tiny_cluster(),
        lengths=independent(empirical_pmf(rng.integers(1, 300, size=30)), empirical_pmf(outputs)),
        bound=BoundSpec(),
        max_encode_batch_size=30,
        num_micro_batches=(1, 2),
        baselines=(Policy.STATIC,),
    )


@pytest.mark.parametrize(("seed", "share"), [(8, 0.4), (15, 0.2)])
def test_it_misses_what_branch_and_bound_finds_on_wild_costs(seed, share):
    free = solve(wild_problem(seed)).best
    problem = replace(wild_problem(seed), bound=BoundSpec(latency_s=share * free.latency_s), baselines=())
    proven, guessed, oracle = (
        solve(replace(problem, method=method)).best
        for method in (SolverName.branch_and_bound, SolverName.paper, SolverName.exhaustive)
    )
    assert guessed.throughput_per_s < 0.95 * proven.throughput_per_s
    assert proven.throughput_per_s == pytest.approx(oracle.throughput_per_s, rel=1e-12)
    assert guessed.latency_s <= problem.bound.latency_s


def test_it_claims_no_proof_and_its_baselines_are_proven():
    problem = wild_problem(1)
    proven, guessed = solve(problem), solve(replace(problem, method=SolverName.paper))
    record = guessed.record()
    assert record["method"] == "paper"
    assert record["throughput_upper_per_s"] is record["gap"] is None
    assert record["baselines"] == proven.record()["baselines"]
    assert guessed.baselines[Policy.STATIC].throughput_upper_per_s is not None
    assert (proven.record()["method"], proven.record()["gap"]) == ("branch_and_bound", 0.0)


def test_what_it_misses_altogether_is_not_called_infeasible():
    # What comes closest to a bound is found by branch and bound.
    problem = replace(wild_problem(0), bound=BoundSpec(latency_s=1e-6), method=SolverName.paper)
    solution = solve(problem)
    result = solution.policies[Policy.RRA]
    assert "relax bound.latency_s from 1e-06 s to" in solution.reason(result)
    within = replace(result, closest={**result.closest, "latency_s": 1e-7})
    assert "Algorithm 1 finds no schedule, though some meet" in solution.reason(within)
