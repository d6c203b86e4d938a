"""What a run needs, as the planning process hands it to rank 0 and rank 0 to the others."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

from exegpt.schedule import Schedule
from exegpt.settings import SamplingSettings
from exegpt.specs import Dtype, ModelSpec
from exegpt.workload.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """A schedule with everything to execute it.

    Attributes
    ----------
    weights, cache_dir, seed
        Where the weights come from (`model.weights`), and the seed of random ones.
    num_pages, page_size : int
        K/V pages per layer on every rank, tokens per page.
    max_rows : int
        Most queries active at once.
    num_threads : int
        CPU threads of each rank.
    eos_token_ids : frozenset of int
        Tokens that end a query; empty if lengths are forced.
    output_dir : Path
        Where rank 0 writes `requests.jsonl` and `measured.json`.
    """

    model: ModelSpec
    schedule: Schedule
    weights: str
    cache_dir: Path
    seed: int
    dtype: Dtype
    sampling: SamplingSettings
    num_pages: int
    page_size: int
    max_rows: int
    num_threads: int
    eos_token_ids: frozenset[int]
    requests: tuple[Request, ...]
    output_dir: Path

    def without_requests(self) -> RunJob:
        """The part that ranks other than the controller need."""
        return replace(self, requests=())


def write_job(job: RunJob, path: Path) -> None:
    """Hand a job over to workers started by this process (a private file, removed after the run)."""
    path.write_bytes(pickle.dumps(job))


def read_job(path: Path) -> RunJob:
    """Read what `write_job` wrote."""
    job = pickle.loads(path.read_bytes())
    if not isinstance(job, RunJob):
        raise TypeError(f"{path} holds a {type(job).__name__}")
    return job
