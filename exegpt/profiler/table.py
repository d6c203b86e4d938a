"""The profile: what one layer and the synchronisation cost, and the file it is kept in."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from exegpt.errors import ProfileError
from exegpt.profiler.grid import Grid, make_grid
from exegpt.specs import Dtype, ModelSpec

VERSION = 1

# Operators of one layer (per tensor-parallel degree) and of a stage, with what their axes count.
LAYER_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "linear": ("tokens",),
    "encode_attention": ("queries", "length_tokens"),
    "decode_attention": ("queries", "context_tokens"),
    "head": ("queries",),
    "embed": ("tokens",),
    "encode_overhead": ("queries",),
    "decode_overhead": ("queries",),
}
# What only some profiles have, per degree; see `LayerCosts`.
OPTIONAL_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("bytes",),
    "encode_linear": ("tokens",),
    "cross_attention": ("queries", "context_tokens"),
}

# Fields of ModelSpec that came after the first profiles were written.
_LATER_FIELDS = (
    "is_gated_act",
    "relative_attention_num_buckets",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Costs at one tensor-parallel degree, in seconds.

    `linear`: everything of a layer but attention and all-reduce, by tokens. `encode_attention`: by
    queries and root-mean-square length (attention is quadratic in it). `decode_attention`: by
    queries and their summed context. `head`: final norm, output matrix and sampling, by queries.
    `embed`: by tokens. `*_overhead`: bookkeeping of a stage per micro-batch. `all_reduce`: one
    sum over the group, by bytes; none at degree 1.

    Encoder-decoder models only: `encode_linear`, by tokens, is `linear` of an encoder layer together with
    projecting cross K/V for one decoder layer (`linear` then is a decoder layer's, None: one kind of layer
    serves both phases). `cross_attention`: by queries and their summed input tokens.
    """

    linear: Grid
    encode_attention: Grid
    decode_attention: Grid
    head: Grid
    embed: Grid
    encode_overhead: Grid
    decode_overhead: Grid
    all_reduce: Grid | None = None
    encode_linear: Grid | None = None
    cross_attention: Grid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile was measured for; it serves only the same again."""

    model: str
    shape: str
    dtype: str
    device: str
    num_ranks: int
    software: str

    def digest(self) -> str:
        """Short name for a cache file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def shape_digest(model: ModelSpec) -> str:
    """Digest of everything about a model that its costs depend on (not its name or weights)."""
    shape = {k: repr(v) for k, v in asdict(model).items() if k != "name"}
    # Profiles measured before these fields were there stay valid for the models that do not use them.
    for entry in fields(model):
        if entry.name in _LATER_FIELDS and getattr(model, entry.name) == entry.default:
            del shape[entry.name]
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTable:
    """Costs by tensor-parallel degree, and of messages.

    `send`: of a message between stages, by bytes. `host_copy`: of a copy between a GPU and host memory in
    one direction, by bytes; None where it was not profiled. `provenance` says where the tables come from, by
    their names in `grids()`; see `profiler.provenance`.
    """

    key: ProfileKey
    layers: Mapping[int, LayerCosts]
    send: Grid
    measured_s: float
    notes: tuple[str, ...] = ()
    host_copy: Grid | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> Dtype:
        """Element type the costs hold for."""
        return Dtype(self.key.dtype)

    def num_points(self) -> int:
        """Measured points of all tables."""
        return sum(grid.values_s.size for grid in self.grids().values())

    def grids(self) -> dict[str, Grid]:
        """All tables by name, e.g. `tp1.linear`."""
        found: dict[str, Grid] = {"send": self.send}
        if self.host_copy is not None:
            found["host_copy"] = self.host_copy
        for tp_size, costs in self.layers.items():
            for operator in (*LAYER_OPERATORS, *OPTIONAL_OPERATORS):
                grid = getattr(costs, operator)
                if grid is not None:
                    found[f"tp{tp_size}.{operator}"] = grid
        return found


def _grid_dict(grid: Grid) -> dict[str, Any]:
    return {
        "axis_names": list(grid.axis_names),
        "axes": [axis.tolist() for axis in grid.axes],
        "values_s": grid.values_s.tolist(),
        **({"repaired": grid.repaired} if grid.repaired else {}),
    }


def _grid_from(name: str, data: Mapping[str, Any]) -> Grid:
    grid = make_grid(name, data["axis_names"], data["axes"], data["values_s"])
    # What is in the file was made isotone before it was written.
    repaired = float(data.get("repaired", 0.0))
    return replace(grid, repaired=repaired) if repaired > grid.repaired else grid


def write_profile(table: ProfileTable, path: Path) -> None:
    """Write a profile as JSON; the file appears whole or not at all."""
    data = {
        "version": VERSION,
        "key": asdict(table.key),
        "measured_s": table.measured_s,
        "notes": list(table.notes),
        "provenance": dict(table.provenance),
        "grids": {name: _grid_dict(grid) for name, grid in table.grids().items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_profile(path: Path) -> ProfileTable:
    """Read and check a profile file; ProfileError names the file and what is wrong."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ProfileError(f"profile.path={path}: no such file; `command=profile` writes one") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProfileError(f"profile.path={path}: not a profile: {error}") from error
    try:
        return _from_dict(data)
    except ProfileError as error:
        raise ProfileError(f"profile.path={path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"profile.path={path}: not a profile: {type(error).__name__} {error}") from error


def _from_dict(data: Any) -> ProfileTable:
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ProfileError(
            f"version is not {VERSION}; profile again with `command=profile profile.refresh=true`"
        )
    key = ProfileKey(**data["key"])
    if key.dtype not in Dtype.__members__:
        raise ProfileError(f"key.dtype={key.dtype!r}; allowed: {list(Dtype.__members__)}")
    grids = {name: _grid_from(name, grid) for name, grid in data["grids"].items()}
    layers = {}
    for tp_size in sorted({int(name[2:].split(".")[0]) for name in grids if name.startswith("tp")}):
        found = {name.split(".")[1]: grid for name, grid in grids.items() if name.startswith(f"tp{tp_size}.")}
        missing = sorted(set(LAYER_OPERATORS) - set(found))
        if missing or (tp_size > 1 and "all_reduce" not in found):
            raise ProfileError(f"tp_size={tp_size} lacks the table {(missing or ['all_reduce'])[0]}")
        unknown = sorted(set(found) - set(LAYER_OPERATORS) - set(OPTIONAL_OPERATORS))
        if unknown:
            raise ProfileError(f"tp_size={tp_size} has an unknown table {unknown[0]}")
        layers[tp_size] = LayerCosts(**found)
    if not layers or "send" not in grids:
        raise ProfileError("no layer costs or no send costs in it")
    return ProfileTable(
        key=key,
        layers=layers,
        send=grids["send"],
        measured_s=float(data["measured_s"]),
        notes=tuple(data["notes"]),
        host_copy=grids.get("host_copy"),
        provenance=_provenance(data.get("provenance", {})),
    )


def _provenance(data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(text, str) for text in data.values()):
        raise ProfileError("provenance must map the names of tables to where they come from")
    return data


def check_key(found: ProfileKey, wanted: ProfileKey, *, source: str) -> None:
    """Raise ProfileError unless a profile was measured for this model, dtype and device."""
    reasons = {
        "shape": f"measured for the model {found.model}, not for {wanted.model}",
        "dtype": f"measured in {found.dtype}, but runner.dtype={wanted.dtype}",
        "device": f"measured on {found.device}, but this cluster has {wanted.device}",
        "num_ranks": f"measured with {found.num_ranks} ranks at once, but the cluster has {wanted.num_ranks}",
    }
    for name, reason in reasons.items():
        if getattr(found, name) != getattr(wanted, name):
            raise ProfileError(
                f"profile.path={source}: {reason}. Drop profile.path to measure here, or name a "
                "matching profile."
            )
