import numpy as np
import pytest

from exegpt.errors import ConfigError
from exegpt.workload.lengths import fixed_pmf, independent, joint
from exegpt.workload.requests import (
    closed_arrivals,
    poisson_arrivals,
    sample_requests,
    trace_arrivals,
    with_probes,
)

PAIRS = np.array([[10, 2], [30, 3], [50, 4], [70, 8]])


def test_requests_follow_lengths_and_seed():
    lengths = joint(PAIRS)
    requests = sample_requests(lengths, 50, np.random.default_rng(1), vocab_size=17)
    assert [request.id for request in requests] == list(range(50))
    for request in requests:
        assert [request.input_tokens, request.forced_output_tokens] in PAIRS.tolist()
        assert request.max_output_tokens == request.forced_output_tokens
        assert len(request.token_ids) == request.input_tokens
        assert all(0 <= token < 17 for token in request.token_ids)
        assert request.arrival_s == 0
        assert request.prompt is None
    assert requests == sample_requests(lengths, 50, np.random.default_rng(1), vocab_size=17)
    assert requests != sample_requests(lengths, 50, np.random.default_rng(2), vocab_size=17)


def test_lengths_do_not_depend_on_whether_ids_are_drawn():
    lengths = joint(PAIRS)
    with_ids = sample_requests(lengths, 20, np.random.default_rng(1), vocab_size=17)
    without = sample_requests(lengths, 20, np.random.default_rng(1))
    assert [r.input_tokens for r in with_ids] == [r.input_tokens for r in without]
    assert [r.forced_output_tokens for r in with_ids] == [r.forced_output_tokens for r in without]
    assert all(request.token_ids is None for request in without)


def test_poisson_arrivals():
    arrivals = poisson_arrivals(4.0, 10_000, np.random.default_rng(9))
    gaps = np.diff(arrivals, prepend=0)
    assert (gaps > 0).all()
    # Exponential gaps have mean and deviation 1 / rate; five standard errors of 10,000 draws.
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    requests = sample_requests(joint(PAIRS), 3, np.random.default_rng(0), arrivals_s=arrivals[:3])
    assert [request.arrival_s for request in requests] == arrivals[:3].tolist()


def test_closed_and_trace_arrivals():
    assert closed_arrivals(3).tolist() == [0, 0, 0]
    assert trace_arrivals(np.array([0.0, 1.5, 2.0]), 2).tolist() == [0, 1.5]


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_bad_rate(rate):
    with pytest.raises(ConfigError, match=r"workload\.rate_per_s"):
        poisson_arrivals(rate, 3, np.random.default_rng(0))


def test_bad_trace_arrivals():
    with pytest.raises(ConfigError, match="no arrival times; use closed or poisson"):
        trace_arrivals(None, 2)
    with pytest.raises(ConfigError, match=r"workload\.num_requests=3: the trace has 2 arrivals"):
        trace_arrivals(np.array([0.0, 1.0]), 3)


@pytest.mark.parametrize("arrivals", [[0.0], [0.0, 2.0, 1.0], [0.0, 1.0, float("nan")]])
def test_bad_arrivals(arrivals):
    with pytest.raises(ConfigError, match="expected 3 rising numbers"):
        sample_requests(joint(PAIRS), 3, np.random.default_rng(0), arrivals_s=np.array(arrivals))


def test_no_requests():
    with pytest.raises(ConfigError, match=r"workload\.num_requests=0"):
        sample_requests(joint(PAIRS), 0, np.random.default_rng(0))


@pytest.mark.parametrize(("n", "num_probes"), [(100, 7), (10, 10), (30, 1), (5, 0)])
def test_probes_are_spread_evenly(n, num_probes):
    requests = sample_requests(independent(fixed_pmf(5), fixed_pmf(3)), n, np.random.default_rng(0))
    probed = with_probes(requests, num_probes, 63, np.random.default_rng(4))
    places = [index for index, request in enumerate(probed) if request.forced_output_tokens == 63]
    # One in each equal part.
    parts = [
        sum(n * part // num_probes <= p < n * (part + 1) // num_probes for p in places)
        for part in range(num_probes)
    ]
    assert parts == [1] * num_probes
    assert all(probed[place].max_output_tokens == 63 for place in places)
    others = set(range(n)) - set(places)
    assert all(probed[index] == requests[index] for index in others)
    assert [request.id for request in probed] == list(range(n))
    assert probed == with_probes(requests, num_probes, 63, np.random.default_rng(4))


def test_bad_probes():
    requests = sample_requests(joint(PAIRS), 4, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"runner\.num_probes=5: must lie in 0\.\.4"):
        with_probes(requests, 5, 63, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="probe length 0"):
        with_probes(requests, 1, 0, np.random.default_rng(0))
