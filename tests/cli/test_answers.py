"""Answers that are not a schedule, and requests that cannot be served: nothing of it is a failure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_jobs import FIXED, Finished, launch

PROMPTS = [
    {"prompt": "Hello"},
    {"prompt": ""},
    {"prompt": "naïve 漢字 🙂", "max_output_tokens": 2},
    {"prompt": "word " * 100},
    {"prompt": "Say it in five.", "output_tokens": 5},
]


@pytest.fixture(scope="session")
def answered(
    place: Callable[[], Path], tiny: tuple[str, ...], model_dir: Path, profiled: Finished
) -> tuple[Finished, list[dict[str, Any]]]:
    """A run over prompts of which two cannot be served, and the lines of its requests.jsonl by id."""
    cwd = place()
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in PROMPTS]
    (cwd / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    overrides = [o for o in tiny if not o.startswith("model.weights=")]
    finished = launch(
        cwd,
        *overrides,
        f"model.weights={model_dir}",
        "workload=prompts",
        "workload.path=prompts.jsonl",
        "runner.max_output_tokens=8",
        "solver.max_encode_batch_size=4",
    ).succeeded()
    text = (finished.output_dir / "requests.jsonl").read_text(encoding="utf-8")
    return finished, sorted(map(json.loads, text.splitlines()), key=lambda line: line["id"])


@pytest.mark.dist
def test_a_bad_prompt_fails_alone(answered: tuple[Finished, list[dict[str, Any]]]) -> None:
    finished, requests = answered
    assert [request["status"] for request in requests] == ["ok", "failed", "ok", "failed", "ok"]
    assert [request["prompt"] for request in requests] == [prompt["prompt"] for prompt in PROMPTS]
    assert requests[1]["error"] == "the prompt is empty"
    assert re.search(r"500 tokens is longer than the window of 256 tokens of tiny", requests[3]["error"])
    record = finished.result["run"]
    assert finished.result["status"] == "ok"
    assert (record["num_requests"], record["num_completed"], record["num_failed"]) == (5, 3, 2)


@pytest.mark.dist
def test_answers_keep_their_limits(answered: tuple[Finished, list[dict[str, Any]]]) -> None:
    _, requests = answered
    served = [request for request in requests if request["status"] == "ok"]
    # Bytes are tokens here, so lengths can be counted.
    assert [r["input_tokens"] for r in served] == [len(r["prompt"].encode()) for r in served]
    assert requests[0]["output_tokens"] <= 8
    assert requests[2]["output_tokens"] <= 2
    assert requests[4]["output_tokens"] == 5
    for request in served:
        assert len(request["token_ids"]) == request["output_tokens"]
        assert isinstance(request["text"], str)
        assert request["finish_reason"] == ("stop" if request["token_ids"][-1] == 1 else "length")


def test_prompts_as_text_are_planned(
    place: Callable[[], Path], tiny: tuple[str, ...], model_dir: Path, profiled: Finished
) -> None:
    cwd = place()
    (cwd / "prompts.txt").write_text("One\nTwo words\n", encoding="utf-8")
    overrides = [o for o in tiny if not o.startswith("model.weights=")]
    finished = launch(
        cwd,
        *overrides,
        f"model.weights={model_dir}",
        "command=solve",
        "workload=prompts",
        "workload.path=prompts.txt",
        "runner.max_output_tokens=8",
        "solver.max_encode_batch_size=4",
    ).succeeded()
    assert "6 in" in finished.result["workload"]


def advice(finished: Finished, key: str) -> float:
    """The value to which a job without a schedule tells to set `key`; in result.json and on stdout."""
    assert finished.code == 0, finished.err
    assert "Traceback" not in finished.err
    assert finished.result["status"] == "infeasible"
    assert not (finished.output_dir / "schedule.yaml").exists()
    assert (finished.output_dir / "report.html").exists()
    found = re.search(rf"{key} from \S+(?: s)? to ([\d.e+-]+)", finished.result["solve"]["reason"])
    assert found, finished.result["solve"]["reason"]
    flat = " ".join(finished.out.split())
    assert "No schedule meets all constraints" in flat
    assert f"to {found[1]}" in flat
    return float(found[1])


@pytest.mark.parametrize(
    ("key", "value"),
    [("bound.latency_s", "0.0001"), ("bound.ttft_s", "1e-6"), ("cluster.memory_gib", "0.01")],
)
def test_infeasible_says_what_to_relax_and_that_suffices(
    key: str, value: str, place: Callable[[], Path], tiny: tuple[str, ...], profiled: Finished
) -> None:
    bounded = launch(place(), *tiny, *FIXED, "command=solve", f"{key}={value}")
    needed = advice(bounded, key)
    relaxed = launch(place(), *tiny, *FIXED, "command=solve", f"{key}={needed}").succeeded()
    assert relaxed.result["status"] == "ok"
    if key != "cluster.memory_gib":
        assert relaxed.result["solve"][key.removeprefix("bound.")] <= needed


def test_up_without_a_schedule_starts_no_ranks(
    place: Callable[[], Path], tiny: tuple[str, ...], profiled: Finished
) -> None:
    finished = launch(place(), *tiny, *FIXED, "bound.latency_s=0.0001")
    advice(finished, "bound.latency_s")
    assert not (finished.output_dir / "workers.log").exists()
