"""Whatever a user gets wrong ends as one line that says what, where and what is allowed; exit code 2."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from cli_jobs import FIXED, LAUNCH, Finished, launch

SOLVE = (*FIXED, "command=solve")
UP = (*FIXED, "command=up")
TRACE = ("command=solve", "workload=trace")
PROMPTS = ("command=up", "workload=prompts", "model.weights={model}")
RUN = (*FIXED, "command=run")

# Name of the case: overrides, then what the line must hold. `{name}` is a file of the fixture `files`.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown model": (("model=gpt9",), ("model=gpt9", "hf, ", "opt-125m, opt-13b, qwen3-32b, smollm2-135m")),
    "unknown command": (
        ("command=fly",),
        ("command=fly", "up, profile, solve, simulate, run, support, gather"),
    ),
    "misspelt key": ((*SOLVE, "bound.latncy_s=1"), ("bound.latncy_s", "bound.latency_s?")),
    "misspelt key with +": ((*SOLVE, "+bound.latncy_s=1"), ("bound.latncy_s", "bound.latency_s?")),
    "negative bound": ((*SOLVE, "bound.latency_s=-1"), ("bound.latency_s=-1", "above 0 s")),
    "bound is no number": ((*SOLVE, "bound.latency_s=fast"), ("bound.latency_s=fast", "a number")),
    "trace is missing": (
        (*TRACE, "workload.path=nowhere.csv"),
        ("workload.path=nowhere.csv", "no such file"),
    ),
    "trace is empty": ((*TRACE, "workload.path={trace_empty_csv}"), ("trace_empty.csv", "empty")),
    "trace has a word for a number": (
        (*TRACE, "workload.path={trace_corrupt_csv}"),
        ("trace_corrupt.csv, line 3", "GeneratedTokens", "whole number"),
    ),
    "trace is no text": ((*TRACE, "workload.path={trace_bytes_csv}"), ("trace_bytes.csv", "not UTF-8")),
    "trace is truncated": (
        (*TRACE, "workload.path={trace_truncated_csv}"),
        ("trace_truncated.csv, line 3", "GeneratedTokens"),
    ),
    "trace has other columns": (
        (*TRACE, "workload.path={trace_columns_csv}"),
        ("trace_columns.csv", "'prompt', 'answer'", "workload.input_column"),
    ),
    "column named is not there": (
        (*TRACE, "workload.path={trace_columns_csv}", "workload.input_column=a", "workload.output_column=b"),
        ("trace_columns.csv", "'a'", "'prompt', 'answer'"),
    ),
    "weights are missing": ((*UP, "model.weights=nowhere"), ("model.weights=nowhere", "safetensors or GGUF")),
    "weights directory is empty": (
        (*UP, "model.weights={weights_none}"),
        ("model.weights=", "weights_none", "*.safetensors"),
    ),
    "safetensors is truncated": ((*UP, "model.weights={weights_cut}"), ("weights_cut/model.safetensors",)),
    "safetensors is a stub": ((*UP, "model.weights={weights_stub}"), ("weights_stub/model.safetensors",)),
    "GGUF is truncated": ((*UP, "model.weights={weights_cut_gguf}"), ("weights_cut.gguf",)),
    "hub id is out of reach": (
        (*UP, "model.weights=no-such-organisation/no-such-model"),
        ("model.weights=no-such-organisation/no-such-model", "Hugging Face hub"),
    ),
    "weights of another model": (
        (*UP, "model.weights={model}", "model.path={longer}"),
        ("num_hidden_layers",),
    ),
    "more ranks than devices": ((*SOLVE, "cluster.gpus_per_node=640"), ("cluster.gpus_per_node=640", "1..")),
    "several nodes without a hostfile": (
        (*UP, "cluster.num_nodes=2"),
        ("cluster.num_nodes=2", "runner.hostfile"),
    ),
    "hostfile is missing": (
        (*UP, "cluster.num_nodes=2", "runner.hostfile=nowhere"),
        ("runner.hostfile=nowhere",),
    ),
    "schedule is not given": (RUN, ("schedule is null", "command=run")),
    "schedule is missing": ((*RUN, "schedule=nowhere.yaml"), ("schedule=nowhere.yaml", "command=solve")),
    "schedule is no YAML": (
        (*RUN, "schedule={schedule_corrupt_yaml}"),
        ("schedule_corrupt.yaml", "not YAML"),
    ),
    "schedule is empty": ((*RUN, "schedule={schedule_empty_yaml}"), ("schedule_empty.yaml", "mapping")),
    "schedule has a wrong knob": (
        (*RUN, "schedule={schedule_knob_yaml}"),
        ("schedule_knob.yaml", "knobs.decode_iterations=0", "at least 1"),
    ),
    "schedule of another model": (
        (*RUN, "schedule={schedule_other_yaml}"),
        ("schedule_other.yaml", "opt-125m", "model.name=tiny"),
    ),
    "schedule for more ranks": (
        (*RUN, "schedule={schedule_wide_yaml}"),
        ("schedule_wide.yaml", "4 ranks", "cluster.gpus_per_node"),
    ),
    "profile is missing": (
        (*SOLVE, "profile.path=nowhere.json"),
        ("profile.path=nowhere.json", "command=profile"),
    ),
    "profile is corrupt": ((*SOLVE, "profile.path={profile_corrupt_json}"), ("profile_corrupt.json",)),
    "profile of another device": (
        (*SOLVE, "profile.path={profile_device_json}"),
        ("profile_device.json", "measured on Abacus"),
    ),
    "profile of another model": (
        (*SOLVE, "profile.path={profile_shape_json}"),
        ("profile_shape.json", "the model huge, not for tiny"),
    ),
    "profile of another dtype": (
        (*SOLVE, "profile.path={profile_dtype_json}", "runner.dtype=float32"),
        ("profile_dtype.json", "runner.dtype=float32"),
    ),
    "prompts are missing": (
        (*PROMPTS, "workload.path=nowhere.txt"),
        ("workload.path=nowhere.txt", "no such file"),
    ),
    "prompts file is empty": (
        (*PROMPTS, "workload.path={prompts_empty_jsonl}"),
        ("prompts_empty.jsonl", "empty"),
    ),
    "prompts file is torn": (
        (*PROMPTS, "workload.path={prompts_corrupt_jsonl}"),
        ("prompts_corrupt.jsonl, line 2",),
    ),
    "all prompts are empty": (
        (*PROMPTS, "workload.path={prompts_blank_jsonl}", "runner.max_output_tokens=4"),
        ("prompts_blank.jsonl", "the prompt is empty"),
    ),
    "more prompts than the file has": (
        (*PROMPTS, "workload.path={prompts_good_jsonl}", "workload.num_requests=3"),
        ("workload.num_requests=3", "prompts_good.jsonl", "2 prompts"),
    ),
    "answers longer than the window": (
        (*PROMPTS, "workload.path={prompts_good_jsonl}", "runner.max_output_tokens=9000"),
        ("runner.max_output_tokens=9000", "256 tokens"),
    ),
    "lengths beyond the window": (
        (*SOLVE, "workload.input_tokens=600"),
        ("workload=fixed on tiny", "256 tokens", "shortest of 600 in"),
    ),
    "prompts without a tokenizer": (
        ("command=up", "workload=prompts", "workload.path={prompts_good_jsonl}"),
        ("workload=prompts", "model.weights=random", "no tokenizer"),
    ),
    "degree that the heads forbid": (
        (*SOLVE, "solver.tp_sizes=[3]"),
        ("solver.tp_sizes", "3 is not possible", "allowed: [1, 2]"),
    ),
    "replicas of this machine's workers": (
        (*SOLVE, "solver.num_replicas=[2]"),
        ("solver.num_replicas=[2]", "one group", "allowed are [1] and null"),
    ),
    "mixed degrees on this machine's workers": (
        (*SOLVE, "solver.partial_tp=true"),
        ("solver.partial_tp=true", "one degree", "allowed are false and null"),
    ),
    "drift below one token": (
        (*SOLVE, "workload.output_tokens=1", "solver.drift_margin=0.2"),
        ("solver.drift_margin=0.2", "drift to a mean output of 0.8 tokens", "at least one"),
    ),
    "sizes that cannot be measured": (
        (*SOLVE, "solver.rate_per_s=3"),
        ("solver.rate_per_s=3", "a measured profile", "cluster=h100-8"),
    ),
    "planning only, up": (
        ("command=up", "model=t5-11b", "workload=translation", "cluster.device=cpu"),
        ("model.name=t5-11b: planning only", "family t5;", "command=solve"),
    ),
    "planning only, run": (
        ("command=run", "model=gpt3-39b", "workload=translation", "cluster.device=cpu", "schedule=s.yaml"),
        ("model.name=gpt3-39b: planning only", "family gpt2;"),
    ),
    "planning only, experts": (
        ("command=profile", "model=mixtral-8x7b", "workload=translation", "cluster.device=cpu"),
        ("model.name=mixtral-8x7b: planning only", "family llama with 8 experts;"),
    ),
    "sweep directory is missing": (
        ("command=gather", "gather.dir=nowhere"),
        ("gather.dir=nowhere", "no such directory"),
    ),
    "sweep directory is empty": (
        ("command=gather", "gather.dir={sweep_empty}"),
        ("sweep_empty", "no result.json"),
    ),
}


@pytest.fixture(scope="session")
def refused(
    place: Callable[[], Path], tiny: tuple[str, ...], files: dict[str, Path], model_dir: Path
) -> Iterator[dict[str, Future[Finished]]]:
    """Every case as a job; two run at a time."""
    names = {name: str(path) for name, path in {**files, "model": model_dir}.items()}

    def job(overrides: tuple[str, ...]) -> Finished:
        given = [override.format(**names) for override in overrides]
        groups = {override.partition("=")[0] for override in given}
        base = [override for override in tiny if override.partition("=")[0] not in groups]
        if "model" in groups:
            base = []
        return launch(place(), *base, *given)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(job, overrides) for name, (overrides, _) in CASES.items()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_line(case: str, refused: dict[str, Future[Finished]]) -> None:
    finished = refused[case].result()
    assert finished.code == 2, finished.err
    assert len(finished.complaints) == 1, finished.err
    (line,) = finished.complaints
    assert line.startswith("error: ")
    for part in CASES[case][1]:
        assert part in line
    assert finished.out == ""
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("case", CASES)
def test_nothing_half_done_is_left(case: str, refused: dict[str, Future[Finished]]) -> None:
    finished = refused[case].result()
    if not finished.output_dirs:
        # Hydra refused the configuration before there was a job.
        return
    left = {path.name for path in finished.output_dir.iterdir()}
    assert left == {"result.json", "exegpt.log", ".hydra"}
    assert finished.result["status"] == "failed"
    line = finished.complaints[0].removeprefix("error: ")
    assert " ".join(finished.result["error"].split()).endswith(line)


def test_traceback_on_request(place: Callable[[], Path], tiny: tuple[str, ...]) -> None:
    finished = launch(place(), *tiny, *SOLVE, "bound.latency_s=-1", HYDRA_FULL_ERROR="1")
    assert finished.code != 0
    assert "Traceback (most recent call last)" in finished.err
    assert "ConfigError: bound.latency_s=-1.0: must be above 0 s" in finished.err


def test_a_reader_that_goes_away_is_no_error() -> None:
    # As `python launch.py --help | head -1`: the text is longer than a pipe holds unread.
    job = subprocess.Popen(
        [sys.executable, LAUNCH, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stderr is not None
    job.stdout.close()
    with job.stderr:
        said = job.stderr.read()
    assert job.wait() == 128 + signal.SIGPIPE
    assert said == ""
