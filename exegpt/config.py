"""From Hydra's configuration to a checked `Job`; the only file of the package that knows Hydra.

Three layers, each with one duty: `exegpt.schemas` has the types of all keys (Hydra checks them while it
composes), `conf/` the values, and the frozen settings and specs the ranges. Nothing behind `to_job` sees
a DictConfig.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exegpt import schemas
from exegpt.config_help import all_keys, explain, unknown_key
from exegpt.errors import ConfigError
from exegpt.hf_config import read_hf_config
from exegpt.settings import (
    DEFAULT_FRONTIER_BOUNDS,
    ClusterSettings,
    Job,
    NormalLengths,
    ProfileSettings,
    RunnerSettings,
    SamplingSettings,
    SolverSettings,
    WorkloadSettings,
)
from exegpt.specs import BoundSpec, ModelFamily, ModelSpec, Policy, RopeScaling

__all__ = ["explain", "register", "to_job"]

CACHE_VARIABLE = "EXEGPT_CACHE"

# Fields of ModelSchema that are not part of the shape.
_NOT_SHAPE = ("name", "path", "weights", "family", "rope_scaling")
# What only some models have: null is the default of ModelSpec.
_OPTIONAL_SHAPE = (
    "is_gated_act",
    "relative_attention_num_buckets",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
)


def register() -> None:
    """Make the types of all keys known to Hydra; call before composing. Calling again changes nothing."""
    ConfigStore.instance().store(name="exegpt_schema", node=schemas.ExeGPTSchema, provider="exegpt")


def to_job(cfg: DictConfig, *, environ: Mapping[str, str] = os.environ) -> Job:
    """Turn a composed configuration into a checked job.

    Parameters
    ----------
    cfg : DictConfig
        Composed from `conf/config.yaml`, without the `hydra` node.
    environ : mapping
        Environment; `EXEGPT_CACHE` names the cache unless `profile.cache_dir` does.

    Returns
    -------
    Job

    Raises
    ------
    ConfigError
        For an unknown key, a value out of range, or keys that do not go together; the message names the
        key, what is allowed and the way out. Also if the file at `model.path` cannot be used.

    Notes
    -----
    The only file that is read is the one at `model.path`. Other paths are checked by their readers.
    """
    _refuse_unknown(cfg)
    try:
        values = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error) or str(error)) from error
    if not isinstance(values, schemas.ExeGPTSchema):
        raise ConfigError(
            "the configuration was composed without its schema; call exegpt.config.register() first"
        )
    model, weights, model_path = _model(values.model)
    return Job(
        command=values.command,
        model=model,
        weights=weights,
        model_path=model_path,
        cluster=_cluster(values.cluster),
        workload=_workload(values.workload),
        bound=BoundSpec(
            latency_s=values.bound.latency_s,
            length_percentile=values.bound.length_percentile,
            ttft_s=values.bound.ttft_s,
            tpot_s=values.bound.tpot_s,
        ),
        bound_quantile=values.bound.quantile,
        solver=_solver(values.solver),
        profile=_profile(values.profile, environ),
        runner=_runner(values.runner),
        gather_dir=_path("gather.dir", values.gather.dir),
        schedule=_path("schedule", values.schedule),
        seed=values.seed,
    )


def _refuse_unknown(cfg: DictConfig) -> None:
    """Refuse keys that `+KEY=VALUE` added: Hydra lets them past the schema."""
    known = set(all_keys())
    for key in _keys(OmegaConf.to_container(cfg, resolve=False)):
        if key not in known:
            raise ConfigError(unknown_key(key))


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{prefix}{name}"
            yield from _keys(value, f"{prefix}{name}.")


def _model(values: schemas.ModelSchema) -> tuple[ModelSpec, str, Path | None]:
    """Shape, weights and, for `model=hf`, the path that the shape was read from."""
    shape = {
        field.name: getattr(values, field.name)
        for field in dataclasses.fields(values)
        if field.name not in _NOT_SHAPE
    }
    scaling = values.rope_scaling
    path = _path("model.path", values.path)
    if values.family is None:
        if path is None:
            raise ConfigError(
                "model.path is null: model=hf needs the directory of a Hugging Face model, or its config.json"
            )
        given = [key for key, value in shape.items() if value is not None]
        given += ["rope_scaling.rope_type"] if scaling.rope_type is not None else []
        if given:
            raise ConfigError(f"model.{given[0]} is set, but model=hf reads it from {path}; leave it null")
        spec = read_hf_config(path, name=values.name)
        directory = path if path.is_dir() else path.parent
        return spec, _text("model.weights", values.weights) or str(directory), path
    if path is not None:
        raise ConfigError(f"model.path={path} is read by model=hf only, but model.family={values.family}")
    weights = _text("model.weights", values.weights)
    shape = {key: value for key, value in shape.items() if value is not None or key not in _OPTIONAL_SHAPE}
    for key, value in {"name": values.name, "weights": weights, **shape}.items():
        if value is None:
            raise ConfigError(f"model.{key} is null: only model=hf may leave it out")
    try:
        family = ModelFamily(values.family)
    except ValueError:
        allowed = ", ".join(member.value for member in ModelFamily)
        raise ConfigError(f"model.family={values.family}: allowed are {allowed}") from None
    if family is not ModelFamily.LLAMA and scaling.rope_type is not None:
        raise ConfigError(
            f"model.rope_scaling.rope_type={scaling.rope_type}: family {family.value} has no rotary positions"
        )
    for key in ("norm_eps", "rope_theta"):
        if not 0 < shape[key] < math.inf:
            raise ConfigError(f"model.{key}={shape[key]}: must be above 0 and finite")
    spec = ModelSpec(name=str(values.name), family=family, rope_scaling=_rope_scaling(scaling), **shape)
    return spec, str(weights), None


def _rope_scaling(values: schemas.RopeScalingSchema) -> RopeScaling | None:
    if values.rope_type is None:
        if values != schemas.RopeScalingSchema():
            raise ConfigError(
                "model.rope_scaling is read with its rope_type only; set rope_type to linear or llama3"
            )
        return None
    if values.rope_type not in ("linear", "llama3"):
        raise ConfigError(
            f"model.rope_scaling.rope_type={values.rope_type}: allowed are linear, llama3 and null (none)"
        )
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if not 0 < getattr(values, key) < math.inf:
            raise ConfigError(f"model.rope_scaling.{key}={getattr(values, key)}: must be above 0 and finite")
    return RopeScaling(
        rope_type=values.rope_type,
        factor=values.factor,
        low_freq_factor=values.low_freq_factor,
        high_freq_factor=values.high_freq_factor,
        original_max_position_embeddings=values.original_max_position_embeddings,
    )


def _cluster(values: schemas.ClusterSchema) -> ClusterSettings:
    memory_bytes = None
    if values.memory_gib is not None:
        if not 0 < values.memory_gib < math.inf:
            raise ConfigError(
                f"cluster.memory_gib={values.memory_gib}: must be above 0 GiB, or null to detect"
            )
        memory_bytes = int(values.memory_gib * 2**30)
    return ClusterSettings(
        name=values.name,
        num_nodes=values.num_nodes,
        gpus_per_node=values.gpus_per_node,
        memory_bytes=memory_bytes,
        device=values.device,
        gpu=_text("cluster.gpu", values.gpu),
        price_per_gpu_hour=values.price_per_gpu_hour,
    )


def _workload(values: schemas.WorkloadSchema) -> WorkloadSettings:
    return WorkloadSettings(
        name=values.name,
        kind=values.kind,
        path=_path("workload.path", values.path),
        input=_lengths("input", values.input),
        output=_lengths("output", values.output),
        input_tokens=values.input_tokens,
        output_tokens=values.output_tokens,
        input_column=_text("workload.input_column", values.input_column),
        output_column=_text("workload.output_column", values.output_column),
        output_history=_path("workload.output_history", values.output_history),
        num_requests=values.num_requests,
        arrival=values.arrival,
        rate_per_s=values.rate_per_s,
    )


def _lengths(side: str, values: schemas.LengthsSchema) -> NormalLengths | None:
    match (values.mean, values.std, values.max):
        case (None, None, None):
            return None
        case (float(mean), float(std), int(maximum)):
            return NormalLengths(side=side, mean=mean, std=std, max=maximum)
    null = next(key for key in ("mean", "std", "max") if getattr(values, key) is None)
    raise ConfigError(f"workload.{side}.{null} is null: mean, std and max are given together")


def _solver(values: schemas.SolverSchema) -> SolverSettings:
    return SolverSettings(
        name=values.name,
        policies=_policies(values.policies),
        counting=values.counting,
        max_encode_batch_size=values.max_encode_batch_size,
        max_decode_iterations=values.max_decode_iterations,
        num_micro_batches=_integers(values.num_micro_batches),
        tp_sizes=_integers(values.tp_sizes),
        num_replicas=_integers(values.num_replicas),
        partial_tp=values.partial_tp,
        confidence=values.confidence,
        drift_margin=values.drift_margin,
        latency_tolerance=values.latency_tolerance,
        throughput_tolerance=values.throughput_tolerance,
        pareto=_pareto(values.pareto),
        rate_per_s=values.rate_per_s,
    )


def _policies(value: Any) -> tuple[Policy, ...]:
    """A list of names, or `all`; typed here because the schema cannot say "list or word"."""
    if value == "all":
        return tuple(Policy)
    allowed = ", ".join(policy.value for policy in Policy)
    if not isinstance(value, list):
        raise ConfigError(
            f"solver.policies={value}: expected a list such as [RRA], or all; policies: {allowed}"
        )
    for name in value:
        if not isinstance(name, str) or name not in Policy.__members__:
            raise ConfigError(f"solver.policies={value}: {name} is no policy; allowed are {allowed}")
    return tuple(Policy[name] for name in value)


def _pareto(value: Any) -> int | None:
    """A number of bounds; typed here because the schema cannot say "integer or boolean"."""
    if value is None or isinstance(value, bool):
        return DEFAULT_FRONTIER_BOUNDS if value else None
    if not isinstance(value, int):
        raise ConfigError(
            f"solver.pareto={value}: expected a number of latency bounds, true "
            f"({DEFAULT_FRONTIER_BOUNDS} of them), or null for no frontier"
        )
    return value


def _integers(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _profile(values: schemas.ProfileSchema, environ: Mapping[str, str]) -> ProfileSettings:
    cache_dir = _path("profile.cache_dir", values.cache_dir)
    if cache_dir is None:
        cache_dir = Path(environ.get(CACHE_VARIABLE) or "~/.cache/exegpt").expanduser()
    return ProfileSettings(
        source=values.source,
        path=_path("profile.path", values.path),
        network=_path("profile.network", values.network),
        same_shape=values.same_shape,
        budget_s=values.budget_s,
        cache_dir=cache_dir,
        refresh=values.refresh,
    )


def _runner(values: schemas.RunnerSchema) -> RunnerSettings:
    return RunnerSettings(
        dtype=values.dtype,
        max_output_tokens=values.max_output_tokens,
        page_size=values.page_size,
        sampling=SamplingSettings(temperature=values.sampling.temperature, top_p=values.sampling.top_p),
        num_probes=values.num_probes,
        ignore_eos=values.ignore_eos,
        hostfile=_path("runner.hostfile", values.hostfile),
        timeout_s=values.timeout_s,
    )


def _text(key: str, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise ConfigError(f"{key} is empty; give a value, or null for none")
    return value


def _path(key: str, value: str | None) -> Path | None:
    """A path as given, relative to the directory of the launch, with `~` spelt out."""
    if _text(key, value) is None:
        return None
    try:
        return Path(str(value)).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{key}={value}: {error}") from error
