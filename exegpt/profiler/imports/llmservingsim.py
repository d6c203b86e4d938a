"""LLMServingSim's tables of one model: the newer profiler's (us) and the older one's (ns and ms).

Neither states the shape of the model, the folder above `tp1`, `tp2` only its name.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from exegpt.errors import ProfileError
from exegpt.profiler.grid import FloatArray
from exegpt.profiler.imports.assembly import (
    FORMULA,
    Measured,
    assemble,
    check_wanted,
    decode_grid,
    impossible_decode,
    mean_by,
    origin,
)
from exegpt.profiler.imports.columns import Columns, find_table, need_table, read_columns
from exegpt.profiler.imports.vidur import attention_operators
from exegpt.profiler.sheet import GpuSheet
from exegpt.profiler.table import ProfileTable
from exegpt.specs import Dtype, ModelSpec

US, NS = 1e-6, 1e-9

# Kernels of a layer; a name twice runs twice. vLLM fuses Q, K and V, gate and up, norm and residual.
NEWER_LAYER = (
    "layernorm",
    "qkv_proj",
    "rotary_emb",
    "o_proj",
    "layernorm",
    "gate_up_proj",
    "act_fn",
    "down_proj",
)
OLDER_LAYER = (
    "input_layernorm",
    "q_proj",
    "k_proj",
    "v_proj",
    "rope",
    "o_proj",
    "post_layernorm",
    "gate_proj",
    "up_proj",
    "act_fn",
    "down_proj",
)


def llmservingsim_profile(
    directory: Path,
    model: ModelSpec,
    sheet: GpuSheet | None,
    *,
    dtype: Dtype,
    num_ranks: int,
    device: str | None = None,
    same_shape: bool = False,
    gpus_per_node: int | None = None,
) -> ProfileTable:
    """A profile from LLMServingSim's tables of a model on a device.

    Parameters
    ----------
    directory : Path
        Named as the model, with folders `tp1`, `tp2`, ... of tables: `dense`, `per_sequence` and `attention`,
        or the older `layers` and `attention`.
    model : ModelSpec
        The model that was measured; the tables do not say its shape.
    sheet : GpuSheet, optional
        Fills what the tables lack (overheads, collectives), and tells decode times that no memory allows.
    dtype, num_ranks
        A 16-bit type, and the GPUs of the cluster planned for.
    device : str, optional
        As the profile names it; default the sheet's name.
    same_shape : bool
        Vouches that the folder's model has `model`'s shape, where their names differ.
    gpus_per_node : int, optional
        Larger degrees are left out, since a group stays inside a node; with more GPUs than that, messages
        between stages are costed over the link between nodes. Default: one node.

    Raises
    ------
    ProfileError
        If the folder is of another model, holds no degree that fits, or a table is damaged.
    """
    if not directory.is_dir():
        raise ProfileError(f"{directory}: no such directory; name the folder of a model that holds tp1")
    if not same_shape and not _plain(model.name).endswith(_plain(directory.resolve().name)):
        raise ProfileError(
            f"{directory}: its tables are of {directory.resolve().name}, not of {model.name}, and do not say "
            "their shape. Name the model's own folder; if both have the same shape, set "
            "profile.same_shape=true (same_shape=True)"
        )
    measured = Measured(f"LLMServingSim, {directory}")
    check_wanted(model, dtype, measured.source)
    for folder in sorted(directory.glob("tp*")):
        degree = folder.name[2:]
        if not degree.isdigit() or int(degree) not in model.tp_sizes(int(degree)):
            continue
        if gpus_per_node is not None and int(degree) > gpus_per_node:
            continue
        if find_table(folder, "layers"):
            _older(folder, int(degree), model, sheet, measured)
        else:
            _newer(folder, int(degree), model, sheet, measured)
    return assemble(
        measured, model, sheet, dtype=dtype, num_ranks=num_ranks, device=device, gpus_per_node=gpus_per_node
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _kernel(table: Columns, column: str, axis: str, time: str, name: str) -> tuple[FloatArray, FloatArray]:
    """Points and times of one kernel, in the table's unit."""
    rows = table.text(column) == name
    if not rows.any():
        raise ProfileError(f"{table.path}: lacks rows of {name!r} in column {column!r}")
    return mean_by(table.numbers(axis)[rows], table.numbers(time)[rows])


def _layer(
    table: Columns, column: str, axis: str, time: str, names: tuple[str, ...]
) -> tuple[FloatArray, FloatArray]:
    """Summed times of a layer's kernels at the points that all of them have."""
    parts = [_kernel(table, column, axis, time, name) for name in names]
    points = parts[0][0]
    for other, _ in parts[1:]:
        points = np.intersect1d(points, other)
    if len(points) == 0:
        raise ProfileError(f"{table.path}: its kernels have no number of {axis} in common")
    return points, np.sum([np.interp(points, p, t) for p, t in parts], axis=0)


def _newer(folder: Path, tp_size: int, model: ModelSpec, sheet: GpuSheet | None, measured: Measured) -> None:
    dense = read_columns(need_table(folder, "dense"))
    columns = ("layer", "tokens", "time_us")
    note = origin("measured", dense.path)
    points, times = _layer(dense, *columns, NEWER_LAYER)
    measured.add(tp_size, "linear", (points,), times * US, note)
    points, times = _kernel(dense, *columns, "embedding")
    measured.add(tp_size, "embed", (points,), times * US, note)
    single = read_columns(need_table(folder, "per_sequence"))
    points, times = _layer(single, "layer", "sequences", "time_us", ("lm_head", "sampler"))
    norm = np.interp(points, *_kernel(dense, *columns, "final_layernorm"))
    measured.add(tp_size, "head", (points,), (times + norm) * US, origin("measured", dense.path, single.path))
    path = find_table(folder, "attention")
    if path is None:
        return
    table = read_columns(path)
    chunk, cached, decodes, context = (
        table.numbers(name) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    )
    seconds = table.numbers("time_us") * US
    rows = (decodes == 0) & (chunk > 0) & (cached == 0)
    if rows.any():
        lengths, values = mean_by(chunk[rows], seconds[rows])
        measured.add(tp_size, "encode_attention", ([1.0], lengths), values[None, :], origin("measured", path))
    rows = (chunk == 0) & (decodes > 0) & (context > 0)
    if rows.any():
        contexts = (decodes * context)[rows]
        reason = impossible_decode(sheet, model, tp_size, contexts, seconds[rows])
        if reason:
            measured.origins[f"tp{tp_size}.decode_attention"] = f"{FORMULA}, because {reason}"
            return
        axes, values = decode_grid(decodes[rows], contexts, seconds[rows])
        measured.add(tp_size, "decode_attention", axes, values, origin("measured", path))


def _older(folder: Path, tp_size: int, model: ModelSpec, sheet: GpuSheet | None, measured: Measured) -> None:
    layers = read_columns(need_table(folder, "layers"))
    columns = ("layer_name", "input", "latency(ns)")
    note = origin("measured", layers.path)
    points, times = _layer(layers, *columns, OLDER_LAYER)
    measured.add(tp_size, "linear", (points,), times * NS, note)
    points, times = _kernel(layers, *columns, "embedding")
    measured.add(tp_size, "embed", (points,), times * NS, note)
    points, times = _layer(layers, *columns, ("final_layernorm", "lm_head"))
    measured.add(tp_size, "head", (points,), times * NS, f"{note}, without sampling")
    points, times = _kernel(layers, *columns, "attn")
    measured.add(tp_size, "encode_attention", ([1.0], points), times[None, :] * NS, note)
    path = find_table(folder, "attention")
    if path is None:
        return
    table = read_columns(path)
    same = (
        (table.numbers("n_embd") == model.hidden_size)
        & (table.numbers("n_q_head") == model.num_attention_heads)
        & (table.numbers("n_kv_head") == model.num_key_value_heads)
    )
    if not same.all():
        raise ProfileError(
            f"{path}: its attention is of n_embd={table.numbers('n_embd')[0]:g}, "
            f"n_q_head={table.numbers('n_q_head')[0]:g}, n_kv_head={table.numbers('n_kv_head')[0]:g}, not of "
            f"{model.name}"
        )
    decode = table.where(table.text("is_prefill") != "True")
    attention_operators(decode, tp_size, model, sheet, measured, chunk_is_cached=True)
