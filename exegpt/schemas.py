"""Types of every configuration key; `exegpt.config` hands them to Hydra, which checks YAML and overrides.

No logic and no values that matter: values stand in `conf/`, range checks in `exegpt.settings` and
`exegpt.specs`. OmegaConf resolves the annotations at run time, so every type must be importable here.
`MISSING` marks keys that an option file has to give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from exegpt.settings import Arrival, Command, ProfileSource, RunDtype, WorkloadKind
from exegpt.specs import Counting, SolverName

# OmegaConf's mark of a mandatory value; written out so that this file needs no import of it.
MISSING: Any = "???"

# Folders of option files in `conf/`.
GROUPS = ("model", "cluster", "workload", "bound", "solver", "profile", "runner", "experiment")


@dataclass(kw_only=True, slots=True)
class RopeScalingSchema:
    """Scaling of rotary frequencies (`model.rope_scaling`); no scaling while `rope_type` is null.

    Not an optional sub-config: OmegaConf 2.3 cannot merge an override into one that is null.
    """

    rope_type: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(kw_only=True, slots=True)
class ModelSchema:
    """Group `model`: shape and weights. All of the shape is null where `path` gives it."""

    name: str | None = None
    path: str | None = None
    weights: str | None = None
    family: str | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None
    hidden_act: str | None = None
    norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScalingSchema = field(default_factory=RopeScalingSchema)
    attention_bias: bool | None = None
    attention_output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | None = None
    is_gated_act: bool | None = None
    relative_attention_num_buckets: int | None = None
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    moe_intermediate_size: int | None = None


@dataclass(kw_only=True, slots=True)
class ClusterSchema:
    """Group `cluster`: nodes, GPUs (workers on CPU) and their memory."""

    name: str = MISSING
    num_nodes: int = 1
    gpus_per_node: int | None = None
    memory_gib: float | None = None
    device: str | None = None
    gpu: str | None = None
    price_per_gpu_hour: float | None = None


@dataclass(kw_only=True, slots=True)
class LengthsSchema:
    """A truncated normal in tokens (`workload.input`, `workload.output`)."""

    mean: float | None = None
    std: float | None = None
    max: int | None = None


@dataclass(kw_only=True, slots=True)
class WorkloadSchema:
    """Group `workload`: lengths, number and arrival of the requests."""

    name: str = MISSING
    kind: WorkloadKind = MISSING
    path: str | None = None
    input: LengthsSchema = field(default_factory=LengthsSchema)
    output: LengthsSchema = field(default_factory=LengthsSchema)
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_column: str | None = None
    output_column: str | None = None
    output_history: str | None = None
    num_requests: int | None = None
    arrival: Arrival = Arrival.closed
    rate_per_s: float | None = None


@dataclass(kw_only=True, slots=True)
class BoundSchema:
    """Group `bound`: latency bounds that hold together."""

    quantile: float | None = None
    latency_s: float = math.inf
    length_percentile: float = 99.0
    ttft_s: float = math.inf
    tpot_s: float = math.inf


@dataclass(kw_only=True, slots=True)
class SolverSchema:
    """Group `solver`: policies and ranges of the search.

    `policies` is a list of names, or `all`; `pareto` a number of bounds, a boolean or null.
    """

    name: SolverName = SolverName.branch_and_bound
    policies: Any = MISSING
    counting: Counting = Counting.exact
    max_encode_batch_size: int | None = None
    max_decode_iterations: int | None = None
    num_micro_batches: list[int] | None = None
    tp_sizes: list[int] | None = None
    num_replicas: list[int] | None = None
    partial_tp: bool | None = None
    confidence: float | None = None
    drift_margin: float = 0.0
    latency_tolerance: float | None = None
    throughput_tolerance: float | None = None
    pareto: Any = None
    rate_per_s: float | None = None


@dataclass(kw_only=True, slots=True)
class ProfileSchema:
    """Group `profile`: where costs come from."""

    source: ProfileSource = ProfileSource.auto
    path: str | None = None
    network: str | None = None
    same_shape: bool = False
    budget_s: float = 60.0
    cache_dir: str | None = None
    refresh: bool = False


@dataclass(kw_only=True, slots=True)
class SamplingSchema:
    """How tokens are drawn (`runner.sampling`)."""

    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(kw_only=True, slots=True)
class RunnerSchema:
    """Group `runner`: how the ranks execute a schedule."""

    dtype: RunDtype = RunDtype.auto
    max_output_tokens: int | None = None
    page_size: int = 16
    sampling: SamplingSchema = field(default_factory=SamplingSchema)
    num_probes: int = 0
    ignore_eos: bool | None = None
    hostfile: str | None = None
    timeout_s: float = 600.0


@dataclass(kw_only=True, slots=True)
class GatherSchema:
    """What `command=gather` merges."""

    dir: str | None = None


@dataclass(kw_only=True, slots=True)
class ExeGPTSchema:
    """The whole configuration."""

    command: Command = Command.up
    schedule: str | None = None
    seed: int = 0
    gather: GatherSchema = field(default_factory=GatherSchema)
    model: ModelSchema = field(default_factory=ModelSchema)
    cluster: ClusterSchema = field(default_factory=ClusterSchema)
    workload: WorkloadSchema = field(default_factory=WorkloadSchema)
    bound: BoundSchema = field(default_factory=BoundSchema)
    solver: SolverSchema = field(default_factory=SolverSchema)
    profile: ProfileSchema = field(default_factory=ProfileSchema)
    runner: RunnerSchema = field(default_factory=RunnerSchema)
