"""The closed forms against a long replay of the same policy on the same profile."""

import itertools

import numpy as np
import pytest
import synthetic

from exegpt.policies.rra import RRA
from exegpt.policies.static import Static
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.placement import make_stages
from exegpt.simulator.replay import replay
from exegpt.simulator.steady import Choice, SteadyState, estimate_one
from exegpt.specs import Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import fixed_pmf, truncated_normal_pmf
from exegpt.workload.requests import Request, with_probes

pytestmark = pytest.mark.sweep

MODEL = synthetic.tiny_model()
LENGTHS = {
    "S": independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0]),
    "T": independent(truncated_normal_pmf(128, 81, 256)[0], truncated_normal_pmf(128, 68, 320)[0]),
    "even prompts": independent(fixed_pmf(64), truncated_normal_pmf(32, 13, 80)[0]),
    "fixed": independent(fixed_pmf(64), fixed_pmf(40)),
}
PROFILES = {
    "plain": synthetic.tiny_profile(MODEL),
    "heavy head": synthetic.tiny_profile(MODEL, head_s=8e-3),
    "slow bookkeeping": synthetic.tiny_profile(MODEL, overhead_s=2e-3, linear_s=1e-4),
}
# Layers per stage, tensor-parallel degree.
PLACEMENTS = {
    "one": ((8,), 1),
    "one tp 2": ((8,), 2),
    "two": ((4, 4), 1),
    "two unequal": ((6, 2), 1),
    "three": ((3, 3, 2), 1),
    "four": ((2, 2, 2, 2), 1),
}
KNOBS = ((16, 8, 1), (24, 16, 2), (12, 5, 3), (32, 30, 4))
CASES = [
    (lengths, profile, place, knobs)
    for i, (lengths, profile, place, knobs) in enumerate(
        itertools.product(("S", "T", "fixed"), PROFILES, PLACEMENTS, KNOBS)
    )
    if i % 3 == 0
]


def stratified(pmf, block, num_blocks, rng):
    """Lengths whose every block has the distribution's quantiles, in random order: little sampling noise."""
    quantiles = np.searchsorted(np.cumsum(pmf), (np.arange(block) + 0.5) / block)
    return np.concatenate([rng.permutation(quantiles) for _ in range(num_blocks)])


def make_requests(lengths, num_requests, seed=0):
    rng = np.random.default_rng(seed)
    block = 240
    num_blocks = -(-num_requests // block)
    inputs = stratified(lengths.input_pmf, block, num_blocks, rng)
    outputs = stratified(lengths.output_pmf, block, num_blocks, rng)
    return [
        Request(
            id=i, input_tokens=int(inputs[i]), max_output_tokens=320, forced_output_tokens=int(outputs[i])
        )
        for i in range(num_requests)
    ]


def tolerance(lengths):
    """Relative tolerance of throughput; latency gets a percent more.

    The closed form takes the mean pool; with fixed lengths nothing varies, and the two agree to rounding.
    """
    return 0.002 if lengths == "fixed" else 0.02


def run(machine, lengths, profile, stages, m, num_requests):
    requests = make_requests(lengths, num_requests)
    costs = StageCosts(profile, MODEL, stage_shapes(stages))
    return replay(machine, costs, requests, num_micro_batches=m, num_pages=10**7, page_size=16)


def starts(result, phase="encode"):
    """When stage 0 began the phase, cycle by cycle."""
    first = {}
    for event in result.events:
        if event.phase == phase and event.stage == 0:
            first[event.cycle] = min(first.get(event.cycle, np.inf), event.start_s)
    return [first[c] for c in sorted(first)]


@pytest.mark.parametrize(("lengths", "profile", "place", "knobs"), CASES)
def test_rra_throughput_is_that_of_a_long_replay(lengths, profile, place, knobs):
    batch, n_d, m = knobs
    counts, tp_size = PLACEMENTS[place]
    stages = make_stages(counts, tp_size)
    steady = SteadyState(MODEL, PROFILES[profile], LENGTHS[lengths])
    choice = Choice(policy=Policy.RRA, stages=stages, num_micro_batches=m)
    predicted = estimate_one(steady, choice, batch, n_d)
    # Cycles until the pool is full, and as many again to average over.
    fill = -(-steady.completion.max_iterations // n_d)
    # A multiple of the blocks that the lengths are balanced over.
    cycles = fill + 120
    result = run(RRA(batch, n_d), LENGTHS[lengths], PROFILES[profile], stages, m, batch * (cycles + 1))
    at = starts(result)
    measured = (at[cycles] - at[fill]) / (cycles - fill)
    assert predicted["throughput_per_s"] == pytest.approx(batch / measured, rel=tolerance(lengths))


@pytest.mark.parametrize(("lengths", "profile", "place", "knobs"), CASES[::2])
def test_rra_latency_is_that_of_probes(lengths, profile, place, knobs):
    batch, n_d, m = knobs
    counts, tp_size = PLACEMENTS[place]
    stages = make_stages(counts, tp_size)
    steady = SteadyState(MODEL, PROFILES[profile], LENGTHS[lengths])
    choice = Choice(policy=Policy.RRA, stages=stages, num_micro_batches=m)
    predicted = estimate_one(steady, choice, batch, n_d)
    fill = -(-steady.completion.max_iterations // n_d)
    total = batch * (3 * fill + 120)
    requests = make_requests(LENGTHS[lengths], total)
    # One probe in ten batches: too few to change the mean length.
    rng = np.random.default_rng(1)
    probed = with_probes(requests, total // (10 * batch), steady.bound_output_tokens, rng)
    ids = {new.id for new, old in zip(probed, requests, strict=True) if new is not old}
    costs = StageCosts(PROFILES[profile], MODEL, stage_shapes(stages))
    result = replay(RRA(batch, n_d), costs, probed, num_micro_batches=m, num_pages=10**7, page_size=16)
    middle = range(batch * fill, total - batch * (fill + 2))
    latencies = [r.finish_s - r.encode_start_s for r in result.records if r.id in ids and r.id in middle]
    assert len(latencies) >= 5
    # The closed form speaks of the last micro-batch; a probe may be in an earlier one, which ends up
    # to m - 1 passages of the slowest stage before.
    slack = (m - 1) * max(max(e.end_s - e.start_s for e in result.events if e.phase == "decode"), 0)
    allowed = tolerance(lengths) + 0.01
    assert np.mean(latencies) <= predicted["latency_s"] * (1 + allowed)
    assert np.mean(latencies) >= predicted["latency_s"] * (1 - allowed) - slack


@pytest.mark.parametrize("place", PLACEMENTS)
@pytest.mark.parametrize("m", [1, 2])
def test_static_is_that_of_a_long_replay(place, m):
    counts, tp_size = PLACEMENTS[place]
    stages = make_stages(counts, tp_size)
    # Ragged prompts would stall the pipeline between micro-batches, which STATIC's form leaves out.
    lengths = LENGTHS["even prompts"]
    steady = SteadyState(MODEL, PROFILES["plain"], lengths)
    choice = Choice(policy=Policy.STATIC, stages=stages, num_micro_batches=m)
    predicted = estimate_one(steady, choice, 16, 1)
    result = run(Static(16), lengths, PROFILES["plain"], stages, m, 16 * 120)
    at = starts(result)
    assert predicted["throughput_per_s"] == pytest.approx(16 * (len(at) - 1) / (at[-1] - at[0]), rel=0.02)
