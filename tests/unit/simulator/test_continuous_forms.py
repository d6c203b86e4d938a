"""Closed forms of continuous batching and of static batches of ragged prompts, against long replays."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic
from test_closed_form import LENGTHS, MODEL, PLACEMENTS, PROFILES, make_requests, starts

from exegpt.errors import ConfigError
from exegpt.policies.chunked import Chunked
from exegpt.policies.iteration import Iteration
from exegpt.policies.static import Static
from exegpt.policies.static_hybrid import StaticHybrid
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.forms.turns import TurnSample, binomial_pmf, play
from exegpt.simulator.placement import make_stages
from exegpt.simulator.replay import replay
from exegpt.simulator.steady import Choice, SteadyState, estimate_one
from exegpt.specs import ModelFamily, Policy
from exegpt.workload.lengths import independent

pytestmark = pytest.mark.sweep

# Means over 240 sampled turns and over some thousand replayed ones, each uncertain by up to a percent.
THROUGHPUT_TOLERANCE = 0.025
LATENCY_TOLERANCE = 0.03


def with_probe_mass(lengths):
    """A tenth of the queries has the 99th percentile's length, which stays the 99th percentile."""
    probe = lengths.output_percentile(99)
    pmf = 0.9 * lengths.output_pmf
    pmf[probe] += 0.1
    return independent(lengths.input_pmf, pmf)


MIXED = {name: with_probe_mass(LENGTHS[name]) for name in ("S", "T")}


def steady_state(lengths, profile):
    steady = SteadyState(MODEL, PROFILES[profile], lengths)
    assert lengths.output_pmf[steady.bound_output_tokens] > 0.1
    return steady


def check_continuous(machine, choice, slots, budget, lengths, profile):
    """Throughput, and the latency of queries of the bound's length, in the middle of a replay."""
    steady = steady_state(MIXED[lengths], profile)
    predicted = estimate_one(steady, choice, slots, budget)
    num_requests = min(4000, max(720, slots * 60))
    costs = StageCosts(PROFILES[profile], MODEL, stage_shapes(choice.stages))
    result = replay(
        machine,
        costs,
        make_requests(MIXED[lengths], num_requests),
        num_micro_batches=choice.num_micro_batches,
        num_pages=10**7,
        page_size=16,
    )
    # Six generations until the slots are out of step with each other.
    first, last = 6 * slots, num_requests - 3 * slots
    begun = sorted(r.encode_start_s for r in result.records)
    throughput = (last - first) / (begun[last] - begun[first])
    probes = [
        r.finish_s - r.encode_start_s
        for r in result.records[first:last]
        if r.output_tokens == steady.bound_output_tokens
    ]
    assert len(probes) >= 20
    assert predicted["throughput_per_s"] == pytest.approx(throughput, rel=THROUGHPUT_TOLERANCE)
    assert predicted["latency_s"] == pytest.approx(np.mean(probes), rel=LATENCY_TOLERANCE)


@pytest.mark.parametrize(
    ("lengths", "profile", "place", "slots", "m"),
    [
        ("S", "slow bookkeeping", "one", 4, 1),
        ("S", "heavy head", "one tp 2", 9, 2),
        ("T", "plain", "one", 128, 1),
        ("S", "plain", "two", 32, 1),
        ("T", "plain", "two unequal", 64, 2),
        ("S", "heavy head", "two unequal", 32, 2),
        ("S", "plain", "three", 64, 3),
        ("S", "slow bookkeeping", "three", 16, 6),
        ("S", "slow bookkeeping", "four", 4, 4),
        ("T", "heavy head", "four", 64, 8),
    ],
)
def test_iteration_is_that_of_a_long_replay(lengths, profile, place, slots, m):
    counts, tp_size = PLACEMENTS[place]
    choice = Choice(policy=Policy.ITERATION, stages=make_stages(counts, tp_size), num_micro_batches=m)
    check_continuous(Iteration(slots, 16), choice, slots, 1, lengths, profile)


@pytest.mark.parametrize(
    ("lengths", "profile", "place", "slots", "m", "budget"),
    [
        # Slots bind.
        ("S", "slow bookkeeping", "one", 4, 1, 256),
        ("T", "plain", "one", 128, 1, 512),
        ("S", "slow bookkeeping", "four", 4, 4, 1024),
        ("S", "heavy head", "two", 32, 4, 512),
        ("S", "plain", "one tp 2", 9, 2, 256),
        # The budget binds, or both in turn.
        ("S", "plain", "one", 32, 1, 64),
        ("T", "heavy head", "two unequal", 64, 2, 64),
        ("S", "plain", "three", 64, 3, 128),
        ("S", "heavy head", "four", 128, 4, 256),
        ("S", "plain", "two", 64, 2, 512),
    ],
)
def test_chunked_is_that_of_a_long_replay(lengths, profile, place, slots, m, budget):
    counts, tp_size = PLACEMENTS[place]
    choice = Choice(policy=Policy.CHUNKED, stages=make_stages(counts, tp_size), num_micro_batches=m)
    check_continuous(Chunked(slots, budget), choice, slots, budget, lengths, profile)


def test_a_budget_below_the_rows_serves_nobody():
    steady = SteadyState(MODEL, PROFILES["plain"], LENGTHS["S"])
    choice = Choice(policy=Policy.CHUNKED, stages=make_stages((8,), 1), num_micro_batches=1)
    estimates = steady.estimate(choice, np.array([64, 64]), np.array([64, 128]))
    assert estimates.throughput_per_s[0] == 0
    assert np.isinf(estimates.latency_s).tolist() == [True, False]


def encoder_decoder():
    """A T5 of the tiny model's size, with the tables that its encoder and cross attention need."""
    model = synthetic.tiny_model(family=ModelFamily.T5, num_key_value_heads=4, hidden_act="relu")
    profile = synthetic.tiny_profile(model)
    layers = {
        t: replace(costs, encode_linear=costs.linear, cross_attention=costs.decode_attention)
        for t, costs in profile.layers.items()
    }
    return model, replace(profile, layers=layers)


def test_iteration_of_an_encoder_decoder_model_has_its_first_token_a_turn_later():
    model, profile = encoder_decoder()
    steady = SteadyState(model, profile, MIXED["S"])
    choice = Choice(policy=Policy.ITERATION, stages=make_stages((4, 4), 1), num_micro_batches=2)
    predicted = estimate_one(steady, choice, 24, 1)
    costs = StageCosts(profile, model, stage_shapes(choice.stages))
    result = replay(
        Iteration(24, 16),
        costs,
        make_requests(MIXED["S"], 1440),
        num_micro_batches=2,
        num_pages=10**7,
        page_size=16,
        first_token_at_encoding=False,
    )
    middle = result.records[144:1368]
    first = np.mean([r.first_token_s - r.encode_start_s for r in middle])
    probes = [r.finish_s - r.encode_start_s for r in middle if r.output_tokens == steady.bound_output_tokens]
    assert predicted["latency_s"] == pytest.approx(np.mean(probes), rel=LATENCY_TOLERANCE)
    # A few turns, each of another length: more noise than in the sum of sixty.
    assert predicted["ttft_s"] == pytest.approx(first, rel=0.05)


def test_prompts_of_encoder_decoder_models_are_not_split():
    steady = SteadyState(*encoder_decoder(), LENGTHS["S"])
    choice = Choice(policy=Policy.CHUNKED, stages=make_stages((8,), 1), num_micro_batches=1)
    with pytest.raises(ConfigError, match="its encoder attends to the whole prompt"):
        steady.estimate(choice, np.array([8]), np.array([128]))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("place", "batch", "m", "splits"),
    [
        ("one", 8, 1, 1),
        ("two unequal", 16, 2, 1),
        ("three", 18, 4, 1),
        ("four", 32, 4, 1),
        ("two", 32, 1, 2),
        ("three", 24, 3, 2),
        ("four", 32, 1, 4),
    ],
)
def test_static_of_ragged_prompts_is_that_of_a_long_replay(profile, place, batch, m, splits):
    counts, tp_size = PLACEMENTS[place]
    stages = make_stages(counts, tp_size)
    policy = Policy.STATIC if splits == 1 else Policy.STATIC_HYBRID
    choice = Choice(
        policy=policy,
        stages=stages,
        num_micro_batches=m,
        encode_micro_batches=None if splits == 1 else m * splits,
    )
    predicted = estimate_one(SteadyState(MODEL, PROFILES[profile], LENGTHS["T"]), choice, batch, 1)
    machine = Static(batch) if splits == 1 else StaticHybrid(batch, m * splits)
    costs = StageCosts(PROFILES[profile], MODEL, stage_shapes(stages))
    requests = make_requests(LENGTHS["T"], 30 * batch)
    result = replay(machine, costs, requests, num_micro_batches=m, num_pages=10**7, page_size=16)
    at = starts(result)
    # Thirty batches' longest outputs; the closed form deals fractions of a query.
    assert predicted["throughput_per_s"] == pytest.approx(batch * (len(at) - 1) / (at[-1] - at[0]), rel=0.02)


def test_joining_prompts_are_binomial_and_their_lengths_the_distribution():
    lengths = LENGTHS["T"]
    sample = TurnSample(lengths, 1 / 128)
    joining = sample.joining(np.array([64, 400]), np.array([0, 0]))
    assert joining.mean(0) == pytest.approx([64 / 128, 400 / 128], rel=0.02)
    assert joining.var(0) == pytest.approx([64 / 128, 400 / 128], rel=0.1)
    tokens, squares = sample.prompts(2)
    # Of the turns in which most join, a small part too has the distribution's mean.
    most = np.argsort(sample.points)[-24:]
    assert tokens[most, 1].mean() == pytest.approx(lengths.mean_input, rel=0.05)
    assert squares[:, 1].mean() == pytest.approx(lengths.mean_square_input, rel=0.02)
    assert np.corrcoef(tokens[:, 1], tokens[:, 2] - tokens[:, 1])[0, 1] == pytest.approx(0, abs=0.25)
    assert binomial_pmf(5, 0.3).sum() == pytest.approx(1)


def test_equal_turns_play_as_the_pipeline_rule_says():
    job = np.broadcast_to(np.array([1.0, 3.0, 2.0])[:, None], (12, 3, 1))
    for m, period in ((1, 6.0), (2, 6.0), (3, 9.0), (4, 12.0)):
        played = play([job, 0 * job], [job, 0 * job], m)
        assert played.turn_s[0] * m == pytest.approx(period)
        assert played.first_job_s[0] >= 6.0 - 1e-9


def test_more_slots_take_no_less_time_per_turn():
    """What the bounds rest on, on costs that do nothing but rise."""
    profile = synthetic.wild_profile(MODEL, np.random.default_rng(5))
    steady = SteadyState(MODEL, profile, LENGTHS["S"])
    choice = Choice(policy=Policy.ITERATION, stages=make_stages((4, 4), 1), num_micro_batches=2)
    slots = np.arange(2, 200, 2)
    estimates = steady.estimate(choice, slots, np.ones_like(slots))
    assert np.isfinite(estimates.cycle_s).any()
    memory = estimates.memory.total_bytes.max(-1)
    assert (np.diff(memory) > 0).all()
