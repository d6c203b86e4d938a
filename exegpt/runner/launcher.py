"""Starts workers through the DeepSpeed launcher and turns their failures into one error."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from exegpt.errors import ConfigError, LaunchError
from exegpt.runner.worker_files import ERROR_FILE

logger = logging.getLogger(__name__)

LOG_FILE = "workers.log"

# A rank that is told to end does so at once; one that hangs in a driver is killed after this.
END_S = 10.0


def free_port() -> int:
    """A TCP port that nothing listens on now; the launcher's default is the same for every job."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def read_hostfile(path: Path) -> dict[str, int]:
    """Ranks by host of a DeepSpeed hostfile (`HOST slots=N` a line, `#` for comments).

    Raises
    ------
    ConfigError
        If the file cannot be read or a line is no host: the launcher itself would go on without it.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"runner.hostfile={path}: cannot be read: {error}") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", text)
        if found is None or found[1] in hosts:
            problem = "expected HOST slots=N" if found is None else f"{found[1]} is listed twice"
            raise ConfigError(f"runner.hostfile={path}, line {number}: {text!r}: {problem}")
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise ConfigError(f"runner.hostfile={path}: lists no host; a line is HOST slots=N")
    return hosts


def check_nodes(num_nodes: int, num_ranks: int, hostfile: Path | None) -> None:
    """Refuse a start on other nodes than the plan is made for.

    Raises
    ------
    ConfigError
        If several nodes are planned and no hostfile names them, or it has another number of hosts or
        of ranks.
    """
    if hostfile is None:
        if num_nodes > 1:
            raise ConfigError(
                f"cluster.num_nodes={num_nodes}: ranks on several nodes need runner.hostfile, or a launcher "
                "on each node: deepspeed --no_ssh --node_rank N --hostfile FILE launch.py command=run ..."
            )
        return
    hosts = read_hostfile(hostfile)
    if len(hosts) != num_nodes or sum(hosts.values()) != num_ranks:
        raise ConfigError(
            f"runner.hostfile={hostfile}: has {len(hosts)} hosts with {sum(hosts.values())} slots, but "
            f"cluster.num_nodes={num_nodes} and {num_ranks} ranks are planned; make them agree"
        )


def worker_environment(num_threads: int, device_type: str | None) -> dict[str, str]:
    """Environment of the launcher and of every rank that it starts on this node."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        # ninja stands beside the interpreter, which may belong to an environment that is not activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    if device_type is not None:
        # DeepSpeed would look for a GPU by itself, also where cluster.device=cpu.
        environment["DS_ACCELERATOR"] = device_type
    return environment


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
    num_nodes: int = 1,
    device_type: str | None = None,
    hostfile: Path | None = None,
) -> None:
    """Run `module` on `num_ranks` ranks and wait.

    What the workers print goes to `workers.log` in `output_dir`, their progress to the terminal.

    Raises
    ------
    ConfigError
        If nodes and hostfile do not agree, or a rank stopped over something the user can mend.
    LaunchError
        If a rank or the launcher failed otherwise; the message names rank and cause.
    """
    check_nodes(num_nodes, num_ranks, hostfile)
    for old in output_dir.glob(ERROR_FILE.format(rank="*")):
        old.unlink()
    command = launch_command(module, arguments, num_ranks=num_ranks, hostfile=hostfile)
    log = output_dir / LOG_FILE
    with log.open("ab") as output:
        # Own process group, so that an interrupt here ends every rank and nothing else.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=None,
            env=worker_environment(num_threads, device_type),
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code != 0:
        raise _failure(code, output_dir, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher with all ranks of this node: they share its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            process.poll()
            # Raises once the last of the group is gone.
            os.killpg(process.pid, 0)
            time.sleep(0.05)
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
