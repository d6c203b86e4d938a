"""Bounds of ITERATION and CHUNKED on random profiles that do nothing but rise: no candidate breaks them."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.simulator.forms.chunked_bounds import least_ratio
from exegpt.simulator.placement import make_stages
from exegpt.simulator.steady import Choice, SteadyState
from exegpt.specs import Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import empirical_pmf

pytestmark = pytest.mark.sweep

MODEL = synthetic.tiny_model()
BUDGETS = np.array([32, 64, 128, 256, 512, 1024])
# Sums in another order round differently.
SLACK = 1e-9


def wild_case(seed, policy):
    """A random profile, random lengths, and two choices of one to four stages."""
    rng = np.random.default_rng(seed)
    outputs = rng.integers(1, rng.choice([2, 10, 60]), size=25)
    lengths = independent(empirical_pmf(rng.integers(1, 400, size=25)), empirical_pmf(outputs))
    profile = synthetic.wild_profile(MODEL, rng) if seed % 3 else synthetic.tiny_profile(MODEL)
    counts = [(8,), (5, 3), (3, 3, 2), (2, 2, 2, 2)][seed // 2 % 4]
    choices = tuple(
        Choice(policy=policy, stages=make_stages(counts, t), num_micro_batches=int(rng.integers(1, 5)))
        for t in (1, 2)
    )
    return rng, SteadyState(MODEL, profile, lengths), choices


def assert_bounded(estimates, bounds, at):
    inside = np.isfinite(estimates.cycle_s)
    assert (estimates.throughput_per_s <= bounds.throughput_upper_per_s * (1 + SLACK))[inside].all(), at
    pairs = [
        (bounds.latency_lower_s, estimates.latency_s),
        (bounds.ttft_lower_s, estimates.ttft_s),
        (bounds.memory_lower_bytes, estimates.memory.total_bytes.max(-1)),
    ]
    if bounds.tpot_lower_s is not None:
        pairs.append((bounds.tpot_lower_s, estimates.tpot_s))
    for lower, values in pairs:
        assert (values >= lower * (1 - SLACK))[inside].all(), at
    return inside.sum()


@pytest.mark.parametrize("block", range(8))
def test_no_slots_break_the_bounds_of_iteration(block):
    checked = 0
    for seed in range(block * 6, block * 6 + 6):
        rng, steady, choices = wild_case(seed, Policy.ITERATION)
        for _ in range(3):
            which = int(rng.integers(2))
            m = choices[which].num_micro_batches
            low = int(rng.integers(1, 60))
            high = low + int(rng.integers(0, 20))
            box = np.array([[low * m, high * m]])
            bounds = steady.bounds(choices, np.array([which]), box, np.ones_like(box))
            slots = m * np.arange(low, high + 1)
            checked += assert_bounded(
                steady.estimate(choices[which], slots, np.ones_like(slots)), bounds, (seed, which, box)
            )
    assert checked > 50


@pytest.mark.parametrize("block", range(8))
def test_no_slots_and_budget_break_the_bounds_of_chunked(block):
    checked = 0
    for seed in range(block * 4, block * 4 + 4):
        rng, steady, choices = wild_case(seed, Policy.CHUNKED)
        for _ in range(2):
            which = int(rng.integers(2))
            m = choices[which].num_micro_batches
            low = int(rng.integers(1, 60))
            high = low + int(rng.integers(0, 12))
            first, last = np.sort(rng.integers(0, len(BUDGETS), size=2))
            box = np.array([[low * m, high * m]]), BUDGETS[[[first, last]]]
            bounds = steady.bounds(choices, np.array([which]), *box)
            slots, budget = np.meshgrid(m * np.arange(low, high + 1), BUDGETS[first : last + 1])
            checked += assert_bounded(
                steady.estimate(choices[which], slots.ravel(), budget.ravel()), bounds, (seed, which, box)
            )
    assert checked > 50


@pytest.mark.parametrize("place", [(8,), (4, 4)])
def test_iteration_bounds_of_one_candidate_are_close(place):
    profile = synthetic.tiny_profile(MODEL)
    lengths = independent(empirical_pmf(np.arange(1, 300)), empirical_pmf(np.arange(1, 60)))
    steady = SteadyState(MODEL, profile, lengths)
    choices = (Choice(policy=Policy.ITERATION, stages=make_stages(place, 1), num_micro_batches=len(place)),)
    slots = np.array([8, 40, 160])
    estimates = steady.estimate(choices[0], slots, np.ones_like(slots))
    box = np.stack([slots, slots], axis=1)
    bounds = steady.bounds(choices, np.zeros(3, dtype=int), box, np.ones_like(box))
    # One stage waits for nothing: the bound is the estimate, but for the decoding in the query's own turn.
    # Stalls of ragged turns in two stages are left out.
    one = len(place) == 1
    assert bounds.throughput_upper_per_s == pytest.approx(
        estimates.throughput_per_s, rel=0.001 if one else 0.25
    )
    assert bounds.latency_lower_s == pytest.approx(estimates.latency_s, rel=0.01 if one else 0.25)


def test_replicas_multiply_throughput_alone():
    _, steady, choices = wild_case(0, Policy.ITERATION)
    more = replace(choices[0], num_replicas=3)
    slots = choices[0].num_micro_batches * np.array([4, 9])
    one, three = (steady.estimate(c, slots, np.ones_like(slots)) for c in (choices[0], more))
    assert three.throughput_per_s == pytest.approx(3 * one.throughput_per_s)
    assert three.latency_s == pytest.approx(one.latency_s)


def test_least_ratio_is_the_least_over_all_counts():
    grid = synthetic.wild_profile(MODEL, np.random.default_rng(4)).layers[1].linear
    counts = np.arange(1, 3001)
    ratios = np.minimum.accumulate(grid.at_or_inf(counts.astype(float)) / counts)
    most = np.array([1, 5, 300, 3000])
    assert (least_ratio(grid, 1.0, most.astype(float)) <= ratios[most - 1] * (1 + 1e-12)).all()
    # Points of the grid are whole numbers, so nothing lies lower between them.
    assert least_ratio(grid, 1.0, most.astype(float)) == pytest.approx(ratios[most - 1], rel=1e-12)
