"""What became of a run, read from its files, and what must hold of every one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_models import PROMPT_LENS, Oracle
from dist_ranks import Group

from exegpt.report.result_file import read_requests
from exegpt.runner.job import RunJob
from exegpt.workload.requests import Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job, its lines of `requests.jsonl` by id, and what each rank held at the end."""

    job: RunJob
    lines: dict[int, dict[str, Any]]
    states: list[dict[str, Any]]

    @property
    def good_requests(self) -> list[Request]:
        """Those that can be served; `spoiled_requests` are numbered after them."""
        return [request for request in self.job.requests if request.id < len(PROMPT_LENS)]

    @property
    def served(self) -> dict[int, list[int]]:
        """Output tokens of the requests that were served."""
        return {i: line["token_ids"] for i, line in self.lines.items() if line["status"] == "ok"}


def read_outcome(job: RunJob, group: Group) -> Outcome:
    """What a group left of a job; AssertionError with the failing rank's traceback if it did not end."""
    states = group.states(job)
    lines = {line["id"]: line for line in read_requests(job.output_dir / "requests.jsonl")}
    return Outcome(job, lines, states)


def assert_greedy(outcome: Outcome, oracle: Oracle) -> None:
    """Every request got transformers' tokens."""
    expected = oracle.answers
    assert outcome.served == {request.id: expected[request.id] for request in outcome.good_requests}


def assert_empty(outcome: Outcome) -> None:
    """No rank holds anything of the requests that it has served."""
    for rank, state in enumerate(outcome.states):
        assert state["num_free"] == outcome.job.num_pages, f"rank {rank} holds pages"
        assert not any(state["rows"]), f"rank {rank} holds rows {state['rows']}"
        assert not any(state["not_taken_in"]), f"rank {rank} has tokens that no row took in"
        assert state["expected"] == 0, f"rank {rank} waits for tokens"
        assert state["released"] == [], f"rank {rank} holds released rows"
