"""The spread of latency against enumeration, by hand, and against the probes of a replay."""

import numpy as np
import pytest
import synthetic

from exegpt.errors import ConfigError
from exegpt.policies.rra import RRA
from exegpt.simulator.choice import Choice
from exegpt.simulator.cohorts import Slopes, cohort_spread_s
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.fluctuation import (
    latency_spread,
    latency_std_s,
    sides_spread,
)
from exegpt.simulator.placement import make_stages
from exegpt.simulator.replay import replay
from exegpt.simulator.steady import SteadyState
from exegpt.specs import Policy
from exegpt.workload.lengths import independent, joint
from exegpt.workload.pmf import fixed_pmf, truncated_normal_pmf
from exegpt.workload.requests import sample_requests, with_probes

pytestmark = pytest.mark.sweep

MODEL = synthetic.tiny_model()
PROFILES = {
    "plain": synthetic.tiny_profile(MODEL),
    "heavy head": synthetic.tiny_profile(MODEL, head_s=8e-3),
    "slow bookkeeping": synthetic.tiny_profile(MODEL, overhead_s=2e-3, linear_s=1e-4),
}
S = independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0])
PAIRS = joint(np.array([[3, 1], [5, 2], [4, 4], [9, 4], [11, 7], [20, 9], [2, 9]]))
Z_90 = 1.2816


def rra(counts=(8,), m=1):
    return Choice(policy=Policy.RRA, stages=make_stages(counts, 1), num_micro_batches=m)


@pytest.mark.parametrize("n_d", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("percentile", [10, 50, 100])
def test_cohorts_by_enumeration(n_d, percentile):
    serving = SteadyState(MODEL, PROFILES["plain"], PAIRS, length_percentile=percentile)
    ages = serving.completion.max_iterations
    rng = np.random.default_rng(n_d)
    by_iteration = rng.random((3, n_d))
    slopes = Slopes(
        query_s=by_iteration[:1, np.arange(ages) % n_d],
        context_s=by_iteration[1:2, np.arange(ages) % n_d],
        input_s=by_iteration[2:, np.arange(ages) % n_d],
        prompt_s=np.array([0.7]),
        square_s=np.array([0.0]),
    )
    batch = 5.0
    ends = serving.bound_output_tokens - 1

    def cost(input_tokens, output_tokens, cohort):
        """What a query of a cohort adds, iteration by iteration of the bound's query."""
        total = 0.7 * input_tokens if cohort >= 0 else 0.0
        for t in range(ends):
            age = t - cohort * n_d
            if 0 <= age < output_tokens - 1:
                q, c, i = by_iteration[:, t % n_d]
                total += q + c * (1 + age) + i * input_tokens
        return total

    variance = 0.0
    for cohort in range(-20, max(ends - 1, 0) // n_d + 1):
        values = [cost(i, o, cohort) for i, o in PAIRS.pairs]
        variance += (batch - (cohort == 0)) * np.var(values)
    own = cost(PAIRS.mean_input, serving.bound_output_tokens, 0)
    mean = np.mean([cost(i, o, 0) for i, o in PAIRS.pairs])
    shift, std = cohort_spread_s(serving, slopes, np.array([batch]), n_d)
    assert std == pytest.approx(np.sqrt(variance), rel=1e-9)
    assert shift == pytest.approx(own - mean, rel=1e-9)


def test_fixed_lengths_do_not_vary():
    serving = SteadyState(MODEL, PROFILES["plain"], independent(fixed_pmf(64), fixed_pmf(40)))
    spread = latency_spread(serving, rra(), np.array([8, 16]), np.array([8, 39]))
    # Differences of sums of squares leave rounding.
    assert spread.std_s == pytest.approx(0, abs=1e-6)
    assert spread.shift_s == pytest.approx(0, abs=1e-9)


def test_outputs_of_one_token_vary_with_the_prompts_encoded_together():
    lengths = independent(S.input_pmf, fixed_pmf(1))
    spread = latency_spread(
        SteadyState(MODEL, PROFILES["plain"], lengths), rra(), np.array([1, 5]), np.array([1, 1])
    )
    # Alone a query is encoded amid nobody; its own prompt is fixed.
    assert spread.std_s[0] == 0
    assert spread.std_s[1] > 0


def test_spread_is_relatively_smaller_in_larger_batches():
    serving = SteadyState(MODEL, PROFILES["plain"], S)
    batches = np.array([4, 16, 64])
    share = (
        latency_std_s(serving, rra(), batches, np.full(3, 8))
        / serving.estimate(rra(), batches, np.full(3, 8)).latency_s
    )
    assert (np.diff(share) < 0).all()


def test_beyond_the_profile_it_is_infinite():
    serving = SteadyState(MODEL, PROFILES["plain"], S)
    assert np.isinf(latency_std_s(serving, rra(), np.array([4000]), np.array([2]))).all()


def test_static_varies_with_its_prompts_alone():
    choice = Choice(policy=Policy.STATIC, stages=make_stages((8,), 1), num_micro_batches=1)
    even = independent(fixed_pmf(256), S.output_pmf)
    batches = np.array([8, 16])
    ragged, same = (
        latency_std_s(SteadyState(MODEL, PROFILES["plain"], x), choice, batches, np.ones(2, dtype=int))
        for x in (S, even)
    )
    assert same == pytest.approx(0, abs=1e-9)
    assert (ragged > 0).all()


def test_stationary_pool_is_rra_with_one_iteration_a_cycle():
    serving = SteadyState(MODEL, PROFILES["plain"], independent(fixed_pmf(256), S.output_pmf))
    # Prompts of one length: encoding has no variance, so the two differ only in the own cohort's size.
    pool = np.array([4 * serving.completion.mean_iterations])
    waa = Choice(policy=Policy.WAA, stages=make_stages((8,), 1), num_micro_batches=1)
    found = sides_spread(serving, waa, pool)
    expected = latency_spread(serving, rra(), np.array([4]), np.array([1]))
    assert found.std_s == pytest.approx(expected.std_s, rel=1e-9)


def test_other_policies_are_refused():
    choice = Choice(policy=Policy.CHUNKED, stages=make_stages((8,), 1), num_micro_batches=1)
    serving = SteadyState(MODEL, PROFILES["plain"], S)
    with pytest.raises(ConfigError, match=r"solver\.confidence.*CHUNKED"):
        latency_std_s(serving, choice, np.array([8]), np.array([1]))


def probe_latencies(profile, counts, m, batch, n_d, share, seeds):
    """Latencies of probes among drawn requests in a long replay, start and end left out."""
    lengths = S
    steady = SteadyState(MODEL, profile, lengths)
    fill = -(-steady.completion.max_iterations // n_d)
    total = batch * (2 * fill + 240)
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        requests = sample_requests(lengths, total, rng)
        probed = with_probes(requests, round(total * share), steady.bound_output_tokens, rng)
        ids = {new.id for new, old in zip(probed, requests, strict=True) if new is not old}
        costs = StageCosts(profile, MODEL, stage_shapes(make_stages(counts, 1)))
        result = replay(RRA(batch, n_d), costs, probed, num_micro_batches=m, num_pages=10**7, page_size=16)
        middle = range(batch * fill, total - batch * (fill + 2))
        found += [r.finish_s - r.encode_start_s for r in result.records if r.id in ids and r.id in middle]
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "counts", "m", "batch", "n_d"),
    [
        ("plain", (8,), 1, 16, 16),
        ("heavy head", (8,), 1, 24, 30),
        ("plain", (4, 4), 2, 24, 16),
        ("slow bookkeeping", (6, 2), 2, 16, 10),
    ],
)
def test_share_of_probes_within_the_confidence(profile, counts, m, batch, n_d):
    share = 1 / (4 * batch)
    latencies = probe_latencies(PROFILES[profile], counts, m, batch, n_d, share, seeds=range(3))
    # The probes are part of the load, so the plan has them in its lengths.
    bound_tokens = S.output_percentile(99)
    pmf = S.output_pmf * (1 - share)
    pmf[bound_tokens] += share
    steady = SteadyState(MODEL, PROFILES[profile], independent(S.input_pmf, pmf))
    steady.bound_output_tokens = bound_tokens
    at = np.array([batch]), np.array([n_d])
    spread = latency_spread(steady, rra(counts, m), *at)
    limit = steady.estimate(rra(counts, m), *at).latency_s + spread.at(Z_90)
    n = len(latencies)
    assert n > 150
    # Three deviations of a binomial count. The mean that it stands on is within 1 % of a replay's with
    # up to two stages (with more, micro-batches stall each other, and the closed form is up to 5 % low).
    assert np.mean(latencies <= limit) >= 0.9 - 3 * np.sqrt(0.9 * 0.1 / n)
    # Neither blind nor absurdly wide: a deviation of n values is itself known to 1 / sqrt(2 n), 5 % here.
    assert 0.8 < spread.std_s[0] / latencies.std() < 1.3
