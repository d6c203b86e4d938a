"""Starts workers through the DeepSpeed launcher and turns their failures into one error."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from exegpt.errors import ConfigError, LaunchError
from exegpt.runner.worker_files import ERROR_FILE

logger = logging.getLogger(__name__)

LOG_FILE = "workers.log"


def free_port() -> int:
    """A TCP port that nothing listens on now; the launcher's default is the same for every job."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def launch_command(module: str, arguments: list[str], *, num_ranks: int, hostfile: Path | None) -> list[str]:
    """Command line that starts `module` on every rank."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
    if hostfile is not None:
        command += ["--hostfile", str(hostfile)]
    else:
        # A hostfile that cannot exist: the default one of the machine must not decide for us.
        command += ["--hostfile", os.devnull + ".none", "--num_gpus", str(num_ranks)]
    return [
        *command,
        "--master_port",
        str(free_port()),
        "--log_level",
        "error",
        "--module",
        module,
        *arguments,
    ]


def launch(
    module: str,
    arguments: list[str],
    *,
    num_ranks: int,
    output_dir: Path,
    num_threads: int,
    hostfile: Path | None = None,
) -> None:
    """Run `module` on `num_ranks` ranks and wait.

    What the workers print goes to `workers.log` in `output_dir`, their progress to the terminal.

    Raises
    ------
    ConfigError
        If a rank stopped over something the user can mend.
    LaunchError
        If a rank or the launcher failed otherwise; the message names rank and cause.
    """
    for old in output_dir.glob(ERROR_FILE.format(rank="*")):
        old.unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
    command = launch_command(module, arguments, num_ranks=num_ranks, hostfile=hostfile)
    log = output_dir / LOG_FILE
    with log.open("ab") as output:
        # Own process group, so that an interrupt here ends every rank and nothing else.
        process = subprocess.Popen(
            command, stdout=output, stderr=None, env=environment, start_new_session=True
        )
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code != 0:
        raise _failure(code, output_dir, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(code: int, output_dir: Path, log: Path) -> ConfigError | LaunchError:
    """The error behind a launcher's exit code: a user's one before any other, else the lowest rank's."""
    found = []
    for path in sorted(output_dir.glob(ERROR_FILE.format(rank="*"))):
        kind, _, text = path.read_text().partition("\n")
        found.append((kind, path.stem.removeprefix("error-"), text.strip()))
        path.unlink()
    for kind, _, text in found:
        if kind == "user":
            return ConfigError(text.partition(": ")[2])
    if found:
        return LaunchError(f"{found[0][1]} failed: {found[0][2]} (all ranks' output: {log})")
    return LaunchError(f"the launcher ended with exit code {code} and no rank said why; see {log}")
