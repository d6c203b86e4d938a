"""Runs through the DeepSpeed launcher: tokens, a user's error, a rank that dies; nothing is left running."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from dist_cases import Case, make_job
from dist_models import Oracle
from dist_ranks import run_group

from exegpt.errors import ConfigError, LaunchError
from exegpt.report.result_file import read_requests
from exegpt.runner.job import RunJob, write_job
from exegpt.runner.launcher import launch
from exegpt.specs import Policy

pytestmark = pytest.mark.dist

CASE = Case(
    name="launched",
    model="llama",
    tp_sizes=(1, 1),
    policy=Policy.RRA,
    batch=5,
    micro_batches=2,
    iterations=3,
)
# Rank 1 dies without a word while rank 0 waits for it.
DYING = """
import os
import signal

from exegpt.runner.transport import start_transport

transport, environment = start_transport()
if environment.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
transport.receive_control(source=1)
"""


@pytest.fixture
def job(oracle: Callable[[str], Oracle], cache_dir: Path, tmp_path: Path) -> RunJob:
    return make_job(CASE, oracle(CASE.model), cache_dir, tmp_path / "run")


@pytest.fixture(autouse=True)
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """Every process that names this test's directory has ended when the test has."""
    yield
    left = [
        process.info
        for process in psutil.process_iter(["pid", "cmdline"])
        if any(str(tmp_path) in word for word in process.info["cmdline"] or ())
    ]
    assert left == []


def run(job: RunJob) -> None:
    path = job.output_dir / "run.pkl"
    write_job(job, path)
    launch(
        "exegpt.runner.worker",
        [str(path)],
        num_ranks=job.schedule.num_ranks,
        output_dir=job.output_dir,
        num_threads=1,
        device_type="cpu",
    )


def test_the_launcher_runs_a_job(job: RunJob, oracle: Callable[[str], Oracle]) -> None:
    run(job)
    lines = read_requests(job.output_dir / "requests.jsonl")
    assert {line["id"]: line["token_ids"] for line in lines} == oracle(CASE.model).answers
    assert not list(job.output_dir.glob("error-*"))


def test_a_users_error_comes_back_as_it_was_said(job: RunJob, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(job.weights, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"broken/model\.safetensors") as caught:
        run(replace(job, weights=str(broken)))
    assert "Traceback" not in str(caught.value)
    assert not (job.output_dir / "requests.jsonl").exists()


def test_a_dead_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying_rank.py").write_text(DYING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LaunchError, match="exit code"):
        launch(
            "dying_rank",
            [str(tmp_path)],
            num_ranks=2,
            output_dir=tmp_path,
            num_threads=1,
            device_type="cpu",
        )


def test_a_failing_rank_fails_its_group_with_its_traceback(job: RunJob, tmp_path: Path) -> None:
    lost = replace(job, weights=str(tmp_path / "nowhere"))
    group = run_group(2, [lost], tmp_path, timeout_s=60.0)
    assert group.error is not None
    assert "exit code 1" in group.error
    assert "Traceback" in group.error
    assert "WeightsError" in group.error
    with pytest.raises(AssertionError, match="run did not end"):
        group.states(lost)


def test_a_group_is_ended_when_its_time_is_up(job: RunJob, tmp_path: Path) -> None:
    assert run_group(2, [job], tmp_path, timeout_s=0.0).error == "ranks [0, 1] still ran when time was up"
