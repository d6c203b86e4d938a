"""Vidur's profiles: `mlp.csv` by tokens and degree, attention tables, collectives. Times in ms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from exegpt.errors import ProfileError
from exegpt.profiler.grid import FloatArray, make_grid
from exegpt.profiler.imports.assembly import (
    FORMULA,
    Measured,
    assemble,
    check_wanted,
    decode_grid,
    impossible_decode,
    mean_by,
    nearest,
    origin,
)
from exegpt.profiler.imports.columns import Columns, find_table, read_columns
from exegpt.profiler.sheet import GpuSheet
from exegpt.profiler.table import ProfileTable
from exegpt.specs import Dtype, ModelFamily, ModelSpec

MS = 1e-3
# A token's id, the shortest message between stages.
SHORTEST_BYTES = 8.0

# The columns of a layer; `add` is one sum, and a layer adds to the residual twice.
LAYER_KERNELS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
    "add",
)


def vidur_profile(
    directory: Path,
    model: ModelSpec,
    sheet: GpuSheet | None,
    *,
    dtype: Dtype,
    num_ranks: int,
    network: Path | None = None,
    device: str | None = None,
    gpus_per_node: int | None = None,
) -> ProfileTable:
    """A profile from Vidur's tables of a device.

    Parameters
    ----------
    directory : Path
        Holds `mlp.csv` (also gzipped, or Parquet) of the model, or folders of models; an attention table
        (`attention*.csv`) beside it is used for the degrees it has.
    model : ModelSpec
        Its shape must be that of a table.
    sheet : GpuSheet, optional
        Fills what the tables lack (head, overheads, and often attention and collectives).
    dtype : Dtype
        A 16-bit type, as the tables are.
    num_ranks : int
        GPUs of the cluster planned for.
    network : Path, optional
        Folder of `all_reduce.csv` and `send_recv.csv`.
    device : str, optional
        As the profile names it; default the sheet's name.
    gpus_per_node : int, optional
        Larger degrees are left out, since a group stays inside a node; with more GPUs than that, messages
        between stages are costed over the link between nodes. Default: one node.

    Raises
    ------
    ProfileError
        If no table is of the model's shape (the nearest one is named), or a table is damaged.
    """
    table = _matching(directory, model)
    measured = Measured(f"Vidur, {table.path.parent}")
    check_wanted(model, dtype, measured.source)
    degrees = table.numbers("num_tensor_parallel_workers")
    fitting = (int(d) for d in np.unique(degrees) if int(d) in model.tp_sizes(int(d)))
    for tp_size in (d for d in fitting if gpus_per_node is None or d <= gpus_per_node):
        rows = table.where(degrees == tp_size)
        tokens = rows.numbers("num_tokens")
        measured.add(tp_size, "linear", *_line(tokens, _layer_s(rows, model)), origin("measured", table.path))
        embedded = rows.numbers("time_stats.emb.median") * MS
        measured.add(tp_size, "embed", *_line(tokens, embedded), origin("measured", table.path))
    _attention(table.path.parent, model, sheet, measured)
    if network is not None:
        _collectives(network, model, dtype, measured)
    return assemble(
        measured, model, sheet, dtype=dtype, num_ranks=num_ranks, device=device, gpus_per_node=gpus_per_node
    )


def _line(points: FloatArray, times: FloatArray) -> tuple[tuple[FloatArray], FloatArray]:
    distinct, medians = mean_by(points, times)
    return (distinct,), medians


def _shape(table: Columns) -> dict[str, float]:
    names = ("n_embd", "n_head", "n_kv_head", "n_expanded_embd")
    shape = {name: float(table.numbers(name)[0]) for name in names}
    return {**shape, "use_gated_mlp": float(table.text("use_gated_mlp")[0] == "True")}


def _matching(directory: Path, model: ModelSpec) -> Columns:
    """The table of the model's shape among those below a directory."""
    if not directory.is_dir():
        raise ProfileError(f"{directory}: no such directory; name one that holds Vidur's mlp.csv")
    paths = sorted(
        {p for p in directory.rglob("mlp.*") if p.name in ("mlp.csv", "mlp.csv.gz", "mlp.parquet")}
    )
    if not paths:
        raise ProfileError(f"{directory}: no mlp.csv, mlp.csv.gz or mlp.parquet in it or below")
    wanted = {
        "n_embd": float(model.hidden_size),
        "n_head": float(model.num_attention_heads),
        "n_kv_head": float(model.num_key_value_heads),
        "n_expanded_embd": float(model.intermediate_size),
        "use_gated_mlp": float(model.is_gated),
    }
    shapes = []
    for path in paths:
        table = read_columns(path)
        found = _shape(table)
        if found == wanted and model.head_dim * model.num_attention_heads == model.hidden_size:
            return table
        shapes.append(found)
    closest = nearest(wanted, shapes)
    raise ProfileError(
        f"{directory}: no table has the shape of {model.name} ({_text(wanted)}); the nearest is "
        f"{paths[shapes.index(dict(closest))].parent.name} ({_text(closest)})"
    )


def _text(shape: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in shape.items())


def _layer_s(rows: Columns, model: ModelSpec) -> FloatArray:
    kernels = [*LAYER_KERNELS, *(["attn_rope"] if model.family is ModelFamily.LLAMA else [])]
    times = [rows.numbers(f"time_stats.{kernel}.median") for kernel in kernels]
    return np.asarray(np.sum(times, axis=0) * MS)


def _attention(directory: Path, model: ModelSpec, sheet: GpuSheet | None, measured: Measured) -> None:
    for path in sorted(directory.glob("attention*")):
        table = read_columns(path)
        table.require("time_stats.attn_prefill.median", "time_stats.attn_decode.median", "is_prefill")
        same = (
            (table.numbers("n_embd") == model.hidden_size)
            & (table.numbers("n_q_head") == model.num_attention_heads)
            & (table.numbers("n_kv_head") == model.num_key_value_heads)
        )
        degrees = table.numbers("num_tensor_parallel_workers")
        for tp_size in measured.grids:
            rows = same & (degrees == tp_size)
            if rows.any():
                attention_operators(table.where(rows), tp_size, model, sheet, measured)


def attention_operators(
    table: Columns,
    tp_size: int,
    model: ModelSpec,
    sheet: GpuSheet | None,
    measured: Measured,
    *,
    chunk_is_cached: bool = False,
) -> None:
    """Encode and decode attention from rows of one degree of a Vidur attention table.

    `chunk_is_cached`: whether `kv_cache_size` counts the chunk itself (the older LLMServingSim does).
    """
    prefill = table.text("is_prefill") == "True"
    batch, chunk, cached = (
        table.numbers(name) for name in ("batch_size", "prefill_chunk_size", "kv_cache_size")
    )
    seconds = table.numbers("time_stats.attn_prefill.median", may_be_empty=True) * MS
    uncached = cached == chunk if chunk_is_cached else cached == 0
    rows = prefill & (batch == 1) & uncached & np.isfinite(seconds)
    if rows.any():
        lengths, times = mean_by(chunk[rows], seconds[rows])
        measured.add(
            tp_size, "encode_attention", ([1.0], lengths), times[None, :], origin("measured", table.path)
        )
    seconds = table.numbers("time_stats.attn_decode.median", may_be_empty=True) * MS
    rows = ~prefill & (cached > 0) & np.isfinite(seconds)
    if rows.any():
        contexts = (batch * cached)[rows]
        reason = impossible_decode(sheet, model, tp_size, contexts, seconds[rows])
        if reason:
            measured.origins[f"tp{tp_size}.decode_attention"] = f"{FORMULA}, because {reason}"
            return
        axes, values = decode_grid(batch[rows], contexts, seconds[rows])
        measured.add(tp_size, "decode_attention", axes, values, origin("measured", table.path))


def _collectives(network: Path, model: ModelSpec, dtype: Dtype, measured: Measured) -> None:
    """All-reduce inside a node, and messages between two GPUs of a node; sizes in bytes."""
    path = find_table(network, "all_reduce")
    if path is not None:
        table = read_columns(path)
        ranks, per_node, size = (table.numbers(n) for n in ("num_workers", "devices_per_node", "size"))
        seconds = table.numbers("time_stats.all_reduce.median") * MS
        for tp_size in measured.grids:
            rows = (ranks == tp_size) & (per_node == tp_size)
            limit = measured.grids[tp_size]["linear"].limit() * model.hidden_size * dtype.num_bytes
            if rows.any() and size[rows].max() < limit:
                measured.origins[f"tp{tp_size}.all_reduce"] = (
                    f"{FORMULA}, because {path.name} ends at {size[rows].max():.3g} of {limit:.3g} bytes"
                )
            elif rows.any():
                line = _from_one_token(*mean_by(size[rows], seconds[rows]))
                measured.add(tp_size, "all_reduce", (line[0],), line[1], origin("measured", path))
    path = find_table(network, "send_recv")
    if path is not None:
        table = read_columns(path)
        rows = (table.numbers("num_workers") == 2) & (table.numbers("devices_per_node") == 2)
        if not rows.any():
            raise ProfileError(f"{path}: no row of two GPUs of one node")
        seconds = table.numbers("time_stats.send_recv.median") * MS
        sizes, times = _from_one_token(*mean_by(table.numbers("size")[rows], seconds[rows]))
        measured.send = make_grid("send", ("bytes",), (sizes,), times)
        measured.origins["send"] = origin("measured", path)


def _from_one_token(sizes: FloatArray, times: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Let the shortest message stand for shorter ones: below its first point a table falls to zero."""
    if sizes[0] <= SHORTEST_BYTES:
        return sizes, times
    return np.concatenate([[SHORTEST_BYTES], sizes]), np.concatenate([times[:1], times])
