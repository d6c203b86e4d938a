"""Drifted lengths have the moments asked for; latency inside a drift is no worse than at its rim."""

import numpy as np
import pytest

from exegpt.errors import ConfigError, DistributionError
from exegpt.workload.drift import drift_corners, drifted
from exegpt.workload.lengths import fixed_pmf, independent, joint, truncated_normal_pmf

TASKS = {
    "S": independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0]),
    "T": independent(truncated_normal_pmf(128, 81, 256)[0], truncated_normal_pmf(128, 68, 320)[0]),
    "skewed": independent(fixed_pmf(64), truncated_normal_pmf(8, 7, 60)[0]),
}


@pytest.fixture(scope="module")
def correlated():
    rng = np.random.default_rng(11)
    inputs = rng.integers(5, 200, size=3_000)
    outputs = np.maximum(1, (inputs * 0.7 + rng.normal(0, 15, size=3_000)).astype(int))
    return joint(np.column_stack([inputs, outputs]), description="made up")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mean", [0.7, 1.0, 1.15, 2.0])
@pytest.mark.parametrize("std", [0.5, 1.0, 1.3])
def test_moments_are_those_asked_for(task, mean, std):
    lengths = TASKS[task]
    found = drifted(lengths, mean=mean, std=std)
    # Stated in the docstring; the corrections stop there.
    assert found.mean_output == pytest.approx(mean * lengths.mean_output, abs=1e-6)
    assert found.std_output == pytest.approx(std * lengths.std_output, abs=1e-6)
    assert found.output_pmf[0] == 0
    assert found.mean_input == pytest.approx(lengths.mean_input)


def test_nothing_drifts_by_factors_of_one():
    assert drifted(TASKS["T"]).digest() == TASKS["T"].digest()


def test_whole_shift_moves_every_length_by_hand():
    lengths = independent(fixed_pmf(3), np.array([0, 0.25, 0.5, 0.25]))
    # The mean of 2 becomes 3 and the deviation stays: lengths 2, 3, 4.
    np.testing.assert_allclose(drifted(lengths, mean=1.5).output_pmf, [0, 0, 0.25, 0.5, 0.25], atol=1e-6)


def test_tail_passes_the_old_maximum():
    assert drifted(TASKS["S"], mean=1.3).max_output > TASKS["S"].max_output


def test_one_length_stays_one_and_is_shared_by_neighbours_between_whole_numbers():
    lengths = independent(fixed_pmf(10), fixed_pmf(10))
    assert drifted(lengths, mean=1.2, std=1.5).output_pmf[12] == pytest.approx(1)
    np.testing.assert_allclose(drifted(lengths, mean=1.25).output_pmf[12:], [0.5, 0.5])


@pytest.mark.parametrize(("mean", "std"), [(1.15, 1.0), (0.8, 1.3), (1.3, 0.7)])
def test_pairs_keep_their_inputs_and_correlation(correlated, mean, std):
    found = drifted(correlated, mean=mean, std=std)
    # One pair more or less per rounding direction, of 3000.
    assert found.mean_output == pytest.approx(mean * correlated.mean_output, rel=1e-3)
    assert found.std_output == pytest.approx(std * correlated.std_output, rel=2e-3)
    np.testing.assert_array_equal(np.sort(found.pairs[:, 0]), np.sort(correlated.pairs[:, 0]))
    # An affine map keeps it but for rounding. In the second case 29 % of the outputs are lifted to one
    # token, whatever their inputs.
    allowed = 0.03 if found.output_pmf[1] > 0.2 else 1e-3
    assert found.correlation == pytest.approx(correlated.correlation, abs=allowed)


@pytest.mark.parametrize("skew", [-0.4, -0.2, 0.0, 0.2, 0.4])
def test_skewed_outputs_keep_mean_and_deviation(skew):
    lengths = TASKS["T"]
    found = drifted(lengths, skew=skew)
    assert found.mean_output == pytest.approx(lengths.mean_output, abs=1e-6)
    assert found.std_output == pytest.approx(lengths.std_output, abs=1e-6)
    assert found.max_output <= lengths.max_output


def test_skewness_rises_with_the_skew_and_without_truncation_is_it():
    # Mean 200 and deviation 30: nothing is cut at 0 or 400.
    lengths = independent(fixed_pmf(10), truncated_normal_pmf(200, 30, 400)[0])
    for skew in (-0.4, 0.0, 0.4):
        pmf = drifted(lengths, skew=skew).output_pmf
        n = np.arange(len(pmf)) - lengths.mean_output
        assert pmf @ n**3 / lengths.std_output**3 == pytest.approx(skew, abs=2e-3)


def test_without_skew_the_paper_s_task_is_reproduced():
    # Its outputs are a truncated normal already.
    assert drifted(TASKS["T"], skew=0.0).output_pmf == pytest.approx(TASKS["T"].output_pmf, abs=1e-6)


def test_skewed_pairs_keep_the_order_of_outputs(correlated):
    found = drifted(correlated, skew=0.3)
    assert found.std_output == pytest.approx(correlated.std_output, rel=5e-3)
    assert found.correlation > 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean": 0.0}, "factor above 0"),
        ({"mean": np.nan}, "factor above 0"),
        ({"std": -1.0}, "at least 0"),
        ({"skew": 1.0}, "skewness 1.0"),
    ],
)
def test_impossible_factors_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        drifted(TASKS["S"], **arguments)


def test_outputs_shorter_than_a_token_are_refused():
    with pytest.raises(DistributionError, match="at least one"):
        drifted(independent(fixed_pmf(5), fixed_pmf(2)), mean=0.4)


def test_corners_are_the_rim():
    corners = drift_corners(TASKS["T"], 0.1)
    factors = {
        (round(c.mean_output / TASKS["T"].mean_output, 6), round(c.std_output / TASKS["T"].std_output, 6))
        for c in corners
    }
    assert factors == {(m, s) for m in (0.9, 1, 1.1) for s in (0.9, 1, 1.1)} - {(1, 1)}
    assert drift_corners(TASKS["T"], 0.0) == [TASKS["T"]]
    with pytest.raises(ConfigError, match=r"solver\.drift_margin"):
        drift_corners(TASKS["T"], 1.0)
