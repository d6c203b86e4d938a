"""Checkpoints with their oracle, and one group of ranks for each world size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from dist_cases import CASES
from dist_models import Oracle, make_oracle
from dist_outcomes import Runs


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """`oracle(name)`: a checkpoint of `dist_models.SHAPES` with its requests and answers."""
    return cache(lambda name: make_oracle(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def outcome(
    oracle: Callable[[str], Oracle], cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """`outcome(case)`: what became of a case of the table."""
    return Runs(CASES, oracle, tmp_path_factory.mktemp, cache_dir)
