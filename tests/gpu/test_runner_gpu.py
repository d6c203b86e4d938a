"""The runtime on CUDA with NCCL: the cases of the distributed tests on as many devices as they need."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from dist_cases import CASES, Case
from dist_models import Oracle, make_oracle
from dist_outcomes import Runs, assert_empty, assert_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GREEDY = [case for case in CASES if not case.drawn]
DRAWN = [case for case in CASES if case.drawn and case.world_size > 1]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    return cache(lambda name: make_oracle(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def outcome(
    oracle: Callable[[str], Oracle], cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    return Runs(CASES, oracle, tmp_path_factory.mktemp, cache_dir, on_cuda=True)


@pytest.fixture(autouse=True)
def enough_devices(request: pytest.FixtureRequest) -> None:
    """Skip a case that needs more devices than there are."""
    case: Case = request.getfixturevalue("case")
    count = torch.cuda.device_count()
    if case.world_size > count:
        pytest.skip(f"{case.name} needs {case.world_size} CUDA devices; this machine has {count}")


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.name)
def test_tokens_on_cuda_are_those_of_transformers(
    case: Case, oracle: Callable[[str], Oracle], outcome: Runs
) -> None:
    ran = outcome(case)
    assert_greedy(ran, oracle(case.model))
    assert_empty(ran)


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.name)
def test_drawn_tokens_on_cuda_do_not_depend_on_the_layout(case: Case, outcome: Runs) -> None:
    one = next(c for c in CASES if c.drawn and c.model == case.model and not c.preempts)
    served, reference = outcome(case).served, outcome(one).served
    assert served == {i: reference[i] for i in served}
