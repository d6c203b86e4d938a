"""The DeepSpeed launcher: started by us without an activated environment, and typed by the user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cli_jobs import FIXED, LAUNCH, Finished, environment, start

from exegpt.runner.launcher import free_port

pytestmark = pytest.mark.dist

# As the `deepspeed` script does, which need not be on PATH here.
DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")


def deepspeed(cwd: Path, *overrides: str) -> Finished:
    """`deepspeed --num_gpus 2 launch.py [overrides]`; it passes `--local_rank` to every rank."""
    port = str(free_port())
    return start([*DEEPSPEED, "--num_gpus", "2", "--master_port", port, LAUNCH, *overrides], cwd)


@pytest.fixture(scope="session")
def typed(place: Callable[[], Path], tiny: tuple[str, ...], schedule: Path) -> Finished:
    """`deepspeed --num_gpus 2 launch.py command=run schedule=...`."""
    return deepspeed(place(), *tiny, *FIXED, "command=run", f"schedule={schedule}").succeeded()


def test_run_under_the_launcher(typed: Finished) -> None:
    # One directory, although every rank composed the configuration.
    result = typed.result
    assert (result["status"], result["command"]) == ("ok", "run")
    assert (result["run"]["num_requests"], result["run"]["num_completed"]) == (8, 8)
    lines = (typed.output_dir / "requests.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == list(range(8))
    assert {"schedule.yaml", "trace.json", "report.html"} <= {p.name for p in typed.output_dir.iterdir()}
    assert [path.name for path in typed.cwd.iterdir()] == ["outputs"]
    assert typed.out.count("Predicted and measured") == 1


def test_tokens_do_not_depend_on_who_starts_the_ranks(
    typed: Finished, place: Callable[[], Path], tiny: tuple[str, ...], schedule: Path
) -> None:
    plain = start([sys.executable, LAUNCH, *tiny, *FIXED, "command=run", f"schedule={schedule}"], place())
    plain.succeeded()

    def tokens(finished: Finished) -> dict[int, list[int]]:
        lines = (finished.output_dir / "requests.jsonl").read_text().splitlines()
        return {request["id"]: request["token_ids"] for request in map(json.loads, lines)}

    assert tokens(plain) == tokens(typed)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("command=solve",), ("command=solve", "python launch.py", "command=run")),
        (("-m", "command=run", "seed=1,2"), ("-m (multirun)", "python launch.py -m")),
    ],
    ids=["another command", "multirun"],
)
def test_refused_under_the_launcher(
    arguments: tuple[str, ...], parts: tuple[str, ...], place: Callable[[], Path], tiny: tuple[str, ...]
) -> None:
    base = [override for override in tiny if not override.startswith("seed=")]
    flag, rest = (arguments[:1], arguments[1:]) if arguments[0] == "-m" else ((), arguments)
    finished = deepspeed(place(), *flag, *base, *FIXED, *rest)
    assert finished.code == 2
    # The launcher and each rank log as they like; the error is said once.
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for part in parts:
        assert part in errors[0]
    assert "Traceback" not in finished.err
    assert {path.name for path in finished.cwd.iterdir()} <= {"outputs"}


@pytest.fixture
def endless(
    place: Callable[[], Path], tiny: tuple[str, ...], schedule: Path
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that waits for requests which come hours apart, once its first request was served."""
    cwd = place()
    arrivals = ("workload.arrival=poisson", "workload.rate_per_s=0.0001")
    process = subprocess.Popen(
        [sys.executable, LAUNCH, *tiny, *FIXED, *arrivals, "command=run", f"schedule={schedule}"],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while len(workers(process.pid)) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        assert len(workers(process.pid)) == 2
        yield process, cwd
    finally:
        for child in family(process.pid):
            child.kill()
        process.kill()
        process.communicate()


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def workers(pid: int) -> list[psutil.Process]:
    """Ranks below a process."""
    found = []
    for child in family(pid):
        try:
            arguments = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        # The launcher, too, has the module among its arguments.
        if "exegpt.runner.worker" in arguments and not any("deepspeed" in part for part in arguments):
            found.append(child)
    return found


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(sent: signal.Signals, code: int, endless: tuple[subprocess.Popen[str], Path]) -> None:
    process, cwd = endless
    children = family(process.pid)
    # Ctrl-C goes to the terminal's whole process group; kill goes to one process.
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    (directory,) = (cwd / "outputs").iterdir()
    result = json.loads((directory / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "interrupted")
    assert not list(directory.glob("*.pkl"))
