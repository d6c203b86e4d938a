"""Every policy is solved for, and its schedule simulated, as a user would: two sweeps on planned GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_jobs import Finished, launch

from exegpt.specs import Policy

A100 = (
    "model=opt-125m",
    "cluster=a100-16",
    "cluster.num_nodes=1",
    "cluster.gpus_per_node=4",
    "workload=summarization",
    "solver.max_encode_batch_size=16",
)
NAMES = [policy.value for policy in Policy]


def results(finished: Finished) -> list[tuple[Path, dict[str, Any]]]:
    """Directory and result.json of every job of a sweep, in order."""
    directories = sorted((finished.cwd / "swept").glob("[0-9]*"), key=lambda path: int(path.name))
    return [(path, json.loads((path / "result.json").read_text())) for path in directories]


@pytest.fixture(scope="module")
def solved(place: Callable[[], Path]) -> list[tuple[Path, dict[str, Any]]]:
    """A job per policy that solves for it alone."""
    policies = ",".join(f"[{name}]" for name in NAMES)
    overrides = ("command=solve", f"solver.policies={policies}", "hydra.sweep.dir=swept")
    return results(launch(place(), "-m", *A100, *overrides).succeeded())


@pytest.fixture(scope="module")
def simulated(
    place: Callable[[], Path], solved: list[tuple[Path, dict[str, Any]]]
) -> list[tuple[Path, dict[str, Any]]]:
    """A job per schedule that simulates it."""
    paths = ",".join(str(directory / "schedule.yaml") for directory, _ in solved)
    overrides = (
        "command=simulate",
        f"schedule={paths}",
        "workload.num_requests=240",
        "hydra.sweep.dir=swept",
    )
    return results(launch(place(), "-m", *A100, *overrides).succeeded())


def test_the_closed_form_of_a_schedule_is_what_was_solved_for(
    solved: list[tuple[Path, dict[str, Any]]], simulated: list[tuple[Path, dict[str, Any]]]
) -> None:
    assert [result["solve"]["policy"] for _, result in solved] == NAMES
    for (_, before), (_, after) in zip(solved, simulated, strict=True):
        assert (before["status"], after["status"]) == ("ok", "ok")
        steady = after["simulate"]["steady"]
        for name in ("throughput_per_s", "latency_s", "ttft_s"):
            assert steady[name] == pytest.approx(before["solve"][name])


def test_all_requests_are_replayed(
    solved: list[tuple[Path, dict[str, Any]]], simulated: list[tuple[Path, dict[str, Any]]]
) -> None:
    for (_, before), (_, result) in zip(solved, simulated, strict=True):
        replay = result["simulate"]["replay"]
        assert replay["num_replicas"] == before["solve"]["num_replicas"]
        assert (replay["num_requests"], replay["num_completed"]) == (240, 240)


def test_replicas_are_simulated_and_not_run(
    place: Callable[[], Path], tiny: tuple[str, ...], solved: list[tuple[Path, dict[str, Any]]]
) -> None:
    replicas = {result["solve"]["policy"]: result["solve"]["num_replicas"] for _, result in solved}
    assert replicas["CHUNKED"] > 1
    cwd = place()
    directory = next(path for path, result in solved if result["solve"]["policy"] == "RRA")
    plan = yaml.safe_load((directory / "schedule.yaml").read_text())
    (cwd / "two.yaml").write_text(yaml.safe_dump({**plan, "num_replicas": 2}))
    (cwd / "chunked.yaml").write_text(yaml.safe_dump({**plan, "num_replicas": 1, "policy": "CHUNKED"}))
    for name, reason in (("two", "num_replicas=2"), ("chunked", "policy=CHUNKED")):
        refused = launch(cwd, *tiny, "workload=fixed", "command=run", f"schedule={name}.yaml")
        assert refused.code == 2
        (line,) = refused.complaints
        assert f"{name}.yaml: {reason}" in line
        assert "command=simulate" in line
