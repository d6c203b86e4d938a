"""Margins: with them the worst case meets the bound, and without need nothing changes."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.errors import ConfigError
from exegpt.scheduler.solve import Problem, solve
from exegpt.specs import BoundSpec, Policy, SolverName
from exegpt.workload.drift import drift_corners
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import truncated_normal_pmf

MODEL = synthetic.tiny_model()
LENGTHS = independent(truncated_normal_pmf(64, 23, 128)[0], truncated_normal_pmf(32, 13, 80)[0])
PROBLEM = Problem(
    model=MODEL,
    profile=synthetic.tiny_profile(MODEL),
    cluster=synthetic.tiny_cluster(),
    lengths=LENGTHS,
    bound=BoundSpec(latency_s=1.0),
    max_encode_batch_size=20,
    max_decode_iterations=40,
    num_micro_batches=(1, 2),
    baselines=(),
)


@pytest.mark.parametrize(
    "margins", [{"confidence": 0.95}, {"drift_margin": 0.15}, {"confidence": 0.9, "drift_margin": 0.1}]
)
def test_search_with_margins_is_exhaustive_search_with_margins(margins):
    problem = replace(
        PROBLEM, max_encode_batch_size=8, max_decode_iterations=24, bound=BoundSpec(latency_s=0.6)
    )
    problem = replace(problem, **margins)
    found, oracle = solve(problem), solve(replace(problem, method=SolverName.exhaustive))
    assert found.best == oracle.best
    assert found.best.worst["latency_s"] <= 0.6


def test_a_margin_costs_throughput_where_the_bound_binds():
    # Just in time without a margin.
    problem = replace(PROBLEM, bound=BoundSpec(latency_s=solve(PROBLEM).best.latency_s))
    plain = solve(problem).best.throughput_per_s
    assert solve(replace(problem, confidence=0.99)).best.throughput_per_s < plain
    assert solve(replace(problem, drift_margin=0.15)).best.throughput_per_s < plain


def test_every_drift_of_the_margin_is_in_time():
    best = solve(replace(PROBLEM, drift_margin=0.15)).best
    knobs = np.array([best.batch]), np.array([best.extent])
    for lengths in drift_corners(LENGTHS, 0.15):
        e = PROBLEM.steady(lengths).estimate(best.choice, *knobs)
        assert e.latency_s[0] <= 1.0
    # Without the margin one of them is late.
    plain = solve(PROBLEM).best
    knobs = np.array([plain.batch]), np.array([plain.extent])
    late = [
        PROBLEM.steady(d).estimate(plain.choice, *knobs).latency_s[0] for d in drift_corners(LENGTHS, 0.15)
    ]
    assert max(late) > 1.0


def test_static_has_margins_too():
    solution = solve(replace(PROBLEM, policies=(Policy.STATIC,), confidence=0.9))
    assert solution.best.worst["latency_s"] >= solution.best.latency_s


def test_every_policy_has_a_spread():
    # On two GPUs each policy has something to choose from.
    solution = solve(
        replace(PROBLEM, policies=tuple(Policy), confidence=0.9, bound=BoundSpec(latency_s=15.0))
    )
    for policy, result in solution.policies.items():
        assert result.best is not None, policy
        assert np.isfinite(result.best.worst["latency_s"]), policy
        assert result.best.worst["latency_s"] >= result.best.latency_s, policy


def test_what_margins_cost_is_what_the_same_search_finds_without_them():
    problem = replace(PROBLEM, bound=BoundSpec(latency_s=solve(PROBLEM).best.latency_s))
    solution = solve(replace(problem, confidence=0.99))
    margins = solution.record()["margins"]
    without = solve(problem).best.throughput_per_s
    assert margins["throughput_without_per_s"] == pytest.approx(without, rel=1e-12)
    assert margins["cost"] == pytest.approx(1 - solution.best.throughput_per_s / without)
    assert margins["worst"]["latency_s"] == solution.best.worst["latency_s"]
    assert "margins" not in solve(problem).record()


def test_what_margins_cost_where_nothing_is_left():
    # The least latency there is: in time on average only.
    tight = replace(PROBLEM, bound=BoundSpec(latency_s=1e-4))
    least = solve(tight).policies[Policy.RRA].closest["latency_s"] * (1 + 1e-9)
    solution = solve(replace(tight, bound=BoundSpec(latency_s=least), drift_margin=0.3))
    margins = solution.record()["margins"]
    assert solution.best is None
    assert (margins["cost"], margins["worst"]) == (None, None)
    assert margins["throughput_without_per_s"] > 0


def test_impossible_margins_are_refused():
    with pytest.raises(ConfigError, match=r"solver\.confidence=0\.3: must lie in \[0\.5, 1\)"):
        solve(replace(PROBLEM, confidence=0.3))
    with pytest.raises(ConfigError, match=r"solver\.drift_margin=1\.5"):
        solve(replace(PROBLEM, drift_margin=1.5))
