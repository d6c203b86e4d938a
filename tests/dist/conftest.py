"""Checkpoints with their oracle, and one group of ranks for each world size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from dist_cases import CASES, Case, make_job
from dist_models import Oracle, make_oracle
from dist_outcomes import Outcome, read_outcome
from dist_ranks import Group, run_group

from exegpt.runner.job import RunJob

# Measured 5 to 10 s on two shared cores; the first use of a machine compiles for some 40 s before.
GROUP_TIMEOUT_S = 200.0


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """`oracle(name)`: a checkpoint of `dist_models.SHAPES` with its requests and answers."""
    return cache(lambda name: make_oracle(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def outcome(
    oracle: Callable[[str], Oracle], cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Outcome]:
    """`outcome(case)`: what became of a case; the first case of a world size runs all of them."""

    @cache
    def group(world_size: int) -> tuple[dict[str, RunJob], Group]:
        directory = tmp_path_factory.mktemp(f"world-{world_size}")
        jobs = {
            case.name: make_job(case, oracle(case.model), cache_dir, directory / case.name)
            for case in CASES
            if case.world_size == world_size
        }
        return jobs, run_group(world_size, list(jobs.values()), directory, timeout_s=GROUP_TIMEOUT_S)

    @cache
    def of(case: Case) -> Outcome:
        jobs, ran = group(case.world_size)
        return read_outcome(jobs[case.name], ran)

    return of
