"""What a measurement needs, as the planning process hands it to the ranks (no torch here)."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

from exegpt.profiler.table import ProfileKey
from exegpt.specs import ModelSpec

MEASURE_MODULE = "exegpt.profiler.measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob:
    """A model to measure on the ranks that are started.

    Attributes
    ----------
    budget_s : float
        Time for measuring; larger batches and lengths are left out when it runs short.
    memory_bytes : int
        Per rank; K/V and activations of the largest point stay within it.
    gpus_per_node : int
        Tensor-parallel groups stay inside a node.
    path : Path
        Where rank 0 writes the table.
    """

    model: ModelSpec
    key: ProfileKey
    page_size: int
    num_threads: int
    budget_s: float
    memory_bytes: int
    gpus_per_node: int
    path: Path


def write_measure_job(job: MeasureJob, path: Path) -> None:
    """Hand a measurement over to ranks started by this process (a private file, removed after)."""
    path.write_bytes(pickle.dumps(job))


def read_measure_job(path: Path) -> MeasureJob:
    """Read what `write_measure_job` wrote."""
    job = pickle.loads(path.read_bytes())
    if not isinstance(job, MeasureJob):
        raise TypeError(f"{path} holds a {type(job).__name__}")
    return job
