"""The frontier against every candidate of small problems."""

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.errors import CapacityError
from exegpt.scheduler.frontier import find_frontier
from exegpt.scheduler.solve import Problem, solve
from exegpt.simulator.choice import constraint_values
from exegpt.specs import BoundSpec, Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import empirical_pmf

MODEL = synthetic.tiny_model()


def small_problem(seed, **changes):
    """Random lengths on a random profile, few enough candidates to look at each."""
    rng = np.random.default_rng(seed)
    fields = {
        "model": MODEL,
        "profile": synthetic.wild_profile(MODEL, rng) if seed % 2 else synthetic.tiny_profile(MODEL),
        "cluster": synthetic.tiny_cluster(),
        "lengths": independent(
            empirical_pmf(rng.integers(1, 300, size=30)), empirical_pmf(rng.integers(1, 12, size=30))
        ),
        "bound": BoundSpec(),
        "policies": (Policy.RRA, Policy.WAA),
        "baselines": (),
        "max_encode_batch_size": 10,
        "num_micro_batches": (1, 2),
    }
    return Problem(**{**fields, **changes})


def every_candidate(problem):
    """Least bound, throughput and policy of each candidate that meets all but the latency bound."""
    steady = problem.steady()
    forms = problem.robust(steady)
    found = []
    for policy, space in problem.spaces(steady, problem.policies).items():
        for index, choice in enumerate(space.choices):
            mesh = np.meshgrid(space.batches(index), space.extents, indexing="ij")
            estimates = forms.estimate(choice, mesh[0].ravel(), mesh[1].ravel())
            values = constraint_values(estimates)
            fits = (values["memory"] <= problem.cluster.memory_bytes) & np.isfinite(estimates.cycle_s)
            fits &= np.isfinite(estimates.latency_s)
            fits &= (values["ttft_s"] <= problem.bound.ttft_s) & (values["tpot_s"] <= problem.bound.tpot_s)
            rows = zip(values["latency_s"][fits], estimates.throughput_per_s[fits], strict=True)
            found += [(float(latency_s), float(rate), policy) for latency_s, rate in rows]
    return found


def best_under(candidates, bound_s):
    # Sums over padded rows of another width round differently in the last digit.
    return max((rate for latency_s, rate, _ in candidates if latency_s <= bound_s * (1 + 1e-12)), default=0.0)


@pytest.mark.parametrize("seed", range(8))
def test_every_point_is_the_optimum_of_its_bounds(seed):
    problem = small_problem(seed)
    candidates = every_candidate(problem)
    frontier = find_frontier(problem, 8)
    assert frontier.points[0].best.latency_s == pytest.approx(min(candidates)[0], rel=1e-12)
    assert frontier.points[-1].best.throughput_per_s == pytest.approx(
        best_under(candidates, math.inf), rel=1e-12
    )
    for point in frontier.points:
        for bound_s in (point.best.latency_s, min(point.bound_s, 1e9)):
            assert point.best.throughput_per_s == pytest.approx(best_under(candidates, bound_s), rel=1e-9)
    for bound_s in np.geomspace(frontier.points[0].best.latency_s, 1e3, 100).tolist():
        reached = max(p.best.throughput_per_s for p in frontier.points if p.best.latency_s <= bound_s)
        assert reached >= best_under(candidates, bound_s) * (1 - frontier.gap) * (1 - 1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_enough_bounds_find_every_step(seed):
    problem = small_problem(seed, max_encode_batch_size=4, num_micro_batches=(1,))
    candidates = every_candidate(problem)
    frontier = find_frontier(problem, 10_000)
    assert frontier.gap == 0.0
    assert frontier.num_bounds < 10_000
    steps = []
    for latency_s, rate, _ in sorted(candidates, key=lambda c: (c[0], -c[1])):
        if not steps or rate > steps[-1][1] * (1 + 1e-9):
            steps.append((latency_s, rate))
    assert len(steps) > 3
    found = [(p.best.latency_s, p.best.throughput_per_s) for p in frontier.points]
    assert np.asarray(found) == pytest.approx(np.asarray(steps), rel=1e-9)


def test_curves_are_those_of_each_policy_alone():
    problem = small_problem(0)
    frontier = find_frontier(problem, 6)
    candidates = every_candidate(problem)
    for policy, curve in frontier.curves.items():
        own = [c for c in candidates if c[2] is policy]
        for best in curve:
            assert best.choice.policy is policy
            assert best.throughput_per_s == pytest.approx(best_under(own, best.latency_s), rel=1e-9)


def test_other_bounds_hold_at_every_point():
    free = find_frontier(small_problem(0), 4)
    ttft_s = sorted(p.best.ttft_s for p in free.points)[1]
    problem = small_problem(0, bound=BoundSpec(ttft_s=ttft_s, latency_s=1e-9))
    frontier = find_frontier(problem, 6)
    candidates = every_candidate(problem)
    assert frontier.points[-1].best.throughput_per_s < free.points[-1].best.throughput_per_s
    for point in frontier.points:
        assert point.best.ttft_s <= ttft_s
        assert point.best.throughput_per_s == pytest.approx(
            best_under(candidates, point.best.latency_s), rel=1e-9
        )


def test_points_are_what_solve_answers():
    problem = small_problem(3)
    for point in find_frontier(problem, 5).points:
        bound = BoundSpec(latency_s=point.bound_s)
        assert solve(replace(problem, bound=bound)).best.throughput_per_s == pytest.approx(
            point.best.throughput_per_s, rel=1e-12
        )


def test_margins_hold_at_every_point():
    problem = small_problem(0, policies=(Policy.RRA,), confidence=0.95)
    frontier = find_frontier(problem, 4)
    candidates = every_candidate(problem)
    for point in frontier.points:
        least = point.best.worst["latency_s"]
        assert least >= point.best.latency_s
        assert point.best.throughput_per_s == pytest.approx(best_under(candidates, least), rel=1e-9)


def test_record_and_progress():
    problem = small_problem(0, cluster=replace(synthetic.tiny_cluster(), price_per_gpu_hour=3.6))
    told = []
    frontier = find_frontier(problem, 5, report=lambda done, total: told.append((done, total)))
    assert told[0] == (0, 5)
    assert told[-1] == (5, 5)
    record = frontier.record(problem)
    assert [p["latency_bound_s"] for p in record["frontier"]][-1] is None
    for point, entry in zip(frontier.points, record["frontier"], strict=True):
        assert entry["policy"] == point.best.choice.policy.value
        assert entry["knobs"]["encode_batch_size"] == point.best.batch
        assert entry["throughput_per_s"] == point.best.throughput_per_s
        assert entry["cost_per_million_output_tokens"] == pytest.approx(
            0.002 / entry["throughput_tokens_per_s"] * 1e6
        )
    assert set(record["frontier_search"]["policies"]) == {"RRA", "WAA"}


def test_a_bound_of_the_users_is_among_the_points():
    problem = small_problem(0)
    free = find_frontier(problem, 3)
    # A bound that halving does not come to.
    bound_s = free.points[0].best.latency_s * 1.37
    frontier = find_frontier(problem, 3, also_s=bound_s)
    best = solve(replace(problem, bound=BoundSpec(latency_s=bound_s))).best
    under = [p for p in frontier.points if p.best.latency_s <= bound_s <= p.bound_s]
    assert [p.best.throughput_per_s for p in under] == [pytest.approx(best.throughput_per_s, rel=1e-12)]
    assert find_frontier(problem, 3, also_s=1e-9).points == free.points


def test_nothing_under_any_bound_is_an_empty_frontier():
    frontier = find_frontier(small_problem(0, bound=BoundSpec(ttft_s=1e-9)), 5)
    assert (frontier.points, frontier.gap, frontier.num_bounds) == ((), 0.0, 0)


def test_weights_that_fit_nowhere_are_said():
    with pytest.raises(CapacityError, match="no pipeline of the 2 GPUs"):
        find_frontier(small_problem(0, cluster=synthetic.tiny_cluster(memory_bytes=1000)), 5)
