"""What became of a run, read from its files, and what must hold of every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_cases import Case, make_job
from dist_models import PROMPT_LENS, Oracle
from dist_ranks import Group, run_group

from exegpt.report.result_file import read_requests
from exegpt.runner.job import RunJob
from exegpt.workload.requests import Request

# Measured 5 to 25 s on two shared cores; a machine's first run compiles for some 40 s before.
GROUP_TIMEOUT_S = 200.0


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


class Runs:
    """What became of cases; the first case of a world size runs all of them on one group of ranks.

    Parameters
    ----------
    cases : sequence of Case
    oracle : callable
        The oracle of a model's name.
    make_directory : callable
        A new directory of a name, for the files of a group.
    cache_dir : Path
    on_cuda : bool
    """

    def __init__(
        self,
        cases: Sequence[Case],
        oracle: Callable[[str], Oracle],
        make_directory: Callable[[str], Path],
        cache_dir: Path,
        *,
        on_cuda: bool = False,
    ) -> None:
        self.cases = cases
        self.oracle = oracle
        self._make_directory = make_directory
        self._cache_dir = cache_dir
        self._on_cuda = on_cuda
        self._groups: dict[int, tuple[dict[str, RunJob], Group]] = {}

    def __call__(self, case: Case) -> Outcome:
        """A case's outcome; AssertionError with the failing rank's traceback if it did not end."""
        if case.world_size not in self._groups:
            self._groups[case.world_size] = self._run(case.world_size)
        jobs, group = self._groups[case.world_size]
        job = jobs[case.name]
        states = group.states(job)
        lines = {line["id"]: line for line in read_requests(job.output_dir / "requests.jsonl")}
        return Outcome(job, lines, states)

    def _run(self, world_size: int) -> tuple[dict[str, RunJob], Group]:
        directory = self._make_directory(f"world-{world_size}")
        jobs = {
            case.name: make_job(case, self.oracle(case.model), self._cache_dir, directory / case.name)
            for case in self.cases
            if case.world_size == world_size
        }
        group = run_group(
            world_size, list(jobs.values()), directory, timeout_s=GROUP_TIMEOUT_S, on_cuda=self._on_cuda
        )
        return jobs, group


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
