"""Costs, the frontier, and clusters of the right size, as a user asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_jobs import launch

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


def test_frontier_with_costs(place: Callable[[], Path]) -> None:
    job = launch(
        place(), *A100, "bound=medium", "solver.pareto=6", "cluster.price_per_gpu_hour=1.8"
    ).succeeded()
    record = job.result["solve"]
    points = record["frontier"]
    assert 2 <= len(points) <= 6
    for name in ("latency_s", "throughput_per_s"):
        values = [point[name] for point in points]
        assert values == sorted(set(values))
    assert points[-1]["latency_bound_s"] is None
    # The job's own bound is among those that were searched, so its answer is on the frontier.
    assert record["throughput_per_s"] in [point["throughput_per_s"] for point in points]
    # Four GPUs at 1.8 an hour are 0.002 a second.
    for answer in [*points, record, *record["policies"].values(), *record["baselines"].values()]:
        expected = 0.002 / answer["throughput_tokens_per_s"] * 1e6
        assert answer["cost_per_million_output_tokens"] == pytest.approx(expected)
    assert record["cost_per_hour"] == pytest.approx(7.2)
    assert (job.output_dir / "pareto.png").read_bytes()[:4] == b"\x89PNG"
    assert "Throughput under every latency bound" in (job.output_dir / "report.html").read_text()
    text = " ".join(job.out.split())
    assert "under each of 6 latency bounds" in text
    assert "per million output tokens" in text
    assert "cost/Mtok" in text


def test_fewest_gpus_for_a_rate(place: Callable[[], Path]) -> None:
    bounded = (*A100, "bound.latency_s=1", "cluster.price_per_gpu_hour=1.8")
    two = launch(place(), *bounded, "cluster.gpus_per_node=2").succeeded().result["solve"]
    rate = 0.99 * two["throughput_per_s"]
    job = launch(place(), *bounded, f"solver.rate_per_s={rate}").succeeded()
    record = job.result["solve"]
    sizing = record["sizing"]
    assert (sizing["num_gpus"], sizing["num_nodes"], sizing["gpus_per_node"]) == (2, 1, 2)
    assert sizing["headroom"] == pytest.approx(1 / 0.99 - 1)
    assert [size["num_gpus"] for size in sizing["sizes"]] == [1, 2]
    assert sizing["sizes"][0]["throughput_upper_per_s"] < rate
    # The answer is that of the size chosen, as if it had been asked for.
    assert record["throughput_per_s"] == pytest.approx(two["throughput_per_s"], rel=1e-12)
    assert set(record["baselines"]) == set(two["baselines"])
    assert record["cost_per_hour"] == pytest.approx(3.6)
    text = " ".join(job.out.split())
    assert f"Fewest GPUs for {rate:g} requests/s: 2, with 1.0 % headroom" in text
    assert "schedule.yaml is for cluster.num_nodes=1 cluster.gpus_per_node=2" in text
    assert "Sizes of the cluster" in (job.output_dir / "report.html").read_text()
    sized = ("cluster.gpus_per_node=2", "workload.num_requests=20")
    overrides = [o for o in bounded if not o.startswith("command=")]
    plan = f"schedule={job.output_dir / 'schedule.yaml'}"
    simulated = launch(place(), *overrides, *sized, "command=simulate", plan).succeeded()
    steady = simulated.result["simulate"]["steady"]
    assert steady["throughput_per_s"] == pytest.approx(record["throughput_per_s"], rel=1e-9)


def test_a_rate_out_of_reach_is_an_answer(place: Callable[[], Path]) -> None:
    job = launch(place(), *A100, "solver.rate_per_s=1e6").succeeded()
    assert job.result["status"] == "infeasible"
    assert not (job.output_dir / "schedule.yaml").exists()
    record = job.result["solve"]
    assert "the greatest rate held within the bounds is" in record["reason"]
    assert len(record["sizing"]["sizes"]) == 4
    assert record["sizing"]["greatest_rate_per_s"] == max(
        size["throughput_per_s"] for size in record["sizing"]["sizes"]
    )
    named = float(record["reason"].split(" to ")[1].split(",")[0])
    held = launch(place(), *A100, f"solver.rate_per_s={named}").succeeded()
    assert held.result["status"] == "ok"


def test_frontier_where_the_bound_is_out_of_reach(place: Callable[[], Path]) -> None:
    job = launch(place(), *A100, "bound.latency_s=0.0001", "solver.pareto=2").succeeded()
    assert job.result["status"] == "infeasible"
    assert len(job.result["solve"]["frontier"]) == 2
    assert not (job.output_dir / "schedule.yaml").exists()
