"""Schedules that closed form and replay are compared on: the solver's, and some drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from paper.scenarios import CONF
from rich.console import Console

from exegpt.commands.context import Context
from exegpt.commands.profile import load_profile
from exegpt.commands.solve import make_problem
from exegpt.config import register, to_job
from exegpt.errors import ExeGPTError
from exegpt.profiler.table import ProfileTable
from exegpt.schedule import Schedule, Stage
from exegpt.scheduler.result import Best
from exegpt.scheduler.solve import Problem, solve
from exegpt.scheduler.space import PolicySpace
from exegpt.simulator.choice import Choice
from exegpt.simulator.steady import SteadyState
from exegpt.specs import Policy

POLICIES = (
    Policy.RRA,
    Policy.WAA_C,
    Policy.WAA_M,
    Policy.WAA,
    Policy.STATIC,
    Policy.STATIC_HYBRID,
    Policy.ITERATION,
    Policy.CHUNKED,
    Policy.DISAGGREGATED,
)

# What is drawn at random has at least this share of the best throughput: what somebody may well choose.
LEAST_SHARE = 0.4
# Draws before a policy is given up on.
MOST_DRAWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, a cluster, a task; the bound is a quantile of STATIC's latencies, or None."""

    name: str
    overrides: tuple[str, ...]
    quantile: float | None


SETTINGS = (
    Setting(
        name="T5-11B, 8 A40, S, loose",
        overrides=("experiment=paper/t5-11b", "workload=summarization"),
        quantile=0.7,
    ),
    Setting(
        name="OPT-13B, 4 A40, T, medium",
        overrides=("experiment=paper/opt-13b", "workload=translation"),
        quantile=0.3,
    ),
    Setting(
        name="GPT-3 39B, 16 A40, S, loose",
        overrides=("experiment=paper/gpt3-39b", "workload=summarization"),
        quantile=0.7,
    ),
    Setting(
        name="GPT-3 175B, 16 A100, G, medium",
        overrides=("experiment=paper/gpt3-175b-a100", "workload=codegen"),
        quantile=0.3,
    ),
    Setting(
        name="LLaMA-3 70B, 8 H100, C1, none",
        overrides=("model=llama-3-70b", "cluster=h100-8", "workload=conversation-short"),
        quantile=None,
    ),
    Setting(
        name="Qwen3 32B, 8 L40S, T, loose",
        overrides=("model=qwen3-32b", "cluster=l40s-8", "workload=translation"),
        quantile=0.7,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule to compare on, as closed form (`choice`, `batch`, `extent`) and replay take it."""

    setting: str
    problem: Problem
    choice: Choice
    batch: int
    extent: int
    schedule: Schedule
    is_best: bool

    @property
    def policy(self) -> Policy:
        """Its policy."""
        return self.choice.policy

    @property
    def knobs(self) -> str:
        """Batch, extent, stages, micro-batches and replicas in a few letters."""
        choice = self.choice
        sides = dict.fromkeys([choice.encode_stages, choice.decode_stages])
        stages = "|".join(_degrees(side) for side in sides)
        extent = {Policy.RRA: f" N_D {self.extent}", Policy.CHUNKED: f" tokens {self.extent}"}
        parts = [
            f"b {self.batch}{extent.get(self.policy, '')}",
            f"tp {stages}",
            f"m {choice.num_micro_batches}",
        ]
        if choice.num_replicas > 1:
            parts.append(f"r {choice.num_replicas}")
        if self.policy is Policy.DISAGGREGATED:
            parts.append(f"{choice.num_encode_instances}+{choice.num_decode_instances}")
        return ", ".join(parts)


def _degrees(stages: Sequence[Stage]) -> str:
    """Degrees of stages in a few letters, as 4*1 for four stages of degree 1."""
    runs = [(degree, len(list(run))) for degree, run in groupby(stage.tp_size for stage in stages)]
    return " ".join(f"{count}*{degree}" if count > 1 else str(degree) for degree, count in runs)


@cache
def context(overrides: tuple[str, ...]) -> Context:
    """The job of a setting."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=["command=solve", *overrides])
    return Context(
        job=to_job(cfg), output_dir=Path("outputs/agreement"), overrides=(), console=Console(stderr=True)
    )


@cache
def profile(overrides: tuple[str, ...]) -> ProfileTable:
    """Analytic profile of a setting's model on its GPUs."""
    return load_profile(context(overrides))[0]


def make_cases(setting: Setting, policy: Policy, num_drawn: int, seed: int) -> list[Case]:
    """The solver's best schedule of a policy, and some drawn at random; empty if it cannot serve the model.

    Drawn ones fit in memory, and mind no bound.
    """
    base = make_problem(context(setting.overrides), profile(setting.overrides))
    problem = replace(base, policies=(policy,), baselines=(), bound_quantile=setting.quantile)
    try:
        best = solve(problem).policies[policy].best
    except ExeGPTError:
        return []
    if best is None:
        return []
    cases = [_case(setting, problem, best, is_best=True)]
    if not num_drawn:
        return cases
    steady = problem.steady()
    space = problem.spaces(steady, [policy])[policy]
    rng = np.random.default_rng([seed, POLICIES.index(policy), SETTINGS.index(setting)])
    for _ in range(MOST_DRAWS):
        if len(cases) > num_drawn:
            break
        drawn = _draw(space, steady, problem, rng)
        if drawn is not None and drawn.throughput_per_s >= LEAST_SHARE * best.throughput_per_s:
            cases.append(_case(setting, problem, drawn, is_best=False))
    return cases


def _case(setting: Setting, problem: Problem, best: Best, *, is_best: bool) -> Case:
    lengths = problem.lengths
    return Case(
        setting=setting.name,
        problem=problem,
        choice=best.choice,
        batch=best.batch,
        extent=best.extent,
        schedule=best.schedule(problem.model.name, lengths.summary(), lengths.mean_output),
        is_best=is_best,
    )


def _draw(space: PolicySpace, steady: SteadyState, problem: Problem, rng: np.random.Generator) -> Best | None:
    """A candidate of the space drawn at random; None if it does not fit in memory or in the profile."""
    index = int(rng.integers(len(space.choices)))
    batches = space.batches(index)
    # Evenly over orders of magnitude: most batches of a range are too large to fit.
    place = int(len(batches) ** rng.random()) - 1
    batch, extent = int(batches[place]), int(rng.choice(space.extents))
    e = steady.estimate(space.choices[index], np.array([batch]), np.array([extent]))
    memory = e.memory.total_bytes[0]
    if not np.isfinite(e.latency_s[0]) or memory.max() > problem.cluster.memory_bytes:
        return None
    return Best.of(space.choices[index], batch, extent, e)
