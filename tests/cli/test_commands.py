"""What each command writes: files, fields, tables; the jobs share one profile of the tiny model."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_jobs import FIXED, Finished, launch

NUMBER = (int, float)
SOLVE_FIELDS: dict[str, Any] = {
    "policy": str,
    "knobs": dict,
    "stages": list,
    "throughput_per_s": NUMBER,
    "throughput_tokens_per_s": NUMBER,
    "latency_s": NUMBER,
    "latency_bound_s": (int, float, type(None)),
    "ttft_s": NUMBER,
    "tpot_s": NUMBER,
    "memory_bytes": list,
    "throughput_upper_per_s": NUMBER,
    "gap": NUMBER,
    "num_evaluations": int,
    "space_size": int,
    "wall_s": NUMBER,
    "policies": dict,
    "baselines": dict,
}
RUN_FIELDS: dict[str, Any] = {
    "num_requests": int,
    "num_completed": int,
    "num_failed": int,
    "input_tokens": int,
    "output_tokens": int,
    "wall_s": NUMBER,
    "throughput_per_s": NUMBER,
    "throughput_tokens_per_s": NUMBER,
    "latency_s": dict,
    "e2e_latency_s": dict,
    "ttft_s": dict,
    "tpot_s": dict,
    "inter_token_s": dict,
    "latency_bound_length_s": (int, float, type(None)),
    "predicted": dict,
    "error": dict,
    "decode_stage_spread": (int, float, type(None)),
    "encode_stage_spread": (int, float, type(None)),
}
REQUEST_FIELDS = {
    "id",
    "status",
    "error",
    "input_tokens",
    "output_tokens",
    "token_ids",
    "arrival_s",
    "encode_start_s",
    "first_token_s",
    "finish_s",
    "finish_reason",
}


def has_fields(record: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, kind in fields.items():
        assert name in record
        assert isinstance(record[name], kind), (name, record[name])


def head(finished: Finished, command: str, status: str = "ok") -> dict[str, Any]:
    result = finished.result
    has_fields(result, {"version": int, "status": str, "command": str, "overrides": list, "wall_s": NUMBER})
    assert (result["version"], result["status"], result["command"]) == (1, status, command)
    assert "workload=fixed" in result["overrides"]
    assert result["wall_s"] > 0
    return dict(result)


def check_schedule(path: Path) -> None:
    plan = yaml.safe_load(path.read_text())
    assert set(plan) == {
        "version",
        "model",
        "policy",
        "num_replicas",
        "knobs",
        "stages",
        "lengths",
        "predicted",
    }
    assert (plan["version"], plan["model"], plan["policy"], plan["num_replicas"]) == (1, "tiny", "RRA", 1)
    assert set(plan["knobs"]) == {
        "encode_batch_size",
        "decode_batch_size",
        "decode_iterations",
        "num_micro_batches",
        "tp_size",
        "num_tp_gpus",
    }
    assert all(isinstance(value, int) and value >= 1 for value in plan["knobs"].values())
    ranks = [rank for stage in plan["stages"] for rank in stage["ranks"]]
    assert ranks == [0, 1]
    edges = [edge for stage in plan["stages"] for edge in stage["layers"]]
    assert (edges[0], edges[-1]) == (0, 2)
    assert edges[1:-1:2] == edges[2:-1:2]
    assert all(stage["role"] == "both" for stage in plan["stages"])


def check_trace(path: Path, num_requests: int) -> None:
    """Chrome's trace format: complete events with microseconds, on a process and thread each."""
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 and {"pid", "tid", "name"} <= set(span) for span in spans)
    assert {"encode", "decode"} <= {word for span in spans for word in re.findall(r"\w+", span["name"])}
    assert len(spans) >= num_requests / 4


def check_report(path: Path) -> None:
    text = path.read_text()
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert "data:image/" in text or "<svg" in text
    # Nothing is fetched: no source or style sheet but data of the file itself.
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "@import" not in text


def check_run(finished: Finished, num_requests: int = 8) -> None:
    record = finished.result["run"]
    has_fields(record, RUN_FIELDS)
    for name in ("latency_s", "e2e_latency_s", "ttft_s", "tpot_s"):
        assert set(record[name]) == {"mean", "p50", "p90", "p99", "max"}
        values = [record[name][key] for key in ("p50", "p90", "p99", "max")]
        assert 0 < values[0]
        assert values == sorted(values)
    assert (record["num_requests"], record["num_completed"], record["num_failed"]) == (num_requests,) * 2 + (
        0,
    )
    assert (record["input_tokens"], record["output_tokens"]) == (16 * num_requests, 6 * num_requests)
    assert record["throughput_per_s"] == pytest.approx(num_requests / record["wall_s"])
    assert record["throughput_tokens_per_s"] == pytest.approx(6 * num_requests / record["wall_s"])
    predicted = record["predicted"]
    expected = predicted["throughput_per_s"] / record["throughput_per_s"] - 1
    assert record["error"]["throughput_per_s"] == pytest.approx(expected)
    expected = predicted["latency_s"]["p99"] / record["latency_s"]["p99"] - 1
    assert record["error"]["latency_s"]["p99"] == pytest.approx(expected)


def check_requests(finished: Finished, num_requests: int = 8, *, has_tokenizer: bool = False) -> None:
    lines = (finished.output_dir / "requests.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    assert sorted(request["id"] for request in requests) == list(range(num_requests))
    for request in requests:
        assert set(request) == REQUEST_FIELDS | {"prompt_tokens"} | ({"text"} if has_tokenizer else set())
        assert (request["status"], request["error"], request["finish_reason"]) == ("ok", None, "length")
        assert (request["prompt_tokens"], request["input_tokens"]) == (16, 16)
        assert (request["output_tokens"], len(request["token_ids"])) == (6, 6)
        assert all(isinstance(token, int) and 0 <= token < 300 for token in request["token_ids"])
        times = [request[name] for name in ("arrival_s", "encode_start_s", "first_token_s", "finish_s")]
        assert times == sorted(times)
    latencies = [request["finish_s"] - request["encode_start_s"] for request in requests]
    assert finished.result["run"]["latency_s"]["mean"] == pytest.approx(statistics.mean(latencies))
    assert finished.result["run"]["latency_s"]["max"] == pytest.approx(max(latencies))


@pytest.fixture(scope="session")
def up(place: Callable[[], Path], tiny: tuple[str, ...], profiled: Finished) -> Finished:
    """The default command, with weights from a file."""
    weights = tiny[1].replace("model.path", "model.weights")
    overrides = [weights if o.startswith("model.weights=") else o for o in tiny]
    return launch(place(), *overrides, *FIXED).succeeded()


@pytest.fixture(scope="session")
def ran(place: Callable[[], Path], tiny: tuple[str, ...], schedule: Path) -> Finished:
    """`command=run` of the schedule that was solved for."""
    return launch(place(), *tiny, *FIXED, "command=run", f"schedule={schedule}").succeeded()


@pytest.fixture(scope="session")
def simulated(place: Callable[[], Path], tiny: tuple[str, ...], schedule: Path) -> Finished:
    """`command=simulate` of the schedule that was solved for."""
    return launch(place(), *tiny, *FIXED, "command=simulate", f"schedule={schedule}").succeeded()


@pytest.mark.dist
def test_profile(profiled: Finished, cache_dir: Path) -> None:
    record = head(profiled, "profile")["profile"]
    has_fields(record, {"path": str, "points": int, "wall_s": NUMBER})
    path = Path(record["path"])
    assert path.is_relative_to(cache_dir)
    table = json.loads(path.read_text())
    assert record["points"] == sum(
        math.prod(len(axis) for axis in grid["axes"]) for grid in table["grids"].values()
    )
    assert record["tp_sizes"] == [1, 2]
    assert "Profile" in profiled.out


def test_solve(solved: Finished) -> None:
    record = head(solved, "solve")["solve"]
    has_fields(record, SOLVE_FIELDS)
    assert record["latency_bound_s"] is None
    assert record["throughput_tokens_per_s"] == pytest.approx(6 * record["throughput_per_s"])
    assert record["gap"] == pytest.approx(0, abs=1e-9)
    assert record["throughput_upper_per_s"] == pytest.approx(record["throughput_per_s"])
    assert len(record["memory_bytes"]) == 2
    assert set(record["policies"]) == {"RRA"}
    assert set(record["baselines"]) == {"STATIC"}
    for best in (*record["policies"].values(), *record["baselines"].values()):
        assert "infeasible" in best or {"knobs", "throughput_per_s", "latency_s"} <= set(best)
    check_schedule(solved.output_dir / "schedule.yaml")
    check_report(solved.output_dir / "report.html")


def test_exhaustive_search_agrees(place: Callable[[], Path], tiny: tuple[str, ...], solved: Finished) -> None:
    exhaustive = (
        launch(place(), *tiny, *FIXED, "command=solve", "solver=exhaustive").succeeded().result["solve"]
    )
    found = solved.result["solve"]
    assert exhaustive["throughput_per_s"] == pytest.approx(found["throughput_per_s"])
    assert exhaustive["num_evaluations"] == exhaustive["space_size"] >= found["num_evaluations"]


def test_simulate(simulated: Finished, solved: Finished) -> None:
    record = head(simulated, "simulate")["simulate"]
    assert set(record) == {"steady", "replay"}
    planned = solved.result["solve"]["throughput_per_s"]
    assert record["steady"]["throughput_per_s"] == pytest.approx(planned)
    replay = record["replay"]
    has_fields(
        replay, {name: kind for name, kind in RUN_FIELDS.items() if name not in ("predicted", "error")}
    )
    assert (replay["num_requests"], replay["num_completed"]) == (8, 8)
    assert replay["throughput_per_s"] == pytest.approx(8 / replay["wall_s"])
    check_trace(simulated.output_dir / "trace.json", 8)
    check_report(simulated.output_dir / "report.html")


@pytest.mark.dist
def test_run(ran: Finished, schedule: Path) -> None:
    head(ran, "run")
    check_run(ran)
    check_requests(ran)
    check_trace(ran.output_dir / "trace.json", 8)
    check_report(ran.output_dir / "report.html")
    assert yaml.safe_load((ran.output_dir / "schedule.yaml").read_text()) == yaml.safe_load(
        schedule.read_text()
    )


@pytest.mark.dist
def test_up(up: Finished) -> None:
    result = head(up, "up")
    assert {"profile", "solve", "run"} <= set(result)
    has_fields(result["solve"], SOLVE_FIELDS)
    check_schedule(up.output_dir / "schedule.yaml")
    check_run(up)
    check_requests(up, has_tokenizer=True)
    check_report(up.output_dir / "report.html")


@pytest.mark.dist
@pytest.mark.parametrize("job", ["profiled", "solved", "simulated", "ran", "up"])
def test_results_on_stdout_and_the_rest_on_stderr(job: str, request: pytest.FixtureRequest) -> None:
    finished: Finished = request.getfixturevalue(job)
    titles = {
        "profiled": ["Profile"],
        "solved": ["Chosen schedule", "Policies at their best"],
        "simulated": ["Simulated"],
        "ran": ["Predicted and measured", "answers:", "report:"],
        "up": ["Chosen schedule", "Predicted and measured", "answers:", "report:"],
    }
    for title in titles[job]:
        assert title in finished.out
        assert title not in finished.err
    # No log line and no progress bar strays into the results.
    assert not re.search(r"^\[\d{4}-|INFO|WARNING|DeepSpeed", finished.out, re.MULTILINE)
    assert not re.search(r"searching|serving|profiling", finished.out)
    assert not finished.out.startswith("\n")


@pytest.mark.dist
def test_nothing_private_is_left(ran: Finished, up: Finished) -> None:
    for finished in (ran, up):
        left = {path.name for path in finished.output_dir.iterdir()}
        assert {"schedule.yaml", "result.json", "requests.jsonl", "trace.json", "report.html"} <= left
        assert not [name for name in left if name.endswith(".pkl") or name.startswith("error")]
        assert [path.name for path in finished.cwd.iterdir()] == ["outputs"]


@pytest.mark.dist
def test_pages_of_one_token(place: Callable[[], Path], tiny: tuple[str, ...]) -> None:
    # The page table of a measurement once had a row for every page.
    done = launch(place(), *tiny, *FIXED, "command=profile", "runner.page_size=1", "profile.budget_s=2")
    assert done.succeeded().result["profile"]["points"] > 20
