import json

import numpy as np
import pytest

from exegpt.errors import DistributionError
from exegpt.workload.lengths import (
    RequestLengths,
    clip_outputs,
    fixed_pmf,
    independent,
    joint,
    reject_long_inputs,
    truncated_normal_pmf,
)

PAIRS = np.array([[10, 2], [30, 2], [50, 4], [70, 8]])


@pytest.fixture
def correlated():
    rng = np.random.default_rng(11)
    inputs = rng.integers(5, 200, size=3_000)
    outputs = np.maximum(1, (inputs * 0.7 + rng.normal(0, 15, size=3_000)).astype(int))
    return joint(np.column_stack([inputs, outputs]), description="made up")


def test_joint_moments_by_hand():
    lengths = joint(PAIRS)
    assert lengths.mean_input == pytest.approx(40)
    assert lengths.mean_output == pytest.approx(4)
    assert lengths.mean_square_input == pytest.approx((100 + 900 + 2500 + 4900) / 4)
    assert (lengths.max_input, lengths.max_output) == (70, 8)
    np.testing.assert_allclose(lengths.mean_input_by_output, [0, 0, 20, 0, 50, 0, 0, 0, 70])
    np.testing.assert_allclose(lengths.mean_square_input_by_output, [0, 0, 500, 0, 2500, 0, 0, 0, 4900])


def test_joint_statistics_equal_numpys(correlated):
    inputs, outputs = correlated.pairs.T
    assert correlated.std_input == pytest.approx(inputs.std())
    assert correlated.std_output == pytest.approx(outputs.std())
    assert correlated.correlation == pytest.approx(np.corrcoef(inputs, outputs)[0, 1])
    assert correlated.input_percentile(90) == np.percentile(inputs, 90, method="inverted_cdf")
    assert correlated.output_percentile(99) == np.percentile(outputs, 99, method="inverted_cdf")


def test_independent_has_no_correlation():
    output_pmf, _ = truncated_normal_pmf(32, 13, 80)
    lengths = independent(truncated_normal_pmf(256, 115, 512)[0], output_pmf)
    assert lengths.correlation == pytest.approx(0, abs=1e-9)
    assert lengths.mean_input_by_output[40] == pytest.approx(lengths.mean_input)
    assert lengths.pairs is None


def test_constant_lengths_have_no_correlation():
    assert independent(fixed_pmf(5), fixed_pmf(7)).correlation == 0


def test_samples_keep_pairs_together_and_follow_the_seed(correlated):
    inputs, outputs = correlated.sample(np.random.default_rng(5), 2_000)
    assert inputs.dtype == outputs.dtype == np.int64
    observed = set(map(tuple, correlated.pairs.tolist()))
    assert set(zip(inputs.tolist(), outputs.tolist(), strict=True)) <= observed
    again = correlated.sample(np.random.default_rng(5), 2_000)
    np.testing.assert_array_equal(again, (inputs, outputs))


def test_independent_samples_follow_the_distribution():
    lengths = independent(fixed_pmf(9), truncated_normal_pmf(32, 13, 80)[0])
    inputs, outputs = lengths.sample(np.random.default_rng(1), 20_000)
    assert (inputs == 9).all()
    # Four standard errors of a mean of 20,000 draws.
    assert outputs.mean() == pytest.approx(lengths.mean_output, abs=4 * lengths.std_output / np.sqrt(20_000))
    assert outputs.min() >= 1


def test_clipping_moves_mass_to_the_limit():
    lengths = clip_outputs(joint(PAIRS), 4)
    np.testing.assert_allclose(lengths.output_pmf, [0, 0, 0.5, 0, 0.5])
    assert lengths.mean_input_by_output[4] == pytest.approx(60)
    assert lengths.mean_input == pytest.approx(40)
    assert "25.000% of the outputs stop at the limit of 4 tokens" in lengths.notes[0]


def test_clipping_independent_lengths():
    lengths = clip_outputs(independent(fixed_pmf(9), truncated_normal_pmf(32, 13, 80)[0]), 40)
    assert lengths.max_output == 40
    assert lengths.output_pmf.sum() == pytest.approx(1)
    assert lengths.mean_input_by_output[40] == pytest.approx(9)
    assert clip_outputs(lengths, 40) is lengths


def test_long_inputs_are_refused_and_the_rest_renormalised():
    lengths = reject_long_inputs(joint(PAIRS), 50)
    assert lengths.mean_input == pytest.approx(30)
    np.testing.assert_array_equal(lengths.pairs, PAIRS[:3])
    assert "25.000% of the inputs are longer than 50 tokens" in lengths.notes[-1]
    alone = independent(np.array([0, 0.5, 0, 0.5]), fixed_pmf(3))
    assert reject_long_inputs(alone, 2).mean_input == 1
    assert reject_long_inputs(alone, 3) is alone


def test_no_input_fits():
    with pytest.raises(
        DistributionError, match=r"no input fits into 9 tokens; the shortest of the workload has 10"
    ):
        reject_long_inputs(joint(PAIRS), 9)
    with pytest.raises(DistributionError, match="longer window"):
        reject_long_inputs(independent(fixed_pmf(5), fixed_pmf(3)), 4)


def test_bad_output_limit():
    with pytest.raises(DistributionError, match="at least 1 token"):
        clip_outputs(joint(PAIRS), 0)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (np.empty((0, 2), dtype=int), "there are none"),
        (np.array([[1, 2, 3]]), "expected \\(input, output\\) pairs"),
        (np.array([[4, 0]]), "0 is below 1 token"),
        (np.array([[0, 4]]), "0 is below 1 token"),
        (np.array([[1.5, 2.0]]), "whole numbers"),
    ],
)
def test_bad_pairs(pairs, message):
    with pytest.raises(DistributionError, match=message):
        joint(pairs)


def test_conditional_means_must_agree_with_the_inputs():
    good = joint(PAIRS)
    with pytest.raises(DistributionError, match="averages to 80, but the input lengths to 40"):
        RequestLengths(
            input_pmf=good.input_pmf,
            output_pmf=good.output_pmf,
            mean_input_by_output=good.mean_input_by_output * 2,
            mean_square_input_by_output=good.mean_square_input_by_output,
        )
    with pytest.raises(DistributionError, match="expected 9 numbers"):
        RequestLengths(
            input_pmf=good.input_pmf,
            output_pmf=good.output_pmf,
            mean_input_by_output=good.mean_input_by_output[:3],
            mean_square_input_by_output=good.mean_square_input_by_output,
        )


def test_digest_follows_the_distribution(correlated):
    same = joint(correlated.pairs[::-1], description="another name")
    assert correlated.digest() == same.digest()
    shuffled = correlated.pairs.copy()
    np.random.default_rng(0).shuffle(shuffled[:, 0])
    # Same marginals, another correlation.
    assert joint(shuffled).digest() != correlated.digest()
    assert clip_outputs(correlated, 20).digest() != correlated.digest()


def test_summary_is_plain():
    lengths = clip_outputs(joint(PAIRS, description="four requests"), 4)
    summary = json.loads(json.dumps(lengths.summary()))
    assert summary["description"] == "four requests"
    assert summary["digest"] == lengths.digest()
    assert summary["input"] == {
        "mean": 40,
        "std": pytest.approx(np.sqrt(500)),
        "p50": 30,
        "p90": 70,
        "p99": 70,
        "max": 70,
    }
    assert summary["output"]["max"] == 4
    assert len(summary["notes"]) == 1


def test_arrays_cannot_be_changed():
    lengths = joint(PAIRS)
    for values in (lengths.input_pmf, lengths.output_pmf, lengths.mean_input_by_output, lengths.pairs):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1
