"""Entry point: compose the configuration, convert it, call the command.

python launch.py [overrides]          python launch.py -m [sweeps]
deepspeed [launcher flags] launch.py command=run schedule=PATH
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from exegpt.commands.main import (
    answer_unsupported,
    execute,
    is_launched,
    own_rank,
    rank_argv,
    refuse_sweep,
    write_failure,
)
from exegpt.config import explain, register, to_job
from exegpt.errors import ExeGPTError, ModelError
from exegpt.settings import Command

register()

SHOW_TRACEBACK = "EXEGPT_FULL_ERROR"
RANK_0_SPEAKS_S = 15.0

# Errors of jobs that a user can mend. Hydra would print each with a traceback's tail.
failures: list[str] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Run one job in the directory that Hydra made for it."""
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    overrides = list(HydraConfig.get().overrides.task)
    command = str(cfg.command.value)
    try:
        execute(to_job(cfg), output_dir, overrides)
    except ExeGPTError as error:
        if command == Command.support.value and isinstance(error, ModelError):
            answer_unsupported(output_dir, overrides, error)
            return
        write_failure(output_dir, command, overrides, error)
        if os.environ.get(SHOW_TRACEBACK) == "1":
            raise
        failures.append(str(error))
    except BaseException as error:
        write_failure(output_dir, command, overrides, error)
        raise


def _terminate(signum: int, frame: object) -> None:
    """End as after an error, so that the ranks are ended too; a shell's code for a signal."""
    sys.exit(128 + signum)


def one_line(text: str) -> str:
    """A message without line breaks; parsers of YAML and JSON write several lines."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def start() -> int:
    """Run `main`; 2 for what the user can mend (one message), 130 for an interrupt, 0 for an answer."""
    # HYDRA_FULL_ERROR=1 shows tracebacks; without it Hydra would end the process itself, so we set it
    # and remember the wish under another name.
    os.environ.setdefault(SHOW_TRACEBACK, os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # The clone's folder kernels/ must not be taken for the PyPI package of that name, which transformers
    # looks for; everything of ours is imported from the installed package.
    clone = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != clone]
    rank = own_rank()
    try:
        if is_launched():
            refuse_sweep(sys.argv)
            sys.argv = rank_argv(sys.argv, rank)
        else:
            signal.signal(signal.SIGTERM, _terminate)
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`--help | head`); Python would try to flush it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        text = explain(error)
        if text is None or os.environ[SHOW_TRACEBACK] == "1":
            raise
        failures.append(text)
    if failures and rank > 0:
        # What every rank finds wrong, rank 0 says; the launcher ends this one meanwhile.
        time.sleep(RANK_0_SPEAKS_S)
    for text in failures:
        where = f"rank {rank}: " if rank > 0 else ""
        print(f"error: {where}{one_line(text)}", file=sys.stderr)
    return 2 if failures else 0


if __name__ == "__main__":
    sys.exit(start())
