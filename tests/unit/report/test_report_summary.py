"""The run record against hand-worked figures."""

import json

import numpy as np
import pytest

from exegpt.events import RequestRecord
from exegpt.report.result_file import plain, relative_errors, summarise_run


def request(number, start, tokens, *, arrival=0.0, inputs=10, reason="length", status="ok"):
    return RequestRecord(
        number,
        inputs,
        arrival,
        encode_start_s=start,
        token_s=list(tokens),
        status=status,
        finish_reason=reason,
    )


def test_hand_worked_run():
    records = [
        request(0, 1.0, [1.5, 2.0, 3.0], arrival=0.5, inputs=10),
        request(1, 1.0, [1.5], arrival=0.0, inputs=20),
        request(2, 3.0, [4.0, 5.0], arrival=2.0, inputs=30),
    ]
    run = summarise_run(records, [])
    assert (run["num_requests"], run["num_completed"], run["num_failed"]) == (3, 3, 0)
    assert (run["input_tokens"], run["output_tokens"]) == (60, 6)
    assert run["wall_s"] == 4.0
    assert run["throughput_per_s"] == 3 / 4
    assert run["throughput_tokens_per_s"] == 6 / 4
    # Latencies 2, 0.5, 2 s from encode start; 2.5, 1.5, 3 s from arrival.
    assert run["latency_s"]["mean"] == pytest.approx(1.5)
    assert run["latency_s"]["p50"] == 2.0
    assert run["e2e_latency_s"]["max"] == 3.0
    assert run["ttft_s"] == pytest.approx({"mean": 2 / 3, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0})
    # Only requests 0 (gaps 0.5, 1) and 2 (gap 1) have further tokens.
    assert run["tpot_s"]["mean"] == pytest.approx((0.75 + 1.0) / 2)
    assert run["inter_token_s"]["max"] == pytest.approx(
        dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 1.0)
    )
    assert run["inter_token_s"]["p50"]["mean"] == pytest.approx((0.75 + 1.0) / 2)


def test_percentiles_are_those_of_numpy():
    rng = np.random.default_rng(3)
    latencies = rng.exponential(size=101)
    run = summarise_run([request(i, 0.0, [value]) for i, value in enumerate(latencies)], [])
    ranked = np.sort(latencies)
    # With 101 values the percentiles are order statistics.
    assert run["latency_s"]["p90"] == pytest.approx(ranked[90])
    assert run["latency_s"]["p99"] == pytest.approx(ranked[99])
    assert run["latency_s"]["max"] == ranked[100]


def test_probes_alone_measure_the_bound_length():
    records = [request(i, 0.0, [1.0, 2.0 + i]) for i in range(4)]
    run = summarise_run(records, [], bound_length_ids=[1, 3])
    assert run["num_probes"] == 2
    assert run["latency_bound_length_s"] == 4.0
    assert run["latency_bound_length_max_s"] == 5.0
    assert summarise_run(records, [])["latency_bound_length_s"] is None


def test_failed_and_cut_off_requests_count_only_as_requests():
    records = [
        request(0, 0.0, [1.0, 2.0]),
        request(1, 0.0, [1.0, 9.0], reason=None),
        request(2, None, [], status="failed", reason="error"),
    ]
    run = summarise_run(records, [])
    assert (run["num_requests"], run["num_completed"], run["num_failed"]) == (3, 1, 1)
    assert run["output_tokens"] == 2
    assert run["latency_s"]["max"] == 2.0
    # The machine worked until the token of the request that was cut off.
    assert run["wall_s"] == 9.0


@pytest.mark.parametrize(
    "records", [[], [RequestRecord(0, 5)], [request(0, None, [], status="failed", reason="error")]]
)
def test_nothing_completed_gives_nulls(records):
    run = summarise_run(records, [], bound_length_ids=[0])
    assert run["num_completed"] == 0
    for key in ("wall_s", "throughput_per_s", "latency_bound_length_s", "decode_stage_spread"):
        assert run[key] is None
    assert set(run["latency_s"].values()) == {None}
    json.dumps(plain(run), allow_nan=False)


def test_one_request_of_one_token():
    run = summarise_run([request(0, 2.0, [2.5])], [])
    assert run["throughput_per_s"] == 2.0
    assert run["tpot_s"]["mean"] is None


def test_relative_errors():
    records = [request(i, 0.0, [1.0, 2.0 + i]) for i in range(4)]
    slower = [request(i, 0.0, [1.1, 1.1 * (2.0 + i)]) for i in range(4)]
    errors = relative_errors(summarise_run(slower, []), summarise_run(records, []))
    assert errors["throughput_per_s"] == pytest.approx(1 / 1.1 - 1)
    assert errors["throughput_tokens_per_s"] == pytest.approx(1 / 1.1 - 1)
    assert errors["wall_s"] == pytest.approx(0.1)
    for key in ("latency_s", "ttft_s", "tpot_s"):
        assert errors[key] == pytest.approx({"mean": 0.1, "p50": 0.1, "p99": 0.1})
    assert errors["latency_bound_length_s"] is None


def test_relative_errors_of_nothing_are_null():
    errors = relative_errors({}, summarise_run([], []))
    assert errors["throughput_per_s"] is None
    assert errors["latency_s"] == {"mean": None, "p50": None, "p99": None}
