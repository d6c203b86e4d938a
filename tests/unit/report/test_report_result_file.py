import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from exegpt.errors import ConfigError, TraceError
from exegpt.events import RequestRecord
from exegpt.report.result_file import append_request, plain, read_requests, write_result
from exegpt.specs import Policy

REQUEST_FIELDS = {
    "id",
    "status",
    "error",
    "prompt_tokens",
    "input_tokens",
    "output_tokens",
    "token_ids",
    "arrival_s",
    "encode_start_s",
    "first_token_s",
    "finish_s",
    "finish_reason",
}


def test_result_is_strict_json_with_plain_values(tmp_path):
    path = tmp_path / "result.json"
    write_result(
        path,
        {
            "policy": Policy.RRA,
            "gap": np.float32(0.5),
            "count": np.int64(7),
            "flag": np.bool_(True),
            "memory_bytes": np.array([1, 2]),
            "latency_bound_s": math.inf,
            "unknown": [math.nan, -math.inf, np.float64("nan")],
            "schedule": Path("a/b.yaml"),
            "layers": (0, 4),
            "by_rank": {0: 1.5},
        },
    )

    def refuse(name):
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "version": 1,
        "policy": "RRA",
        "gap": 0.5,
        "count": 7,
        "flag": True,
        "memory_bytes": [1, 2],
        "latency_bound_s": None,
        "unknown": [None, None, None],
        "schedule": "a/b.yaml",
        "layers": [0, 4],
        "by_rank": {"0": 1.5},
    }


def test_unknown_types_are_refused_and_leave_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"status": "ok"})
    with pytest.raises(TypeError, match="object"):
        write_result(path, {"status": object()})
    assert json.loads(path.read_text())["status"] == "ok"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_unwritable_place_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match=r"result\.json: cannot be written.*hydra\.run\.dir"):
        write_result(tmp_path / "absent" / "result.json", {})


def test_failed_replace_leaves_no_temporary_file(tmp_path):
    (tmp_path / "result.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_result(tmp_path / "result.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_sets_become_sorted_lists():
    assert plain({"ids": frozenset({3, 1, 2})}) == {"ids": [1, 2, 3]}


def test_requests_round_trip_as_they_finish(tmp_path):
    path = tmp_path / "requests.jsonl"
    done = RequestRecord(
        3, 12, arrival_s=0.5, encode_start_s=1.0, token_s=[1.5, 2.0], finish_reason="end_of_sequence"
    )
    append_request(path, done, token_ids=np.array([5, 6]))
    assert len(path.read_text().splitlines()) == 1
    failed = RequestRecord(4, 9000, status="failed", error="too long", finish_reason="error")
    append_request(path, failed, prompt="naïve\nprompt\u2028", text="")
    first, second = read_requests(path)
    assert set(first) == REQUEST_FIELDS
    assert first["token_ids"] == [5, 6]
    assert first["prompt_tokens"] == first["input_tokens"] == 12
    assert (first["output_tokens"], first["first_token_s"], first["finish_s"]) == (2, 1.5, 2.0)
    assert set(second) == REQUEST_FIELDS - {"prompt_tokens"} | {"prompt", "text"}
    assert second["prompt"] == "naïve\nprompt\u2028"
    assert (second["status"], second["error"], second["finish_s"]) == ("failed", "too long", None)


def test_torn_last_line_is_left_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / "requests.jsonl"
    append_request(path, RequestRecord(1, 2))
    path.write_text(path.read_text() + '{"id": 2, "sta')
    with caplog.at_level(logging.WARNING):
        assert [request["id"] for request in read_requests(path)] == [1]
    assert "torn" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": 1}\n{"id": \n{"id": 3}\n', "line 2: not JSON"),
        ('{"id": 1}\n[1]\n', "line 2: expected an object"),
        ('{"status": "ok"}\n', "line 1.*key id"),
        ("\n", "line 1: not JSON"),
    ],
)
def test_corrupt_lines_are_named(tmp_path, content, message):
    path = tmp_path / "requests.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        read_requests(path)


def test_missing_and_binary_request_files(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.jsonl: cannot be read"):
        read_requests(tmp_path / "absent.jsonl")
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="cannot be read"):
        read_requests(path)


def test_empty_request_file_has_no_requests(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("")
    assert read_requests(path) == []
