import subprocess
import sys

import numpy as np
import pytest
from scipy import special, stats

from exegpt.errors import DistributionError
from exegpt.workload.pmf import (
    _log_normal_cdf,
    checked_pmf,
    empirical_pmf,
    fixed_pmf,
    percentile,
    truncated_normal_pmf,
)

# Paper, table 3: mean, standard deviation, maximum and 99th percentile of the outputs.
PAPER_OUTPUTS = {
    "S": (32, 13, 80, 63),
    "T": (128, 68, 320, 292),
    "G": (192, 93, 480, 417),
    "C1": (64, 30, 160, 137),
    "C2": (256, 134, 640, 579),
}


def moments_before_rounding(pmf, mean, std):
    """Moments of the continuous variable, from those of its rounding up.

    Rounding up adds a nearly uniform half token (Sheppard): 1/2 to the mean, 1/12 to the variance.
    """
    lengths = np.arange(len(pmf))
    found = pmf @ lengths
    return found - 0.5, np.sqrt(pmf @ (lengths - found) ** 2 - 1 / 12)


@pytest.mark.parametrize("task", PAPER_OUTPUTS)
def test_paper_99th_percentiles(task):
    mean, std, maximum, p99 = PAPER_OUTPUTS[task]
    pmf, note = truncated_normal_pmf(mean, std, maximum)
    assert note is None
    assert percentile(pmf, 99) == p99
    assert len(pmf) == maximum + 1
    assert pmf[0] == 0


@pytest.mark.parametrize(
    ("mean", "std", "maximum"),
    [
        (32, 13, 80),
        (256, 134, 640),
        (64, 23, 128),
        (512, 252, 1024),
        (20, 18, 4000),
        (980, 17, 1000),
        (500, 30, 1000),
    ],
)
def test_moments_hold_after_truncation(mean, std, maximum):
    pmf, note = truncated_normal_pmf(mean, std, maximum)
    assert note is None
    # Sheppard's correction is exact to second order in 1 / std only; the density's edge adds the rest.
    np.testing.assert_allclose(moments_before_rounding(pmf, mean, std), (mean, std), rtol=2e-3)


def test_shape_is_that_of_scipys_truncated_normal():
    pmf, _ = truncated_normal_pmf(32, 13, 80)
    # Parent found by hand from the table's moments (31.675, 13.4186).
    parent = stats.truncnorm(-31.6750594 / 13.4185658, (80 - 31.6750594) / 13.4185658, 31.6750594, 13.4185658)
    assert parent.mean() == pytest.approx(32, abs=1e-5)
    assert parent.std() == pytest.approx(13, abs=1e-5)
    np.testing.assert_allclose(pmf[1:], np.diff(parent.cdf(np.arange(81))), atol=1e-8)


@pytest.mark.parametrize(
    ("mean", "std", "maximum"), [(256, 252, 512), (128, 81, 256), (64, 37.2, 128), (10, 10, 1000)]
)
def test_impossible_moments_become_parent_parameters(mean, std, maximum):
    pmf, note = truncated_normal_pmf(mean, std, maximum)
    assert note is not None
    assert f"mean {mean:g} and standard deviation {std:g}" in note
    parent = stats.truncnorm((0 - mean) / std, (maximum - mean) / std, mean, std)
    np.testing.assert_allclose(pmf[1:], np.diff(parent.cdf(np.arange(maximum + 1))), atol=1e-12)


def test_widest_possible_truncated_normal_is_told_from_impossible_ones():
    # On [0, 128] around its middle the limit is the uniform's 128 / sqrt(12) = 36.95.
    assert truncated_normal_pmf(64, 36.9, 128)[1] is None
    assert truncated_normal_pmf(64, 37.0, 128)[1] is not None


def test_parent_far_outside_the_range_keeps_an_exponential_shape():
    pmf, note = truncated_normal_pmf(10, 9.99, 100_000)
    assert note is None
    ratios = pmf[2:12] / pmf[1:11]
    np.testing.assert_allclose(ratios, np.exp(-1 / 10), rtol=2e-3)


def test_minimum_and_zero_deviation():
    pmf, _ = truncated_normal_pmf(50, 10, 80, minimum=20)
    assert np.flatnonzero(pmf)[0] == 21
    point, note = truncated_normal_pmf(31.5, 0, 80)
    assert (np.flatnonzero(point) == [32]).all()
    assert note is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 10), r"mean length 0 must lie in \(0, 10\]"),
        ((11, 1, 10), "mean length 11"),
        ((float("nan"), 1, 10), "mean length nan"),
        ((5, -1, 10), "standard deviation -1"),
        ((5, float("inf"), 10), "standard deviation inf"),
        ((5, 1, 0), "need 0 <= minimum < maximum"),
    ],
)
def test_bad_normals(arguments, message):
    with pytest.raises(DistributionError, match=message):
        truncated_normal_pmf(*arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected a list of probabilities"),
        ([[0.0, 1.0]], "array of shape"),
        ([0.0, 1.5, -0.5], "the probability of 2 tokens is -0.5"),
        ([0.0, float("nan"), 1.0], "the probability of 1 tokens is nan"),
        ([0.0, float("inf")], "the probability of 1 tokens is inf"),
        ([0.0, 0.5, 0.4], r"sum to 0.9, not to 1 within 1e-09"),
        ([0.0, 1.0 + 3e-9], "not to 1"),
        ([0.0, 0.0], "no length has any probability"),
        ([0.25, 0.75], "length 0 has probability 0.25"),
    ],
)
def test_what_is_no_distribution(values, message):
    with pytest.raises(DistributionError, match=message):
        checked_pmf("outputs", np.array(values))


def test_checked_pmf_trims_and_is_read_only():
    pmf = checked_pmf("outputs", np.array([0, 0.5, 0.5 + 5e-10, 0, 0]))
    assert len(pmf) == 3
    assert pmf.sum() == pytest.approx(1, abs=1e-15)
    with pytest.raises(ValueError, match="read-only"):
        pmf[1] = 0


@pytest.mark.parametrize("q", [0.001, 1, 50, 99, 99.9, 100])
def test_percentiles_of_a_point_mass(q):
    assert percentile(fixed_pmf(17), q) == 17


def test_percentiles_survive_rounding():
    # Cumulated tenths: 0.7 and 0.9 are not what the sum of float64 tenths gives.
    pmf = np.array([0.0] + [0.1] * 10)
    assert [percentile(pmf, q) for q in (10, 30, 60, 70, 71, 90, 99, 100)] == [1, 3, 6, 7, 8, 9, 10, 10]


@pytest.mark.parametrize("q", [0, -1, 100.5, float("nan")])
def test_percentiles_outside_the_range(q):
    with pytest.raises(DistributionError, match=r"must lie in \(0, 100\]"):
        percentile(fixed_pmf(3), q)


def test_percentiles_equal_numpys_on_samples():
    values = np.random.default_rng(3).geometric(0.01, size=4_001)
    pmf = empirical_pmf(values)
    for q in (1, 25, 50, 90, 99, 99.9):
        assert percentile(pmf, q) == np.percentile(values, q, method="inverted_cdf")


@pytest.mark.parametrize(
    ("values", "message"), [([], "there are none"), ([1.5], "whole numbers"), ([3, 0], "0 is below 1 token")]
)
def test_bad_observations(values, message):
    with pytest.raises(DistributionError, match=message):
        empirical_pmf(np.array(values) if values else [])


def test_bad_fixed_length():
    with pytest.raises(DistributionError, match="at least 1 token"):
        fixed_pmf(0)


def test_slow_libraries_are_imported_only_where_used():
    modules = "completion, lengths, pmf, prompts, requests, servegen, traces"
    code = (
        f"import sys; from exegpt.workload import {modules}; print({{'scipy', 'pyarrow'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_the_normal_tail_is_scipys():
    z = np.concatenate([np.linspace(-300, 12, 1000), [-37.0, np.nextafter(-37.0, 0.0)]])
    # The masses are differences of exp of it: 1e-10 in the logarithm is 1e-10 of a tail.
    np.testing.assert_allclose(_log_normal_cdf(z), special.log_ndtr(z), rtol=1e-12, atol=1e-15)
