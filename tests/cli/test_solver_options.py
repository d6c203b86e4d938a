"""What the keys of `solver` do to an answer, as a user types them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_jobs import Finished, launch

A100 = (
    "command=solve",
    "model=opt-125m",
    "cluster=a100-16",
    "cluster.num_nodes=1",
    "cluster.gpus_per_node=4",
    "workload=summarization",
    "solver.policies=[RRA]",
    "solver.max_encode_batch_size=16",
)


@pytest.fixture
def answer(place: Callable[[], Path]) -> Callable[..., tuple[Finished, dict[str, Any]]]:
    """`answer(*overrides)` is the finished job and its `solve` record."""

    def solve(*overrides: str) -> tuple[Finished, dict[str, Any]]:
        job = launch(place(), *A100, *overrides).succeeded()
        return job, job.result["solve"]

    return solve


def test_replicas_and_equal_degrees_are_kept_to(
    answer: Callable[..., tuple[Finished, dict[str, Any]]],
) -> None:
    _, free = answer("bound.latency_s=2")
    _, kept = answer("bound.latency_s=2", "solver.num_replicas=[2]", "solver.partial_tp=false")
    assert kept["num_replicas"] == 2
    assert len({len(stage["ranks"]) for stage in kept["stages"]}) == 1
    assert kept["space_size"] < free["space_size"]
    assert kept["throughput_per_s"] <= free["throughput_per_s"]


def test_margins_are_kept_and_their_price_is_said(
    answer: Callable[..., tuple[Finished, dict[str, Any]]],
) -> None:
    job, record = answer("bound=tight", "solver.confidence=0.95", "solver.drift_margin=0.1")
    _, free = answer("bound=tight")
    margins = record["margins"]
    assert (margins["confidence"], margins["drift_margin"]) == (0.95, 0.1)
    # The static baseline's quantile is the bound; it is taken without margins.
    assert record["latency_bound_s"] == free["latency_bound_s"]
    assert record["latency_s"] < margins["worst"]["latency_s"] <= record["latency_bound_s"]
    assert margins["throughput_without_per_s"] == pytest.approx(free["throughput_per_s"])
    assert margins["cost"] == pytest.approx(1 - record["throughput_per_s"] / free["throughput_per_s"])
    assert margins["cost"] > 0
    assert record["policies"]["RRA"]["worst"] == margins["worst"]
    text = " ".join(job.out.split())
    assert "latency bound met with a probability of 95.0 %" in text
    assert "mean and deviation of output lengths may be off by 10.0 %" in text
    assert "of throughput (" in text
    assert "margins" not in free


def test_the_papers_search_claims_no_proof(answer: Callable[..., tuple[Finished, dict[str, Any]]]) -> None:
    job, record = answer("bound=tight", "solver=paper", "solver.policies=[RRA]")
    _, proven = answer("bound=tight")
    assert record["method"] == "paper"
    assert record["gap"] is record["throughput_upper_per_s"] is None
    assert "upper bound not proven" in " ".join(job.out.split())
    assert record["throughput_per_s"] <= proven["throughput_per_s"] * (1 + 1e-9)
    assert record["latency_s"] <= record["latency_bound_s"]
    assert record["baselines"] == proven["baselines"]
