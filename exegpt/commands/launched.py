"""`deepspeed launch.py command=run ...`: every rank is here already."""

from __future__ import annotations

import sys
from pathlib import Path

from exegpt.commands.context import Context
from exegpt.commands.predict import load_schedule
from exegpt.commands.profile import cached_path, load_profile, measure_job, profile_record
from exegpt.commands.run import run_schedule
from exegpt.errors import ConfigError
from exegpt.runner.job import RunJob
from exegpt.settings import Command


def run_launched(context: Context) -> None:
    """Execute `command=run` as one rank of a group that the launcher started.

    Rank 0 plans and writes; the others get the job from it.

    Raises
    ------
    ConfigError
        For any other command: those start the launcher themselves.
    """
    if context.job.command is not Command.run:
        raise ConfigError(
            f"command={context.job.command.value} starts the DeepSpeed launcher itself; call it with plain "
            "`python launch.py`, or use command=run here"
        )
    # torch and DeepSpeed are loaded only by processes that are ranks.
    from exegpt.profiler.measure import measure_on
    from exegpt.runner.transport import start_transport
    from exegpt.runner.worker import report_error, run_rank, share_job

    load_schedule(context)
    transport, environment = start_transport()
    try:
        wanted = context.job.profile.path is None and (
            context.job.profile.refresh or not cached_path(context).exists()
        )
        if any(transport.gather_objects(wanted)):
            measure_on(measure_job(context, cached_path(context)), transport)
        if environment.rank > 0:
            run_rank(share_job(None, transport), transport)
        else:
            table, path = load_profile(context)

            def execute(job: RunJob) -> None:
                run_rank(share_job(job, transport), transport)

            run_schedule(
                context,
                load_schedule(context),
                table,
                execute,
                sections={"profile": profile_record(table, path, 0.0)},
            )
        transport.close()
    except BaseException as error:
        if not isinstance(error, SystemExit):
            report_error(error, Path(context.output_dir), environment.rank)
        raise


def rank_argv(argv: list[str], rank: int) -> list[str]:
    """Drop the launcher's rank flag, which Hydra refuses; keep ranks above 0 from writing Hydra's files."""
    argv = [arg for arg in argv if not arg.startswith(("--local_rank=", "--local-rank="))]
    if rank > 0:
        argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]
        argv += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    return argv


def refuse_sweep(argv: list[str]) -> None:
    """A sweep under the launcher would run every job on every rank at once."""
    if any(arg in ("-m", "--multirun") for arg in argv):
        print(
            "error: -m (multirun) cannot be used under the deepspeed launcher; sweep with `python "
            "launch.py -m ...`, "
            "which starts one launcher per job",
            file=sys.stderr,
        )
        raise SystemExit(2)
