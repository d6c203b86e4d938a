"""Bounds of WAA and DISAGGREGATED hold on profiles that are isotone and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic
from test_sides_closed_form import COUNTS, LENGTHS, make_stages

from exegpt.simulator.choice import Choice
from exegpt.simulator.steady import SteadyState
from exegpt.specs import Policy

pytestmark = pytest.mark.sweep

LLAMA = synthetic.tiny_model()
POLICIES = (Policy.WAA, Policy.WAA_C, Policy.DISAGGREGATED)
MIB = 2**20


def draw_choices(rng, policy, count):
    """Random choices of one policy."""
    several = policy is Policy.DISAGGREGATED
    choices = []
    for _ in range(count):
        encode, decode, m = rng.integers(1, 5, size=3).tolist()
        sizes = rng.integers(1, 3, size=2).tolist()
        choices.append(
            Choice(
                policy=policy,
                stages=make_stages(COUNTS[encode], sizes[0], COUNTS[decode], sizes[1]),
                num_micro_batches=m,
                num_replicas=int(rng.integers(1, 3)),
                num_encode_instances=int(rng.integers(1, 4)) if several else 1,
                num_decode_instances=int(rng.integers(1, 4)) if several else 1,
            )
        )
    return choices


@pytest.mark.parametrize("seed", range(24))
def test_no_candidate_breaks_its_bounds(seed):
    rng = np.random.default_rng(seed)
    profile = synthetic.wild_profile(LLAMA, rng)
    lengths = LENGTHS[("S", "T", "correlated", "fixed")[seed % 4]]
    # Some profiles are wild, some memories are small, some percentiles low.
    memory = (np.inf, 560 * MIB, 530 * MIB)[seed % 3]
    steady = SteadyState(
        LLAMA, profile, lengths, memory_bytes=memory, length_percentile=(99.0, 20.0)[seed % 2]
    )
    choices = draw_choices(rng, POLICIES[seed % 3], 6)
    which = rng.integers(0, len(choices), size=40)
    low = rng.integers(1, 300, size=40)
    batches = np.stack([low, low + rng.integers(0, 200, size=40)], axis=1)
    bounds = steady._form(choices[0].policy).bounds(choices, which, batches, np.ones((40, 2), dtype=int))
    finite = 0
    for box in range(40):
        inside = np.arange(batches[box, 0], batches[box, 1] + 1)
        found = steady.estimate(choices[which[box]], inside, np.ones_like(inside))
        rounding = 1 + 1e-9
        assert (found.throughput_per_s <= bounds.throughput_upper_per_s[box] * rounding).all()
        assert (found.latency_s >= bounds.latency_lower_s[box] / rounding).all()
        assert (found.ttft_s >= bounds.ttft_lower_s[box] / rounding).all()
        peak = found.memory.total_bytes.max(-1)
        assert (peak >= bounds.memory_lower_bytes[box] / rounding).all()
        finite += int(np.isfinite(found.latency_s).sum())
    assert finite > 100


def test_bounds_of_one_candidate_are_close():
    steady = SteadyState(LLAMA, synthetic.tiny_profile(LLAMA), LENGTHS["T"], memory_bytes=600 * MIB)
    choices = draw_choices(np.random.default_rng(3), Policy.WAA, 20)
    batches = np.full((20, 2), 8)
    bounds = steady._form(Policy.WAA).bounds(choices, np.arange(20), batches, np.ones((20, 2), dtype=int))
    for choice, upper, lower in zip(
        choices, bounds.throughput_upper_per_s, bounds.latency_lower_s, strict=True
    ):
        found = steady.estimate(choice, np.asarray([8]), np.asarray([1]))
        # What is under way counts a batch at least in one, Little's law in the other.
        assert upper <= found.throughput_per_s[0] * 1.1
        assert lower >= found.latency_s[0] * 0.85
