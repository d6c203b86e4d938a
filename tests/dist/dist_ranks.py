"""Starts one group of ranks for many runs, and never waits for a rank that will not come."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from exegpt.runner.job import RunJob
from exegpt.runner.launcher import free_port

STATE_FILE = "state-rank{rank}.json"
ERROR_FILE = "traceback-rank{rank}.txt"


@dataclass(frozen=True, slots=True)
class Group:
    """What became of a group; `error` is None if every rank ran every job to its end."""

    world_size: int
    error: str | None

    def states(self, job: RunJob) -> list[dict[str, Any]]:
        """What every rank held after a run; AssertionError with the traceback of a rank that failed."""
        paths = [job.output_dir / STATE_FILE.format(rank=rank) for rank in range(self.world_size)]
        if not all(path.exists() for path in paths):
            raise AssertionError(f"{job.output_dir.name} did not end: {self.error}")
        return [json.loads(path.read_text()) for path in paths]


def run_group(
    world_size: int, jobs: Sequence[RunJob], directory: Path, *, timeout_s: float, on_cuda: bool = False
) -> Group:
    """Run the jobs one after another on one group of `world_size` ranks.

    The first rank to fail, or the end of `timeout_s`, ends the group.
    """
    # A forked server has imported torch and DeepSpeed once for all ranks; CUDA cannot be forked.
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["exegpt.runner.worker"])
    context = multiprocessing.get_context("spawn") if on_cuda else forkserver
    port = free_port()
    processes = [
        context.Process(
            target=_rank_main, args=(rank, world_size, port, list(jobs), directory, timeout_s), daemon=True
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    # The server takes the environment of its start; the launcher sets the same.
    environment = {
        "DS_ACCELERATOR": "cuda" if on_cuda else "cpu",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    with patch.dict(os.environ, environment):
        for process in processes:
            process.start()
    try:
        error = _watch(processes, deadline, directory)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    return Group(world_size, error)


def _watch(processes: Sequence[BaseProcess], deadline: float, directory: Path) -> str | None:
    """Wait until all have ended well, one has not, or time is up; say what went wrong."""
    running = {process.sentinel: (rank, process) for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), timeout=max(deadline - time.monotonic(), 0.0))
        if not ended:
            return f"ranks {sorted(rank for rank, _ in running.values())} still ran when time was up"
        for sentinel in ended:
            assert isinstance(sentinel, int)
            rank, process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                path = directory / ERROR_FILE.format(rank=rank)
                said = path.read_text() if path.exists() else "no traceback was left"
                return f"rank {rank} ended with exit code {process.exitcode}:\n{said}"
    return None


def _rank_main(
    rank: int, world_size: int, port: int, jobs: list[RunJob], directory: Path, timeout_s: float
) -> None:
    # As the DeepSpeed launcher sets it.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        _run_jobs(jobs, timeout_s)
    except BaseException:
        (directory / ERROR_FILE.format(rank=rank)).write_text(traceback.format_exc())
        # Not sys.exit: a rank that waits for a peer in another thread would never get there.
        os._exit(1)


def _run_jobs(jobs: list[RunJob], timeout_s: float) -> None:
    import torch

    from exegpt.runner.transport import DistributedTransport, RankEnvironment
    from exegpt.runner.worker import build_engine, serve

    torch.set_num_threads(1)
    transport = DistributedTransport(RankEnvironment.from_environ(dict(os.environ)), timeout_s=timeout_s)
    for job in jobs:
        engine = build_engine(job, transport, transport.device)
        serve(job, engine, transport)
        engine.allocator.check()
        state = {
            "num_free": engine.allocator.num_free,
            "rows": [batch.rows.row_ids.tolist() for batch in engine.micro_batches],
            "not_taken_in": [len(batch.sampled) + len(batch.received) for batch in engine.micro_batches],
            "expected": len(engine.expected),
            "released": sorted(engine.released),
        }
        (job.output_dir / STATE_FILE.format(rank=transport.rank)).write_text(json.dumps(state))
    transport.close()
