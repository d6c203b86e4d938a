"""The schedule file: where the solver and the runtime meet.

A schedule is complete and can be edited by hand; reading one checks every field and names the
file and the key of what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from exegpt.errors import ScheduleError
from exegpt.specs import ModelSpec, Policy

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Control variables of a schedule.

    The paper's symbols: `encode_batch_size` B_E, `decode_batch_size` B_D (pool at the start of a
    decode phase), `decode_iterations` N_D, `num_micro_batches` the number of B_m, `tp_size` and
    `num_tp_gpus` together T_P. For STATIC the batch is `encode_batch_size`.

    Where encoding and decoding have GPUs of their own (WAA, DISAGGREGATED), `tp_size` and
    `num_tp_gpus` are the encode pipeline's, `num_micro_batches` the decode pipeline's, and
    `decode_batch_size` is the most queries that a decode pipeline takes, those on their way to it
    included. Continuous batching (ITERATION, CHUNKED) has `decode_batch_size` slots, and ITERATION encodes
    at most `encode_batch_size` prompts in a turn of a micro-batch. Knobs that a policy does not have are
    None, and left out of files.

    Attributes
    ----------
    encode_gpus : int, optional
        GPUs that only encode, of all instances.
    decode_tp_size, num_decode_tp_gpus : int, optional
        T_P of the decode pipeline.
    num_encode_instances, num_decode_instances : int, optional
        DISAGGREGATED: pipelines of either kind.
    token_budget : int, optional
        CHUNKED: tokens of an iteration.
    encode_micro_batches : int, optional
        STATIC_HYBRID: micro-batches of the encode phase.
    """

    encode_batch_size: int
    decode_batch_size: int
    decode_iterations: int
    num_micro_batches: int
    tp_size: int
    num_tp_gpus: int
    encode_gpus: int | None = None
    decode_tp_size: int | None = None
    num_decode_tp_gpus: int | None = None
    num_encode_instances: int | None = None
    num_decode_instances: int | None = None
    token_budget: int | None = None
    encode_micro_batches: int | None = None


# Policies whose encoding and decoding have GPUs of their own.
SIDED_POLICIES = (Policy.WAA, Policy.WAA_C, Policy.WAA_M, Policy.DISAGGREGATED)

# Policies that this release's workers execute.
RUNNABLE = (Policy.RRA, Policy.STATIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: the ranks of its tensor-parallel group and its layers [first, last + 1]."""

    role: str
    ranks: tuple[int, ...]
    layers: tuple[int, int]

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree of the stage."""
        return len(self.ranks)

    @property
    def num_layers(self) -> int:
        """Layers that the stage holds."""
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A concrete plan: policy, knobs and stages, with what the solver predicted for it.

    `stages` are those of one replica; where encoding and decoding have GPUs of their own, those of
    one encode pipeline and then those of one decode pipeline.
    """

    model: str
    policy: Policy
    knobs: Knobs
    stages: tuple[Stage, ...]
    num_replicas: int = 1
    lengths: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks that a replica occupies."""
        counts = {
            "encode": self.knobs.num_encode_instances or 1,
            "decode": self.knobs.num_decode_instances or 1,
        }
        return sum(counts.get(stage.role, 1) * stage.tp_size for stage in self.stages)

    def stages_of(self, role: str) -> tuple[Stage, ...]:
        """Stages of the pipeline that has a role."""
        return tuple(stage for stage in self.stages if stage.role == role)

    def check(self, model: ModelSpec, *, num_ranks: int, source: str = "schedule") -> None:
        """Raise ScheduleError unless the schedule fits the model and the number of ranks."""
        if self.model != model.name:
            raise ScheduleError(
                f"{source}: model is {self.model}, but model.name={model.name} was asked to run"
            )
        if self.num_replicas * self.num_ranks > num_ranks:
            replicas = "" if self.num_replicas == 1 else f"{self.num_replicas} replicas of "
            raise ScheduleError(
                f"{source}: stages name {replicas}{self.num_ranks} ranks, but the cluster has {num_ranks} "
                "(cluster.num_nodes x cluster.gpus_per_node). Solve again for this cluster."
            )
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        if ranks != list(range(len(ranks))):
            raise ScheduleError(
                f"{source}: stages[].ranks are {ranks}, expected 0..{len(ranks) - 1} in order"
            )
        for role in ("encode", "decode") if self.policy in SIDED_POLICIES else ("both",):
            self._check_layers(role, model, num_ranks, source)

    def require_runnable(self, source: str = "schedule") -> None:
        """Raise ScheduleError if this release plans and replays the schedule, but does not run it."""
        if self.policy not in RUNNABLE:
            raise ScheduleError(
                f"{source}: policy={self.policy.value} is planned and replayed, but workers do not execute "
                f"it; command=run takes {', '.join(p.value for p in RUNNABLE)}. Use command=simulate, or "
                "solve with solver.policies=[RRA]"
            )
        if self.num_replicas != 1:
            raise ScheduleError(
                f"{source}: num_replicas={self.num_replicas}, but workers run as one group; command=run "
                "takes 1. Use command=simulate, or solve with solver.num_replicas=[1]"
            )

    def _check_layers(self, role: str, model: ModelSpec, num_ranks: int, source: str) -> None:
        """A pipeline holds all layers in order, at degrees that the model's heads allow."""
        at = 0
        for index, stage in enumerate(self.stages):
            if stage.role != role:
                continue
            if stage.layers[0] != at or stage.num_layers < 1:
                raise ScheduleError(
                    f"{source}: stages[{index}].layers={list(stage.layers)} must start at {at} and "
                    "hold a layer"
                )
            at = stage.layers[1]
            if stage.tp_size not in model.tp_sizes(stage.tp_size):
                raise ScheduleError(
                    f"{source}: stages[{index}] is split {stage.tp_size} ways, but {model.name} has "
                    f"{model.num_attention_heads} heads and {model.num_key_value_heads} K/V heads; "
                    f"allowed: {list(model.tp_sizes(num_ranks))}"
                )
        if at != model.num_hidden_layers:
            of_role = "" if role == "both" else f" of role {role}"
            raise ScheduleError(
                f"{source}: stages{of_role} hold {at} layers, {model.name} has {model.num_hidden_layers}"
            )


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """Plain values of a schedule, as they stand in the file."""
    return {
        "version": VERSION,
        "model": schedule.model,
        "policy": schedule.policy.value,
        "num_replicas": schedule.num_replicas,
        "knobs": {name: value for name, value in asdict(schedule.knobs).items() if value is not None},
        "stages": [
            {"role": s.role, "ranks": list(s.ranks), "layers": list(s.layers)} for s in schedule.stages
        ],
        "lengths": dict(schedule.lengths),
        "predicted": dict(schedule.predicted),
    }


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write `schedule` as YAML."""
    path.write_text(yaml.safe_dump(to_dict(schedule), sort_keys=False))


def read_schedule(path: Path) -> Schedule:
    """Read a schedule file; ScheduleError names the key that is wrong."""
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ScheduleError(f"schedule={path}: no such file; `command=solve` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"schedule={path}: {error}") from error
    except yaml.YAMLError as error:
        raise ScheduleError(f"schedule={path}: not YAML: {error}") from error
    return from_dict(data, source=str(path))


def from_dict(data: Any, *, source: str) -> Schedule:
    """Build a schedule from plain values; ScheduleError names the key that is wrong."""
    if not isinstance(data, dict):
        raise ScheduleError(
            f"{source}: expected a mapping with the keys of a schedule, found {type(data).__name__}"
        )
    expected = {"version", "model", "policy", "num_replicas", "knobs", "stages", "lengths", "predicted"}
    unknown = sorted(set(data) - expected)
    if unknown:
        raise ScheduleError(f"{source}: unknown key {unknown[0]!r}; known: {sorted(expected)}")
    if data.get("version") != VERSION:
        raise ScheduleError(
            f"{source}: version={data.get('version')!r}, this release reads version {VERSION}"
        )
    try:
        policy = Policy(data.get("policy"))
    except ValueError:
        raise ScheduleError(
            f"{source}: policy={data.get('policy')!r}; allowed: {[p.value for p in Policy]}"
        ) from None
    if not isinstance(data.get("model"), str):
        raise ScheduleError(f"{source}: model={data.get('model')!r} must be a name")
    num_replicas = _positive(data, "num_replicas", source)
    stages = data.get("stages")
    if not isinstance(stages, list) or not stages:
        raise ScheduleError(f"{source}: stages must be a list of at least one stage")
    return Schedule(
        model=data["model"],
        policy=policy,
        num_replicas=num_replicas,
        knobs=_knobs(data.get("knobs"), source),
        stages=_stages(stages, policy, source),
        lengths=data.get("lengths") or {},
        predicted=data.get("predicted") or {},
    )


def _knobs(data: Any, source: str) -> Knobs:
    names = tuple(Knobs.__dataclass_fields__)
    if not isinstance(data, dict):
        raise ScheduleError(f"{source}: knobs must be a mapping of {list(names)}")
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise ScheduleError(f"{source}: unknown key knobs.{unknown[0]}; known: {list(names)}")
    # Knobs of some policies default to None; the others must be there.
    fields = [name for name, f in Knobs.__dataclass_fields__.items() if name in data or f.default is not None]
    return Knobs(**{name: _positive(data, name, source, prefix="knobs.") for name in fields})


def _positive(data: Mapping[str, Any], key: str, source: str, prefix: str = "") -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"{source}: {prefix}{key}={value!r} must be an integer of at least 1")
    return value


def _stages(data: list[Any], policy: Policy, source: str) -> tuple[Stage, ...]:
    roles = ("encode", "decode") if policy in SIDED_POLICIES else ("both",)
    stages = tuple(_stage(stage, index, roles, policy, source) for index, stage in enumerate(data))
    order = [roles.index(stage.role) for stage in stages]
    if order != sorted(order):
        raise ScheduleError(f"{source}: stages of role encode must stand before those of role decode")
    return stages


def _stage(data: Any, index: int, roles: tuple[str, ...], policy: Policy, source: str) -> Stage:
    where = f"{source}: stages[{index}]"
    if not isinstance(data, dict) or set(data) != {"role", "ranks", "layers"}:
        raise ScheduleError(f"{where} must have exactly the keys role, ranks and layers")
    if data["role"] not in roles:
        raise ScheduleError(f"{where}.role={data['role']!r}; allowed for {policy.value}: {list(roles)}")
    for key in ("ranks", "layers"):
        values = data[key]
        if not isinstance(values, list) or not values or not all(type(v) is int and v >= 0 for v in values):
            raise ScheduleError(f"{where}.{key}={values!r} must be a list of integers")
    if len(data["layers"]) != 2:
        raise ScheduleError(f"{where}.layers={data['layers']} must be [first, last + 1]")
    return Stage(role=data["role"], ranks=tuple(data["ranks"]), layers=(data["layers"][0], data["layers"][1]))
