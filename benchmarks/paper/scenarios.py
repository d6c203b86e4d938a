"""The paper's models, tasks and bounds as planning problems, composed from `conf/experiment/paper`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from rich.console import Console

from exegpt.commands.context import Context
from exegpt.commands.profile import load_profile
from exegpt.commands.solve import make_problem
from exegpt.config import register, to_job
from exegpt.profiler.table import ProfileTable
from exegpt.scheduler.solve import Problem, solve
from exegpt.specs import BoundSpec, Policy

CONF = Path(__file__).resolve().parents[2] / "conf"

TASKS = {
    "S": "summarization",
    "T": "translation",
    "G": "codegen",
    "C1": "conversation-short",
    "C2": "conversation-long",
}
# Quantiles of the static baseline's latencies over its batch sizes; None is no bound.
BOUNDS = {"tight": 0.10, "medium": 0.30, "loose": 0.70, "none": None}

# What the paper calls ExeGPT: the better of these.
RRA = (Policy.RRA,)
WAA = (Policy.WAA_C, Policy.WAA_M)
PUBLISHED = (*RRA, *WAA)
# With our own search over the split of the GPUs.
OURS = (*PUBLISHED, Policy.WAA)
# Systems that it, or later work, is compared with; STATIC is FasterTransformer.
PEERS = (Policy.STATIC_HYBRID, Policy.ITERATION, Policy.CHUNKED, Policy.DISAGGREGATED)

FIGURE_6 = [(e, t) for e in ("t5-11b", "opt-13b", "gpt3-39b", "gpt3-101b") for t in ("S", "T", "C1")]
FIGURE_8 = [
    (e, t) for e in ("gpt3-101b", "gpt3-175b-a100", "gpt3-175b-a40", "gpt3-341b") for t in ("G", "C1", "C2")
]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Scenario:
    """A file of `conf/experiment/paper`, a key of `TASKS` and one of `BOUNDS`."""

    experiment: str
    task: str
    bound: str

    def __str__(self) -> str:
        return f"{self.experiment} {self.task} {self.bound}"


def scenarios() -> list[Scenario]:
    """All scenarios of figures 6 and 8, each once."""
    pairs = dict.fromkeys([*FIGURE_6, *FIGURE_8])
    return [Scenario(experiment=e, task=t, bound=b) for e, t in pairs for b in BOUNDS]


@cache
def context(experiment: str, task: str) -> Context:
    """The job of an experiment file with a task's lengths."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[f"experiment=paper/{experiment}", f"workload={TASKS[task]}"])
    return Context(
        job=to_job(cfg), output_dir=Path("outputs/reproduction"), overrides=(), console=Console(stderr=True)
    )


@cache
def profile(experiment: str) -> ProfileTable:
    """Analytic profile of an experiment's model on its GPUs; the same for every task."""
    return load_profile(context(experiment, "S"))[0]


def problem(scenario: Scenario, policies: Sequence[Policy]) -> Problem:
    """A scenario's planning problem."""
    base = make_problem(context(scenario.experiment, scenario.task), profile(scenario.experiment))
    return replace(base, bound=BoundSpec(), bound_quantile=BOUNDS[scenario.bound], policies=tuple(policies))


def resolved_bound(given: Problem) -> BoundSpec:
    """The problem's bound in seconds: its quantile of the static baseline's latencies."""
    return solve(replace(given, policies=(Policy.STATIC,))).bound
