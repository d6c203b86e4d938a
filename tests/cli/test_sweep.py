"""Multirun and gather: one directory a job, a failing job stops no other, one table at the end."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_jobs import FIXED, Finished, launch


@pytest.fixture(scope="session")
def sweep(place: Callable[[], Path], tiny: tuple[str, ...], profiled: Finished) -> Finished:
    """Two workloads under three bounds, of which the tightest cannot be met."""
    return launch(
        place(),
        "-m",
        *tiny,
        "command=solve",
        "workload=fixed",
        "workload.input_tokens=16",
        "workload.output_tokens=3,6",
        "bound.latency_s=0.0001,5,inf",
        "solver.max_encode_batch_size=4",
    ).succeeded()


@pytest.fixture(scope="session")
def sweep_dir(sweep: Finished) -> Path:
    (directory,) = (sweep.cwd / "outputs" / "sweeps").iterdir()
    return directory


def test_every_job_has_its_result(sweep_dir: Path) -> None:
    results = {path.parent.name: json.loads(path.read_text()) for path in sweep_dir.glob("*/result.json")}
    assert sorted(results) == ["0", "1", "2", "3", "4", "5"]
    for number, result in results.items():
        expected = "infeasible" if "bound.latency_s=0.0001" in result["overrides"] else "ok"
        assert result["status"] == expected
        assert (sweep_dir / number / "schedule.yaml").exists() == (expected == "ok")
    bounds = sorted(str(result["solve"]["latency_bound_s"]) for result in results.values())
    assert bounds == ["0.0001", "0.0001", "5.0", "5.0", "None", "None"]


def test_gather(place: Callable[[], Path], sweep_dir: Path) -> None:
    finished = launch(place(), "command=gather", f"gather.dir={sweep_dir}").succeeded()
    assert finished.result["status"] == "ok"
    rows = list(csv.DictReader((sweep_dir / "summary.csv").read_text().splitlines()))
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert {(row["workload.output_tokens"], row["bound.latency_s"]) for row in rows} == {
        (tokens, bound) for tokens in ("3", "6") for bound in ("0.0001", "5", "inf")
    }
    for row in rows:
        solved = json.loads((sweep_dir / row["job"] / "result.json").read_text())["solve"]
        if row["status"] == "ok":
            assert float(row["throughput_per_s"]) == pytest.approx(solved["throughput_per_s"])
        else:
            assert "bound.latency_s" in row["note"]
    markdown = (sweep_dir / "summary.md").read_text()
    assert markdown.count("\n| ") == 6 + markdown.count("\n| ---")
    assert (sweep_dir / "pareto.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "infeasible" in finished.out


def test_a_failing_job_stops_no_other(
    place: Callable[[], Path], tiny: tuple[str, ...], profiled: Finished
) -> None:
    # The second length is refused by its job, after Hydra composed the whole sweep.
    finished = launch(
        place(),
        "-m",
        *tiny,
        "command=solve",
        *FIXED,
        "workload.input_tokens=16,600,8",
    )
    assert finished.code == 2
    errors = [line for line in finished.complaints if line.startswith("error: ")]
    assert len(errors) == 1
    assert "shortest of 600 in" in errors[0]
    assert "Traceback" not in finished.err
    (directory,) = (finished.cwd / "outputs" / "sweeps").iterdir()
    statuses = [json.loads((directory / str(n) / "result.json").read_text())["status"] for n in range(3)]
    assert statuses == ["ok", "failed", "ok"]
    gathered = launch(place(), "command=gather", f"gather.dir={directory}").succeeded()
    assert "failed" in gathered.out
    assert "shortest of 600 in" in (directory / "summary.csv").read_text()


def test_a_sweep_that_cannot_be_composed_runs_no_job(
    place: Callable[[], Path], tiny: tuple[str, ...]
) -> None:
    finished = launch(place(), "-m", *tiny, *FIXED, "command=solve", "bound.latency_s=5,fast,inf")
    assert finished.code == 2
    assert len(finished.complaints) == 1
    assert "bound.latency_s=fast: expected a number" in finished.complaints[0]
    assert not list(finished.cwd.glob("outputs/sweeps/*/*/result.json"))
