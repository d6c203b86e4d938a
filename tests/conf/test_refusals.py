"""Bad input of every sort ends as one line that names the key, what is allowed, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from exegpt.config import explain, register, to_job
from exegpt.errors import ConfigError
from exegpt.settings import Job, NormalLengths


def refusal(compose_job: Callable[..., Job], *overrides: str) -> str:
    """The line that a user reads."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra raises six types; explain must know them all
        compose_job(*overrides)
    line = explain(caught.value)
    assert line is not None
    assert "\n" not in line
    return line


# Refused by Hydra or OmegaConf while composing, or for a key that the schema does not have.
MISTYPED = [
    ("bound.latncy_s=1", "bound.latncy_s: no such key; did you mean bound.latency_s?"),
    ("+bound.latncy_s=1", "bound.latncy_s: no such key; did you mean bound.latency_s?"),
    ("++bound.latncy_s=1", "bound.latncy_s: no such key; did you mean bound.latency_s?"),
    ("+latncy_bound_s=1", "latncy_bound_s: no such key; did you mean bound.latency_s?"),
    ("latency_s=1", "latency_s: no such key; did you mean bound.latency_s?"),
    ("modle=opt-125m", "modle: no such key; did you mean model?"),
    ("experimnt=x", "experimnt: no such key; did you mean experiment?"),
    (
        "runner={page_size:8,zzz:1}",
        "runner.zzz: no such key; keys of runner: dtype, max_output_tokens, page_size",
    ),
    ("+zzzzzz=1", "zzzzzz: no such key; keys: command, schedule, seed"),
    ("hydra.run.dr=x", "hydra.run.dr: no such key in Hydra's own settings"),
    ("model=bert", "model=bert: no such option; options: gpt3-101b, gpt3-175b, gpt3-341b, gpt3-39b, hf, "),
    ("model=opt-125", "model=opt-125: no such option; did you mean opt-125m? options: gpt3-101b"),
    ("bound=tigt", "bound=tigt: no such option; did you mean tight? options: loose, medium, none, tight"),
    ("experiment=nope", "experiment=nope: no such option; options: task-translation-cpu"),
    ("+model=opt-125m", "+model=...: model is a group that is chosen already; write model=NAME without +"),
    ("+bound.latency_s=5", "+bound.latency_s=...: the key exists; write bound.latency_s=VALUE without +"),
    (
        "model=null",
        "a group takes the name of one of its options, such as bound=tight; groups: model, cluster",
    ),
    ("bound=5", "a group takes the name of one of its options"),
    ("bound.latency_s=abc", "bound.latency_s=abc: expected a number (inf for none)"),
    ("bound.latency_s=", "bound.latency_s=: expected a number"),
    ("bound.latency_s=null", "bound.latency_s=null: expected a number (inf for none)"),
    ("bound.latency_s=[1,2]", "bound.latency_s=[1,2]: expected a number"),
    ("bound.quantile=x", "bound.quantile=x: expected a number or null"),
    ("seed=1.5", "seed=1.5: expected an integer"),
    ("seed=true", "seed=true: expected an integer"),
    ("seed=null", "seed=null: expected an integer"),
    ("workload.num_requests=many", "workload.num_requests=many: expected an integer or null"),
    ("profile.refresh=maybe", "profile.refresh=maybe: expected true or false"),
    ("command=fly", "command=fly: expected one of up, profile, solve, simulate, run, support, gather"),
    ("workload.arrival=bursty", "workload.arrival=bursty: expected one of closed, poisson, trace"),
    ("runner.dtype=int8", "runner.dtype=int8: expected one of auto, bfloat16, float32, float16"),
    ("solver.name=magic", "solver.name=magic: expected one of branch_and_bound, exhaustive, paper"),
    ("solver.tp_sizes=4", "solver.tp_sizes=4: expected a list of integers such as [1,2] or null"),
    ("solver.num_replicas=2", "solver.num_replicas=2: expected a list of integers such as [1,2] or null"),
    ("solver.partial_tp=some", "solver.partial_tp=some: expected true or false or null"),
    ("solver.tp_sizes=[a]", "solver.tp_sizes=[a]: expected a list of integers such as [1,2] or null"),
    ("workload.input=5", "workload.input=5: expected a mapping with the keys mean, std, max"),
    (
        "~bound.latency_s",
        "~bound.latency_s: a key cannot be deleted; set it instead: a number (inf for none)",
    ),
    (
        "bound.latency_s=1,2",
        "several values are a sweep (python launch.py -m ...); a list is bound.latency_s=[1,2]",
    ),
    ("bound.latency_s=[1,", "bound.latency_s=[1,: cannot be read as KEY=VALUE"),
    ("solve", "solve: cannot be read as KEY=VALUE (missing EQUAL at '<EOF>')"),
    ("bound.latency_s=${nope}", "bound.latency_s: Interpolation key 'nope' not found"),
    ("bound.latency_s=${oc.env:EXEGPT_NOPE}", "Environment variable 'EXEGPT_NOPE' not found"),
]


@pytest.mark.parametrize(("override", "message"), MISTYPED, ids=[override for override, _ in MISTYPED])
def test_mistyped(override: str, message: str, compose_job: Callable[..., Job]) -> None:
    assert message in refusal(compose_job, override)


# Composed without complaint, refused by the ranges in the settings and specs.
OUT_OF_RANGE = [
    ("bound.latency_s=-1", "bound.latency_s=-1.0: must be above 0 s"),
    ("bound.latency_s=nan", "bound.latency_s=nan: must be above 0 s"),
    ("bound.length_percentile=101", "bound.length_percentile=101.0: must lie in (0, 100]"),
    ("bound.quantile=1", "bound.quantile=1.0: must lie in (0, 1), or be null"),
    ("bound.quantile=nan", "bound.quantile=nan: must lie in (0, 1)"),
    ("seed=-1", "seed=-1: must lie in 0..2**63 - 1"),
    ("cluster.num_nodes=0", "cluster.num_nodes=0: must be at least 1"),
    ("cluster.gpus_per_node=0", "cluster.gpus_per_node=0: must be at least 1"),
    ("cluster.memory_gib=0", "cluster.memory_gib=0.0: must be above 0 GiB"),
    ("cluster.memory_gib=inf", "cluster.memory_gib=inf: must be above 0 GiB"),
    ("cluster.device=tpu", "cluster.device=tpu: allowed are cpu, cuda and null"),
    ("model.hidden_size=0", "model.hidden_size=0 of smollm2-135m: must be at least 1"),
    ("model.num_key_value_heads=4", "is no multiple of num_key_value_heads=4"),
    ("model.hidden_size=null", "model.hidden_size is null: only model=hf may leave it out"),
    ("model.name=null", "model.name is null"),
    ("model.weights=null", "model.weights is null"),
    ("model.weights=", "model.weights is empty"),
    ("model.num_experts=4", "model.num_experts_per_token=0 of smollm2-135m: must be at least 1 beside"),
    ("model.is_gated_act=true", "model.is_gated_act=true of smollm2-135m: read by family t5 only"),
    ("model.family=bert", "model.family=bert: allowed are llama, opt, gpt2, t5"),
    ("model.rope_theta=0", "model.rope_theta=0.0: must be above 0"),
    ("model.rope_scaling.rope_type=yarn", "rope_type=yarn: allowed are linear, llama3 and null"),
    ("model.rope_scaling.factor=4", "model.rope_scaling is read with its rope_type only"),
    ("model.rope_scaling={rope_type:linear,factor:0}", "model.rope_scaling.factor=0.0: must be above 0"),
    ("model.path=x", "model.path=x is read by model=hf only"),
    (
        "model=hf",
        "model.path is null: model=hf needs the directory of a Hugging Face model, or its config.json",
    ),
    ("~model", "model.path is null"),
    ("workload.num_requests=0", "workload.num_requests=0: must be at least 1"),
    ("workload.path=", "workload.path is empty; give a value, or null for none"),
    ("workload=trace", "workload.path is null: workload.kind=trace needs it"),
    ("workload.kind=normal", "workload.input is null: workload.kind=normal needs it"),
    ("workload.input_tokens=5", "workload.input_tokens is read by workload.kind=fixed only"),
    (
        "workload.arrival=trace",
        "workload.kind=prompts has no arrival times; allowed here are closed and poisson",
    ),
    ("workload.arrival=poisson", "workload.rate_per_s=null: workload.arrival=poisson needs the mean number"),
    ("workload.rate_per_s=3", "workload.rate_per_s=3.0 is read by workload.arrival=poisson only"),
    (
        "solver.policies=[]",
        "solver.policies=[] leaves nothing to choose from; allowed: ['RRA', 'WAA_C', ",
    ),
    (
        "solver.policies=[ORCA]",
        "solver.policies=['ORCA']: ORCA is no policy; allowed are RRA, WAA_C,",
    ),
    ("solver.policies=[[RRA]]", "is no policy; allowed are RRA, WAA_C, WAA_M, WAA, STATIC"),
    ("solver.policies=[null]", "solver.policies=[None]: None is no policy"),
    (
        "solver.policies=RRA",
        "solver.policies=RRA: expected a list such as [RRA], or all; policies: RRA, WAA_C,",
    ),
    ("solver.policies=[RRA,RRA]", "names a policy twice"),
    ("solver.max_encode_batch_size=0", "solver.max_encode_batch_size=0: must be at least 1"),
    ("solver.max_decode_iterations=-3", "solver.max_decode_iterations=-3: must be at least 1"),
    ("solver.tp_sizes=[]", "solver.tp_sizes=[] leaves nothing to choose from; null takes the default"),
    ("solver.num_micro_batches=[1,0]", "solver.num_micro_batches=[1, 0]: must be at least 1"),
    ("solver.num_replicas=[0]", "solver.num_replicas=[0]: must be at least 1"),
    (
        "solver.num_replicas=[]",
        "solver.num_replicas=[] leaves nothing to choose from; null takes the default",
    ),
    ("solver.confidence=1", "solver.confidence=1.0: must lie in [0.5, 1), or be null for the mean"),
    ("solver.confidence=0.2", "solver.confidence=0.2: must lie in [0.5, 1), or be null for the mean"),
    ("solver.confidence=nan", "solver.confidence=nan: must lie in [0.5, 1)"),
    (
        "solver.latency_tolerance=0.1",
        "solver.latency_tolerance=0.1 is read by solver=paper only, but solver.na",
    ),
    ("solver.throughput_tolerance=0", "solver.throughput_tolerance=0.0 is read by solver=paper only"),
    ("solver.drift_margin=-0.1", "solver.drift_margin=-0.1: must lie in [0, 1); 0 is none"),
    ("solver.drift_margin=1", "solver.drift_margin=1.0: must lie in [0, 1); 0 is none"),
    ("solver.pareto=1", "solver.pareto=1: must be at least 2"),
    ("solver.pareto=many", "solver.pareto=many: expected a number of latency bounds, true (24 of them), or"),
    ("solver.pareto=2.5", "solver.pareto=2.5: expected a number of latency bounds"),
    ("solver.pareto=true", "solver.pareto=24 is read by command=solve only, but command=up"),
    ("solver.rate_per_s=0", "solver.rate_per_s=0.0: must be above 0 requests/s and finite, or null"),
    ("solver.rate_per_s=-2", "solver.rate_per_s=-2.0: must be above 0 requests/s"),
    ("solver.rate_per_s=nan", "solver.rate_per_s=nan: must be above 0 requests/s"),
    ("solver.rate_per_s=inf", "solver.rate_per_s=inf: must be above 0 requests/s and finite"),
    ("solver.rate_per_s=3", "solver.rate_per_s=3 is read by command=solve only, but command=up"),
    ("profile.budget_s=0", "profile.budget_s=0.0: must be above 0 s"),
    ("runner.page_size=0", "runner.page_size=0: must be at least 1"),
    ("runner.max_output_tokens=0", "runner.max_output_tokens=0: must be at least 1"),
    ("runner.num_probes=-1", "runner.num_probes=-1: must be at least 0"),
    ("runner.timeout_s=inf", "runner.timeout_s=inf: must be above 0 s and finite"),
    ("runner.sampling.temperature=-0.1", "runner.sampling.temperature=-0.1: must be at least 0"),
    ("runner.sampling.top_p=0", "runner.sampling.top_p=0.0: must lie in (0, 1]"),
    ("command=simulate", "schedule is null: command=simulate needs a schedule.yaml of command=solve"),
    ("command=run", "schedule is null: command=run needs a schedule.yaml"),
    ("command=gather", "gather.dir is null: command=gather needs the directory of a sweep"),
    ("schedule=s.yaml", "schedule=s.yaml is read by command=simulate and run only, but command=up"),
    ("gather.dir=d", "gather.dir=d is read by command=gather only, but command=up"),
]


@pytest.mark.parametrize(
    ("override", "message"), OUT_OF_RANGE, ids=[override for override, _ in OUT_OF_RANGE]
)
def test_out_of_range(override: str, message: str, compose_job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose_job(override)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["input.mean=0"], "workload.input.mean=0.0: must be above 0 tokens"),
        (["output.std=-1"], "workload.output.std=-1.0: must be at least 0 tokens"),
        (["input.max=100"], "workload.input.max=100: must be at least workload.input.mean=128 tokens"),
        (["output.max=null"], "workload.output.max is null: mean, std and max are given together"),
        (["output={mean:null,std:null,max:null}"], "workload.output is null: workload.kind=normal needs it"),
        (
            ["kind=fixed", "input_tokens=4", "output_tokens=4"],
            "workload.input is read by workload.kind=normal only",
        ),
        (["path=x.csv"], "workload.path is read by workload.kind=trace or prompts only"),
    ],
)
def test_lengths_out_of_range(changes: list[str], message: str, compose_job: Callable[..., Job]) -> None:
    overrides = [f"workload.{change}" for change in changes]
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose_job("workload=translation", *overrides)


def test_a_frontier_of_no_certain_cluster_is_refused(compose_job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError, match=r"solver\.pareto=8 beside solver\.rate_per_s=3: .*set one of"):
        compose_job("command=solve", "solver.rate_per_s=3", "solver.pareto=8")


def test_a_size_without_proof_is_refused(compose_job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError, match=r"solver\.rate_per_s=3: .* has to be proven, .* solver=paper"):
        compose_job("command=solve", "solver=paper", "solver.rate_per_s=3")
    assert compose_job("command=solve", "solver=exhaustive", "solver.rate_per_s=3").solver.rate_per_s == 3


def test_a_frontier_without_proof_is_refused(compose_job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError, match=r"solver\.pareto=24: .* but solver\.name=exhaustive; choose"):
        compose_job("command=solve", "solver=exhaustive", "solver.pareto=true")


@pytest.mark.parametrize("value", ["null", "1", "-0.1", "nan"])
def test_tolerances_of_the_paper(value: str, compose_job: Callable[..., Job]) -> None:
    job = compose_job("solver=paper")
    assert (job.solver.latency_tolerance, job.solver.throughput_tolerance) == (0.05, 0.05)
    assert compose_job("solver=paper", "solver.latency_tolerance=0").solver.latency_tolerance == 0
    with pytest.raises(ConfigError, match=r"solver\.throughput_tolerance=.*: solver=paper needs a share in"):
        compose_job("solver=paper", f"solver.throughput_tolerance={value}")


@pytest.mark.parametrize("mean", [float("nan"), float("inf")])
def test_lengths_are_finite(mean: float) -> None:
    with pytest.raises(ConfigError, match=r"workload\.input\.mean"):
        NormalLengths(side="input", mean=mean, std=1.0, max=10)


def test_shape_beside_hf_is_refused(compose_job: Callable[..., Job], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden_size is set, but model=hf reads it from"):
        compose_job("model=hf", f"model.path={tmp_path}", "model.hidden_size=64")


def test_rotary_scaling_of_learned_positions_is_refused(compose_job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError, match=r"rope_type=linear: family opt has no rotary positions"):
        compose_job("model=opt-125m", "model.rope_scaling.rope_type=linear")


def test_hf_path_that_does_not_exist(compose_job: Callable[..., Job], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere"):
        compose_job("model=hf", f"model.path={tmp_path / 'nowhere'}")


def option_file(tmp_path: Path, text: str) -> Callable[..., Job]:
    """Compose with `workload=mine`, an option file of the user's own."""
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "mine.yaml").write_text(text)

    def composed(*overrides: str) -> Job:
        register()
        conf = Path(__file__).resolve().parents[2] / "conf"
        with initialize_config_dir(str(conf), version_base="1.3"):
            path = f"hydra.searchpath=[file://{tmp_path}]"
            return to_job(compose("config", overrides=[path, "workload=mine", *overrides]))

    return composed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: mine\nknd: fixed\n",
            "workload.knd: no such key; did you mean workload.kind? (in workload/mine.yaml)",
        ),
        (
            "name: mine\nkind: fixd\n",
            "workload.kind=fixd: expected one of normal, fixed, trace, prompts (in workload/mine.yaml)",
        ),
        (
            "name: mine\nkind: fixed\ninput_tokens: 1.5\n",
            "workload.input_tokens=1.5: expected an integer or null (in workload/mine.yaml)",
        ),
        ("name: mine\n", "workload.kind has no value; give it one of normal, fixed, trace, prompts"),
        ("kind: prompts\n", "workload.name has no value; give it text"),
    ],
)
def test_option_files_of_the_user(text: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(option_file(tmp_path, text))


def test_option_file_that_is_not_yaml(tmp_path: Path) -> None:
    line = refusal(option_file(tmp_path, "name: [mine\n"))
    assert re.search(r"mine\.yaml, line \d+: not YAML: expected ',' or '\]'", line)


def test_option_file_of_the_user_works(tmp_path: Path) -> None:
    composed = option_file(tmp_path, "name: mine\nkind: fixed\ninput_tokens: 3\noutput_tokens: 4\n")
    job = composed()
    assert (job.workload.name, job.workload.input_tokens, job.workload.output_tokens) == ("mine", 3, 4)


def test_configuration_without_schema_is_refused(compose_config: Callable[..., Any]) -> None:
    plain = OmegaConf.create(OmegaConf.to_container(compose_config(), resolve=False))
    with pytest.raises(ConfigError, match="composed without its schema"):
        to_job(plain)


def test_unknown_texts_pass_on_their_first_line() -> None:
    assert explain(HydraException("one\ntwo")) == "one"
    assert explain(HydraException()) == "HydraException"
    assert explain(ConfigError("ours")) == "ours"


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyError("x"), ValueError("y"), AssertionError()])
def test_faults_of_the_program_are_not_explained_away(error: Exception) -> None:
    assert explain(error) is None
