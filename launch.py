"""Entry point: compose the configuration, convert it, call the command.

python launch.py [overrides]          python launch.py -m [sweeps]
deepspeed [launcher flags] launch.py command=run schedule=PATH
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from exegpt.commands.main import execute, is_launched, rank_argv, refuse_sweep, write_failure
from exegpt.config import explain, register, to_job
from exegpt.errors import ExeGPTError

register()

SHOW_TRACEBACK = "EXEGPT_FULL_ERROR"

# Errors of jobs that a user can mend. Hydra would print each with a traceback's tail.
failures: list[str] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Run one job in the directory that Hydra made for it."""
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    overrides = list(HydraConfig.get().overrides.task)
    try:
        execute(to_job(cfg), output_dir, overrides)
    except ExeGPTError as error:
        write_failure(output_dir, overrides, error)
        if os.environ.get(SHOW_TRACEBACK) == "1":
            raise
        failures.append(str(error))
    except BaseException as error:
        write_failure(output_dir, overrides, error)
        raise


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
    if is_launched():
        refuse_sweep(sys.argv)
        sys.argv = rank_argv(sys.argv, int(os.environ["RANK"]))
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        text = explain(error)
        if text is None or os.environ[SHOW_TRACEBACK] == "1":
            raise
        failures.append(text)
    for text in failures:
        print(f"error: {text}", file=sys.stderr)
    return 2 if failures else 0


if __name__ == "__main__":
    sys.exit(start())
