"""The runtime's tokens are transformers', whatever policy, layout, batch and page pool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from dist_cases import CASES, Case
from dist_models import MARGIN, SHAPES, Oracle, spoiled_requests
from dist_outcomes import Outcome, Runs, assert_empty, assert_greedy

pytestmark = pytest.mark.dist

GREEDY = [case for case in CASES if not case.drawn]
DRAWN = [case for case in CASES if case.drawn]
SPOILED = [case for case in CASES if case.spoiled]
# What the other drawn runs of a model are compared with.
REFERENCES = {"smollm2": "one-smollm2-drawn", "llama": "one-llama-drawn"}


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def encoded_queries(outcome: Outcome) -> dict[int, int]:
    """Queries that stage 0 encoded, by cycle."""
    measured = json.loads((outcome.job.output_dir / "measured.json").read_text())
    events: list[dict[str, Any]] = measured["events"]
    cycles: dict[int, int] = {}
    for event in events:
        if event["stage"] == 0 and event["phase"] == "encode":
            cycles[event["cycle"]] = cycles.get(event["cycle"], 0) + event["num_queries"]
    return cycles


@pytest.mark.parametrize("name", SHAPES)
def test_the_oracle_is_a_hard_one(name: str, oracle: Callable[[str], Oracle]) -> None:
    served = oracle(name)
    assert served.margin > MARGIN, "another order of summing could change these tokens"
    lengths = {i: len(tokens) for i, tokens in served.answers.items()}
    limits = {r.id: r.max_output_tokens for r in served.requests}
    free = [r.id for r in served.requests if r.forced_output_tokens is None]
    forced = [r.id for r in served.requests if r.forced_output_tokens is not None]
    assert sum(lengths[i] < limits[i] for i in free) >= 2, "an end of sequence must cut some answers short"
    assert sum(lengths[i] == limits[i] > 1 for i in free) >= 2, "others must reach their limit"
    assert all(lengths[i] == limits[i] for i in forced)
    beyond = [i for i in forced if served.eos_token_ids & set(served.answers[i][:-1])]
    assert beyond, "a forced answer must go on beyond an end of sequence"
    assert len({token for tokens in served.answers.values() for token in tokens}) > 20


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.name)
def test_greedy_tokens_are_those_of_transformers(
    case: Case, oracle: Callable[[str], Oracle], outcome: Runs
) -> None:
    assert_greedy(outcome(case), oracle(case.model))


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.name)
def test_drawn_tokens_depend_on_seed_and_request_alone(
    case: Case, oracle: Callable[[str], Oracle], outcome: Runs
) -> None:
    ran = outcome(case)
    reference = outcome(case_named(REFERENCES[case.model])).served
    served = ran.served
    assert served == {i: reference[i] for i in served}
    greedy = oracle(case.model).answers
    assert sum(tokens != greedy[i] for i, tokens in served.items()) > len(served) / 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_ends_empty(case: Case, outcome: Runs) -> None:
    assert_empty(outcome(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_records_tell_how_requests_went(case: Case, oracle: Callable[[str], Oracle], outcome: Runs) -> None:
    ran = outcome(case)
    eos_token_ids = oracle(case.model).eos_token_ids
    assert set(ran.lines) == {request.id for request in ran.job.requests}
    for request in ran.good_requests:
        line = ran.lines[request.id]
        stopped = request.forced_output_tokens is None and line["token_ids"][-1] in eos_token_ids
        assert (line["status"], line["error"]) == ("ok", None)
        assert line["finish_reason"] == ("stop" if stopped else "length")
        assert line["output_tokens"] == len(line["token_ids"])
        assert request.arrival_s <= line["encode_start_s"] <= line["first_token_s"] <= line["finish_s"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_queries_join_and_are_put_back_as_the_case_says(case: Case, outcome: Runs) -> None:
    ran = outcome(case)
    cycles = encoded_queries(ran)
    if case.preempts:
        assert sum(cycles.values()) > len(ran.good_requests), "the pages lasted: nobody was put back"
    elif case.spoiled:
        # Pages are few here so that a request cannot fit; others may have to make room.
        assert sum(cycles.values()) >= len(ran.good_requests)
    else:
        assert sum(cycles.values()) == len(ran.good_requests)
    assert max(cycles.values()) <= case.batch
    if case.batch < len(ran.good_requests):
        assert len(cycles) > 1, "all came at once: nobody joined on the way"


@pytest.mark.parametrize("case", SPOILED, ids=lambda case: case.name)
def test_a_bad_request_fails_alone(case: Case, oracle: Callable[[str], Oracle], outcome: Runs) -> None:
    ran = outcome(case)
    for request, said in spoiled_requests(oracle(case.model).spec.vocab_size):
        line = ran.lines[request.id]
        assert (line["status"], line["finish_reason"], line["token_ids"]) == ("failed", "error", [])
        assert re.search(said, line["error"])
    assert len(ran.served) == len(oracle(case.model).requests)
