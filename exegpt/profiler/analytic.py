"""A profile from a GPU's data sheet alone: every operator's time by the roofline formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exegpt.errors import ConfigError
from exegpt.profiler.formulas import embed_s, encode_linear_s, head_s, linear_s
from exegpt.profiler.grid import FloatArray, Grid, make_grid
from exegpt.profiler.provenance import formula_provenance
from exegpt.profiler.roofline import (
    all_reduce_s,
    decode_attention_s,
    encode_attention_s,
    host_copy_s,
    point_to_point_s,
)
from exegpt.profiler.sheet import GpuSheet
from exegpt.profiler.table import LayerCosts, ProfileKey, ProfileTable, shape_digest
from exegpt.specs import Dtype, ModelSpec

# Growth from one grid point to the next. A square, the steepest of the formulas, is interpolated over
# such a cell within (r - 1)^2 / 4r = 0.8 %, and around bends (overlap, a cache too small) within 3 %.
RATIO = 1.2

MAX_TOKENS = 131_072
MAX_QUERIES = 4_096
# Longer batches of prompts are computed one after another (see `simulator.costs`).
MAX_ENCODE_QUERIES = 256


def analytic_profile(
    model: ModelSpec,
    sheet: GpuSheet,
    *,
    dtype: Dtype,
    tp_sizes: Sequence[int],
    num_ranks: int,
    gpus_per_node: int | None = None,
    max_tokens: int = MAX_TOKENS,
    max_queries: int = MAX_QUERIES,
    max_context_tokens: int | None = None,
) -> ProfileTable:
    """Costs of a model on a card as its sheet predicts them.

    Parameters
    ----------
    model : ModelSpec
    sheet : GpuSheet
    dtype : Dtype
    tp_sizes : sequence of int
        Degrees wanted; they must divide the model's heads and feed-forward width.
    num_ranks : int
        GPUs of the cluster.
    gpus_per_node : int, optional
        With more ranks than that, messages between stages are costed over the link between nodes.
        Default: one node.
    max_tokens, max_queries : int
        Largest batch in prompt tokens, and in queries.
    max_context_tokens : int, optional
        Largest summed context; default what the K/V of all memory of the cluster could hold.

    Returns
    -------
    ProfileTable
        Its `notes` carry the sheet's calibration label.

    Raises
    ------
    ConfigError
        If a degree does not divide the model, or a limit is not positive.
    """
    allowed = model.tp_sizes(max(tp_sizes, default=1))
    wrong = [t for t in tp_sizes if t not in allowed]
    if wrong or not tp_sizes:
        raise ConfigError(f"tp_size={wrong[0] if wrong else 'none'} of {model.name}: allowed {list(allowed)}")
    for name, value in (
        ("num_ranks", num_ranks),
        ("gpus_per_node", gpus_per_node or 1),
        ("max_tokens", max_tokens),
        ("max_queries", max_queries),
        ("max_context_tokens", 1 if max_context_tokens is None else max_context_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name}={value} of the analytic profile of {model.name}: must be at least 1")
    if max_context_tokens is None:
        held = num_ranks * sheet.memory_bytes // model.kv_bytes_per_token(dtype)
        max_context_tokens = max(held, model.max_position_embeddings)
    layers = {
        tp_size: analytic_costs(
            model,
            sheet,
            tp_size,
            dtype=dtype,
            max_tokens=max_tokens,
            max_queries=max_queries,
            max_context_tokens=max_context_tokens,
        )
        for tp_size in sorted(set(tp_sizes))
    }
    spans_nodes = gpus_per_node is not None and num_ranks > gpus_per_node
    table = ProfileTable(
        key=ProfileKey(
            model=model.name,
            shape=shape_digest(model),
            dtype=dtype.value,
            device=sheet.name,
            num_ranks=num_ranks,
            software=f"analytic, {sheet.label}",
        ),
        layers=layers,
        send=analytic_send(model, sheet, dtype, max_tokens, spans_nodes=spans_nodes),
        host_copy=analytic_host_copy(model, sheet, dtype, max_tokens),
        measured_s=0.0,
        notes=(
            f"analytic profile: {sheet.label}",
            f"messages between stages over {(sheet.inter_node if spans_nodes else sheet.intra_node).kind}",
        ),
    )
    return replace(table, provenance=formula_provenance(table.grids(), sheet))


def analytic_send(
    model: ModelSpec, sheet: GpuSheet, dtype: Dtype, max_tokens: int, *, spans_nodes: bool
) -> Grid:
    """Time of a message between stages, by bytes; from one token's id to `max_tokens` rows."""
    link = sheet.inter_node if spans_nodes else sheet.intra_node
    sizes = _axis(8, max_tokens * model.hidden_size * dtype.num_bytes)
    return make_grid("send", ("bytes",), (sizes,), point_to_point_s(link, sizes))


def analytic_host_copy(model: ModelSpec, sheet: GpuSheet, dtype: Dtype, max_tokens: int) -> Grid:
    """Time of a copy between GPU and host, by bytes; up to the K/V of `max_tokens` tokens in all layers."""
    sizes = _axis(8, max_tokens * model.kv_bytes_per_token(dtype))
    return make_grid("host_copy", ("bytes",), (sizes,), host_copy_s(sheet, sizes))


def analytic_costs(
    model: ModelSpec,
    sheet: GpuSheet,
    tp_size: int,
    *,
    dtype: Dtype,
    max_tokens: int,
    max_queries: int,
    max_context_tokens: int,
) -> LayerCosts:
    """Costs at one degree."""
    tokens, queries = _axis(1, max_tokens), _axis(1, max_queries)
    encode = _axis(1, min(max_queries, MAX_ENCODE_QUERIES)), _axis(1, model.max_position_embeddings)
    decode = queries, _axis(1, max_context_tokens)
    size = dtype.num_bytes
    heads: dict[str, Any] = {
        "num_heads": model.num_attention_heads / tp_size,
        "num_kv_heads": max(model.num_key_value_heads / tp_size, 1),
        "head_dim": model.head_dim,
        "dtype_bytes": size,
    }

    def grid(operator: str, names: tuple[str, ...], axes: tuple[FloatArray, ...], times: FloatArray) -> Grid:
        return make_grid(f"tp{tp_size}.{operator}", names, axes, times)

    attended = decode_attention_s(sheet, decode[0][:, None], decode[1][None, :], **heads)
    overhead = sheet.iteration_s + sheet.query_s * queries
    message = _axis(model.hidden_size * size, max_tokens * model.hidden_size * size)
    return LayerCosts(
        linear=grid("linear", ("tokens",), (tokens,), linear_s(model, sheet, tp_size, tokens, size)),
        encode_attention=grid(
            "encode_attention",
            ("queries", "length_tokens"),
            encode,
            encode_attention_s(
                sheet,
                encode[0][:, None],
                encode[1][None, :],
                causal=not model.is_encoder_decoder,
                **heads,
            ),
        ),
        decode_attention=grid("decode_attention", ("queries", "context_tokens"), decode, attended),
        head=grid("head", ("queries",), (queries,), head_s(model, sheet, tp_size, queries, size)),
        embed=grid("embed", ("tokens",), (tokens,), embed_s(model, sheet, tokens, size)),
        encode_overhead=grid("encode_overhead", ("queries",), (queries,), overhead),
        decode_overhead=grid("decode_overhead", ("queries",), (queries,), overhead),
        all_reduce=None
        if tp_size == 1
        else grid("all_reduce", ("bytes",), (message,), all_reduce_s(sheet.intra_node, message, tp_size)),
        encode_linear=grid(
            "encode_linear", ("tokens",), (tokens,), encode_linear_s(model, sheet, tp_size, tokens, size)
        )
        if model.is_encoder_decoder
        else None,
        # Input tokens are attended to as generated ones are: one new token per query over K/V that exist.
        cross_attention=grid("cross_attention", ("queries", "context_tokens"), decode, attended)
        if model.is_encoder_decoder
        else None,
    )


def _axis(first: float, last: float) -> NDArray[np.float64]:
    """Points from first to last, each at most `RATIO` times the one before; batches may be fractions."""
    if last <= first:
        return np.asarray([float(last)])
    steps = int(np.ceil(np.log(last / first) / np.log(RATIO)))
    return np.geomspace(first, last, steps + 1)
