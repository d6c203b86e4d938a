"""`deepspeed launch.py command=run ...`: every rank is here already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.commands.context import Context
from exegpt.commands.predict import load_schedule
from exegpt.commands.profile import find_profile, measure_job, profile_record
from exegpt.commands.run import is_launched, run_schedule
from exegpt.errors import ConfigError, ScheduleError
from exegpt.profiler.table import ProfileTable, read_profile
from exegpt.runner.job import RunJob
from exegpt.schedule import Schedule
from exegpt.settings import Command

if TYPE_CHECKING:
    from exegpt.runner.transport import DistributedTransport


def run_launched(context: Context) -> None:
    """Execute `command=run` as one rank of a group that the launcher started.

    Rank 0 plans and writes; the others get profile measurement and job from it.

    Raises
    ------
    ConfigError
        For any other command: those start the launcher themselves. Also for what the user named, before
        the ranks meet; an error of rank 0 ends the launcher, which ends the others.
    """
    if context.job.command is not Command.run:
        raise ConfigError(
            f"command={context.job.command.value} starts the DeepSpeed launcher itself; call it with plain "
            "`python launch.py`, or use command=run here"
        )
    context.job.model.require_runnable()
    context.require_devices("command=run")
    schedule = load_schedule(context)
    _check_ranks(context, schedule)
    # DeepSpeed would look for a GPU by itself, also where cluster.device=cpu.
    os.environ["DS_ACCELERATOR"] = context.cluster.device_type
    # torch and DeepSpeed are loaded only by processes that are ranks.
    from exegpt.runner.transport import start_transport

    if own_rank() > 0:
        transport, _ = start_transport()
        _follow(transport)
    else:
        context.check_files(weights=True)
        table, path = find_profile(context)
        transport, _ = start_transport()
        _lead(context, schedule, table, path, transport)
    transport.close()


def _follow(transport: DistributedTransport) -> None:
    from exegpt.profiler.measure import measure_on
    from exegpt.runner.worker import run_rank, share_job

    measurement = transport.gather_objects(None)[0]
    if measurement is not None:
        measure_on(measurement, transport)
    run_rank(share_job(None, transport), transport)


def _lead(
    context: Context,
    schedule: Schedule,
    table: ProfileTable | None,
    path: Path | None,
    transport: DistributedTransport,
) -> None:
    from exegpt.profiler.measure import measure_on
    from exegpt.runner.worker import run_rank, share_job

    measurement = None
    if table is None:
        assert path is not None
        measurement = measure_job(context, path)
    # Rank 0's wish, not everyone's: the caches of other nodes do not count.
    transport.gather_objects(measurement)
    if measurement is not None:
        measure_on(measurement, transport)
        table = read_profile(measurement.path)
    assert table is not None

    def execute(job: RunJob) -> None:
        run_rank(share_job(job, transport), transport)

    run_schedule(
        context, schedule, table, execute, sections={"profile": profile_record(table, path, table.measured_s)}
    )


def _check_ranks(context: Context, schedule: Schedule) -> None:
    started, planned = int(os.environ["WORLD_SIZE"]), schedule.num_ranks
    if started != planned:
        raise ScheduleError(
            f"schedule={context.job.schedule}: its stages name {planned} ranks, but the launcher started "
            f"{started}; start {planned} (deepspeed --num_gpus on one node), or solve for {started}"
        )
    if started != context.cluster.num_gpus:
        raise ConfigError(
            f"cluster.num_nodes={context.cluster.num_nodes} and cluster.gpus_per_node="
            f"{context.cluster.gpus_per_node} are {context.cluster.num_gpus} ranks, but the launcher started "
            f"{started}; make them agree"
        )


def own_rank() -> int:
    """Rank of this process; 0 where no launcher started it."""
    return int(os.environ["RANK"]) if is_launched() else 0


def rank_argv(argv: list[str], rank: int) -> list[str]:
    """Drop the launcher's rank flag, which Hydra refuses; keep ranks above 0 from writing Hydra's files."""
    argv = [arg for arg in argv if not arg.startswith(("--local_rank=", "--local-rank="))]
    if rank > 0:
        argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]
        argv += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    return argv


def refuse_sweep(argv: list[str]) -> None:
    """A sweep under the launcher would run every job on every rank at once.

    Raises
    ------
    ConfigError
        If the arguments ask for one.
    """
    if any(arg in ("-m", "--multirun") for arg in argv):
        raise ConfigError(
            "-m (multirun) cannot be used under the deepspeed launcher; `python launch.py -m ...` starts "
            "a launcher for every job"
        )
