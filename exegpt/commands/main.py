"""From a job to its command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from exegpt.commands.context import RESULT_FILE, VERSION, Context
from exegpt.commands.gather import gather
from exegpt.commands.launched import own_rank, rank_argv, refuse_sweep, run_launched
from exegpt.commands.predict import simulate
from exegpt.commands.profile import profile
from exegpt.commands.run import is_launched, run
from exegpt.commands.solve import solve
from exegpt.commands.support import support, unsupported_record
from exegpt.commands.up import up
from exegpt.errors import ConfigError, ModelError
from exegpt.report.result_file import write_result
from exegpt.report.tables import WIDTH, support_table
from exegpt.settings import Command, Job

__all__ = [
    "answer_unsupported",
    "execute",
    "is_launched",
    "own_rank",
    "rank_argv",
    "refuse_sweep",
    "write_failure",
]

_COMMANDS = {
    Command.up: up,
    Command.profile: profile,
    Command.solve: solve,
    Command.simulate: simulate,
    Command.run: run,
    Command.support: support,
    Command.gather: gather,
}


def execute(job: Job, output_dir: Path, overrides: Sequence[str]) -> None:
    """Run a job's command."""
    # Absolute: the launcher changes the directory of the ranks it starts on other nodes.
    context = Context(job, output_dir.resolve(), overrides, _console())
    if is_launched():
        run_launched(context)
    else:
        _COMMANDS[job.command](context)


def _console() -> Console:
    # rich takes 80 columns for a pipe or a file, which breaks keys and numbers in two.
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def answer_unsupported(output_dir: Path, overrides: Sequence[str], error: ModelError) -> None:
    """`command=support` of a model that nothing can be planned for: an answer like any other."""
    record = unsupported_record(str(error))
    result = {
        "version": VERSION,
        "status": "ok",
        "command": Command.support.value,
        "overrides": list(overrides),
        "support": record,
    }
    write_result(output_dir / RESULT_FILE, result)
    support_table({}, record, _console())


def write_failure(output_dir: Path, command: str, overrides: Sequence[str], error: BaseException) -> None:
    """Leave a result.json that says why a job failed, for `gather`; of several ranks the first does."""
    if own_rank() > 0:
        return
    interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
    result = {
        "version": VERSION,
        "status": "failed",
        "command": command,
        "overrides": list(overrides),
        "error": "interrupted" if interrupted else f"{type(error).__name__}: {error}",
    }
    try:
        write_result(output_dir / RESULT_FILE, result)
    except (ConfigError, OSError):
        # The job's own error is the one to show.
        return
