"""Mean encode times of batches that count prompts."""

import numpy as np
import pytest
import synthetic
from test_closed_form import LENGTHS, MODEL, PROFILES

from exegpt.simulator.forms.counted_batches import batch_encode_s, batch_encode_upper_s
from exegpt.simulator.placement import make_stages
from exegpt.simulator.serving import Serving
from exegpt.specs import Policy

STAGES = make_stages((6, 2), 1)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("lengths", ["S", "T"])
def test_one_prompt_takes_the_mean_over_all_lengths(lengths, profile):
    serving = Serving(MODEL, PROFILES[profile], LENGTHS[lengths])
    tokens = np.arange(1, serving.lengths.max_input + 1)
    each = serving.costs(STAGES).encode_s(1, tokens, tokens)
    found = batch_encode_s(serving, Policy.DISAGGREGATED, STAGES, np.ones(1))[0]
    # The mean prompt's time is the least: a coarse table of attention has more for it than on average.
    exact = np.maximum(serving.lengths.input_pmf[1:] @ each, serving.encode_s(STAGES, np.ones(1))[0])
    # Eight parts of the lengths, each at its mean: a cost that bends within one is a little more.
    assert found == pytest.approx(exact, rel=0.01)


def test_batches_of_several_prompts_take_the_mean_of_drawn_ones():
    serving = Serving(MODEL, PROFILES["plain"], LENGTHS["T"])
    pmf, rng = serving.lengths.input_pmf, np.random.default_rng(0)
    drawn = rng.choice(len(pmf), p=pmf, size=(4000, 3)).astype(float)
    rms = np.sqrt((drawn**2).mean(1))
    played = serving.costs(STAGES).encode_s(3, drawn.sum(1), rms).mean(0)
    found = batch_encode_s(serving, Policy.WAA, STAGES, np.array([3.0]))[0]
    # Means of 4,000 batches have an error of half a percent.
    assert found == pytest.approx(played, rel=0.015)


def test_weighed_batches_have_the_planned_tokens():
    serving = Serving(MODEL, PROFILES["plain"], LENGTHS["T"])
    batch = np.array([4.0, 30.0])
    assert np.array_equal(batch_encode_s(serving, Policy.WAA, STAGES, batch), serving.encode_s(STAGES, batch))


@pytest.mark.parametrize("policy", [Policy.WAA, Policy.DISAGGREGATED])
@pytest.mark.parametrize("seed", range(6))
def test_no_batch_of_a_box_takes_longer_than_the_upper_bound(seed, policy):
    rng = np.random.default_rng(seed)
    serving = Serving(MODEL, synthetic.wild_profile(MODEL, rng), LENGTHS["T"])
    low = rng.integers(1, 12, size=20).astype(float)
    high = low + rng.integers(0, 12, size=20)
    upper = batch_encode_upper_s(serving, policy, STAGES, low, high)
    for share in np.linspace(0, 1, 8):
        batch = np.rint(low + share * (high - low))
        assert (batch_encode_s(serving, policy, STAGES, batch) <= upper * (1 + 1e-12)).all()
