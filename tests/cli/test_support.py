"""`command=support` and planning on GPUs that are not here, as a user types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_jobs import FIXED, LAUNCH, Finished, launch, start

A100 = ("model=opt-125m", "cluster=a100-16", "cluster.num_nodes=1", "cluster.gpus_per_node=2")


@pytest.fixture(scope="module")
def supported(place: Callable[[], Path]) -> Finished:
    return launch(place(), *A100, *FIXED, "command=support").succeeded()


def test_what_can_be_planned_and_why_it_cannot_run_here(supported: Finished) -> None:
    record = supported.result["support"]
    assert (record["supported"], record["runnable"], record["missing"]) == (True, False, [])
    assert "not a100-80" in record["not_runnable"][0]
    assert record["memory"]["least_gpus"] == 1
    assert record["memory"]["num_gpus"] == 2
    assert record["window"] == {"tokens": 2048, "longest_input": 16, "longest_output": 6}
    assert record["profile"]["source"] == "analytic"
    assert record["profile"]["provenance"]["tp1.linear"] == "formula (a100-80, calibrated)"
    assert "planning" in supported.out
    assert "formula (a100-80, uncalibrated)" in supported.out


def test_what_is_missing(place: Callable[[], Path]) -> None:
    """Nothing is measured or fetched: no profile, no tokenizer, more weights than memory."""
    job = launch(
        place(),
        "command=support",
        "model=opt-125m",
        "cluster=l40s-8",
        "cluster.memory_gib=0.6",
        "cluster.gpus_per_node=1",
        "profile.source=measured",
    ).succeeded()
    record = job.result["support"]
    assert record["supported"] is False
    assert [text.partition(":")[0] for text in record["missing"]] == ["memory", "workload=prompts", "profile"]
    assert "GPUs of 0.6 GiB, and the cluster has 1; raise cluster.num_nodes" in record["missing"][0]
    assert "cannot be measured here" in record["missing"][2]


def test_a_model_of_unknown_layers_is_an_answer(place: Callable[[], Path]) -> None:
    cwd = place()
    (cwd / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    overrides = ("model=hf", f"model.path={cwd}", "cluster=a100-16")
    record = launch(cwd, *overrides, "command=support").succeeded().result["support"]
    assert record["supported"] is False
    assert "model_type='mamba2' is not supported; known architectures" in record["missing"][0]
    assert launch(place(), *overrides, "command=solve").code == 2


def test_planning_on_a_sheet_starts_without_what_only_runs_need(place: Callable[[], Path]) -> None:
    """Each of these takes longer to import than a plan; plots and measuring import them themselves."""
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'matplotlib', 'scipy', 'pyarrow'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    for command in ("support", "profile"):
        overrides = [*A100, "workload=translation", f"command={command}"]
        job = start([sys.executable, "-c", code, LAUNCH, *overrides], place()).succeeded()
        assert job.complaints == ["[]"]


def test_a_written_analytic_profile_serves_its_cluster(place: Callable[[], Path]) -> None:
    cwd = place()
    made = launch(cwd, *A100, *FIXED, "command=profile").succeeded()
    path = made.output_dir / "profile.json"
    assert made.result["profile"]["path"] == str(path)
    table = json.loads(path.read_text())
    assert table["key"]["device"] == "a100-80"
    solved = launch(place(), *A100, *FIXED, "command=solve", f"profile.path={path}").succeeded()
    direct = launch(place(), *A100, *FIXED, "command=solve").succeeded()
    for key in ("policy", "knobs", "throughput_per_s", "latency_s", "provenance"):
        assert solved.result["solve"][key] == direct.result["solve"][key]
    assert any("formula (a100-80, calibrated)" in note for note in direct.result["solve"]["notes"])
    refused = launch(place(), *A100, *FIXED, "command=solve", f"profile.path={path}", "cluster.gpu=h100")
    assert refused.code == 2
    assert "measured on a100-80, but this cluster has h100" in refused.complaints[0]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("command=up",), ("cluster.gpu=a100-80: command=up needs the GPUs", "not a100-80", "cluster=local")),
        (
            ("command=profile", "profile.source=measured"),
            ("measuring a profile needs the GPUs", "profile.source=analytic"),
        ),
        (
            ("command=solve", "cluster.gpu=b900"),
            ("cluster.gpu=b900", "no GPU sheet 'b900'", "a100-80, a40-48"),
        ),
        (("command=solve", "cluster.gpu=nowhere.yaml"), ("cluster.gpu=nowhere.yaml", "cannot be read")),
        (("command=solve", "cluster.gpus_per_node=0"), ("cluster.gpus_per_node=0", "at least 1")),
        (("command=solve", "cluster.num_nodes=0"), ("cluster.num_nodes=0", "at least 1")),
        (("command=solve", "profile=vidur"), ("profile.path is null", "profile.source=vidur")),
        (("command=solve", "profile=vidur", "profile.path=nowhere"), ("profile.path=nowhere", "no such dir")),
        (
            ("command=solve", "cluster=local", "cluster.device=cpu", "profile=analytic"),
            ("profile.source=analytic", "no data sheet", "cluster.gpu", "h200"),
        ),
    ],
)
def test_refused_in_one_line(
    place: Callable[[], Path], overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    groups = {override.partition("=")[0] for override in overrides}
    base = [o for o in A100 if o.partition("=")[0] not in groups]
    if "cluster" in groups:
        base = [o for o in base if not o.startswith("cluster.")]
    job = launch(place(), *base, *FIXED, *overrides)
    assert job.code == 2, job.err
    assert len(job.complaints) == 1, job.err
    for part in parts:
        assert part in job.complaints[0]
