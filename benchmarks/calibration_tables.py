"""Measured public tables as points that a roofline formula can be held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exegpt.profiler.grid import FloatArray
from exegpt.profiler.imports.columns import Columns, read_columns


@dataclass(frozen=True, slots=True)
class Points:
    """Measured times of one operator.

    Attributes
    ----------
    table : str
        Path below `profiles/`, and what was taken from it where that is not all.
    operator : str
        A field of `Efficiency`, or `all_reduce` or `send_recv`.
    inputs : mapping of str to array
        Arguments of the roofline function.
    seconds : float array
    shape : array of str
        What the points are split by, and the same in words.
    doubt : str
        Why the table is held against the formula but fits nothing; empty where it fits.
    """

    table: str
    operator: str
    inputs: Mapping[str, NDArray[np.generic]]
    seconds: FloatArray
    shape: NDArray[np.str_]
    split_by: str
    doubt: str = ""


def make_points(
    table: str,
    operator: str,
    inputs: Mapping[str, ArrayLike],
    seconds: FloatArray,
    by: tuple[NDArray[np.generic], ...],
    split_by: str,
    *,
    rows: NDArray[np.bool_] | None = None,
    doubt: str = "",
) -> Points:
    """Broadcast the inputs, keep the chosen rows, and name each row's shape."""
    keep = np.ones(len(seconds), dtype=bool) if rows is None else rows
    shape = np.array([" ".join(map(str, key)) for key in zip(*(b[keep] for b in by), strict=True)])
    full = {name: np.broadcast_to(np.asarray(value), seconds.shape)[keep] for name, value in inputs.items()}
    return Points(table, operator, full, seconds[keep], shape, split_by, doubt)


def aic_gemm(root: Path, system: str) -> Points:
    """AIConfigurator: out[m, n] = in[m, k] w[k, n]."""
    name = f"aiconfigurator/{system}/gemm_perf.csv.gz"
    t = read_columns(root / name)
    n, k = t.numbers("n"), t.numbers("k")
    inputs = {"rows": t.numbers("m"), "columns": n, "inner": k}
    return make_points(name, "matmul", inputs, t.numbers("latency") * 1e-3, (n, k), "weight (n, k)")


def aic_attention(root: Path, system: str) -> Iterator[Points]:
    """AIConfigurator: prefill and one decode step; only without a sliding window."""
    for kind, operator in (("context", "encode_attention"), ("generation", "decode_attention")):
        name = f"aiconfigurator/{system}/{kind}_attention_perf.csv.gz"
        t = read_columns(root / name)
        if "window_size" in t:
            t = t.where(t.numbers("window_size") == 0)
        batch, heads, kv_heads, dim = (
            t.numbers(c) for c in ("batch_size", "num_heads", "num_key_value_heads", "head_dim")
        )
        length = t.numbers("isl") + t.numbers("step")
        inputs: dict[str, ArrayLike] = {
            "queries": batch,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": dim,
        }
        if operator == "encode_attention":
            inputs["length_tokens"] = length
        else:
            inputs["context_tokens"] = batch * length
        seconds = t.numbers("latency") * 1e-3
        yield make_points(name, operator, inputs, seconds, (heads, kv_heads, dim), "heads, K/V heads, width")


def vidur_mlp(root: Path, *names: str) -> Iterator[Points]:
    """Vidur: the matrix products and elementwise kernels of a layer, by tokens and degree."""
    for name in names:
        t = read_columns(root / name)
        heads, kv_heads, hidden, inner, tp, tokens = (
            t.numbers(c)
            for c in (
                "n_head",
                "n_kv_head",
                "n_embd",
                "n_expanded_embd",
                "num_tensor_parallel_workers",
                "num_tokens",
            )
        )
        width = hidden / heads
        gates = np.where(t.text("use_gated_mlp") == "True", 2, 1)
        kv = np.maximum(kv_heads / tp, 1) * width
        products = {
            "attn_pre_proj": (heads / tp * width + 2 * kv, hidden),
            "attn_post_proj": (hidden, hidden / tp),
            "mlp_up_proj": (gates * inner / tp, hidden),
            "mlp_down_proj": (hidden, inner / tp),
        }
        times = [t.numbers(f"time_stats.{product}.median") * 1e-3 for product in products]
        n = np.concatenate([n for n, _ in products.values()])
        k = np.concatenate([k for _, k in products.values()])
        inputs = {"rows": np.tile(tokens, len(products)), "columns": n, "inner": k}
        yield make_points(name, "matmul", inputs, np.concatenate(times), (n, k), "weight (n, k)")
        # A model without a second norm (phi-2) adds attention and feed-forward block at once: two sums.
        sums = 1 if "time_stats.post_attention_layernorm.median" in t else 2
        moved = {
            ("input_layernorm", "norm"): 4 * hidden,
            ("mlp_act", "activation"): 2 * (gates + 1) * inner / tp,
            ("add", "stream"): 6 * sums * hidden,
            ("attn_rope", "rotation"): 4 * (heads / tp * width + kv),
        }
        parts = {
            kind: (tokens * per_token, t.numbers(f"time_stats.{op}.median") * 1e-3, tp)
            for (op, kind), per_token in moved.items()
        }
        yield elementwise(name, parts, "kernel and degree")


def elementwise(
    name: str, parts: Mapping[str, tuple[FloatArray, FloatArray, FloatArray]], split_by: str
) -> Points:
    """Points of kinds of elementwise kernels: bytes, seconds, and what to split each kind by."""
    kinds = np.concatenate([np.full(len(s), kind) for kind, (_, s, _) in parts.items()])
    moved, seconds, by = (np.concatenate([part[i] for part in parts.values()]) for i in range(3))
    inputs: dict[str, ArrayLike] = {"moved_bytes": moved, "kind": kinds, "num_kernels": 1.0}
    return make_points(name, "elementwise", inputs, seconds, (kinds, by), split_by)


def vidur_attention(root: Path, name: str) -> Iterator[Points]:
    """Vidur's historic attention table of Llama-2-70B at degree 2."""
    t = read_columns(root / name)
    doubt = "an older kernel, 2 to 3 times slower than the other table's (vLLM 0.14) on the same card"
    yield from attention_by_phase(t, name, cached=t.numbers("kv_cache_size"), prefill_doubt=doubt)


def attention_by_phase(
    t: Columns, name: str, *, cached: FloatArray, prefill_doubt: str = "", decode_doubt: str = ""
) -> Iterator[Points]:
    """The columns that Vidur's and the older LLMServingSim's attention tables share."""
    tp, batch, chunk = (
        t.numbers(c) for c in ("num_tensor_parallel_workers", "batch_size", "prefill_chunk_size")
    )
    shared = {
        "queries": batch,
        "num_heads": t.numbers("n_q_head") / tp,
        "num_kv_heads": t.numbers("n_kv_head") / tp,
        "head_dim": t.numbers("n_embd") / t.numbers("n_q_head"),
    }
    prefill = t.text("is_prefill") == "True"
    seconds = t.numbers("time_stats.attn_prefill.median", may_be_empty=True) * 1e-3
    yield make_points(
        f"{name} (prefill)",
        "encode_attention",
        {**shared, "length_tokens": chunk, "cached_tokens": cached},
        seconds,
        (chunk,),
        "chunk length",
        rows=prefill & np.isfinite(seconds),
        doubt=prefill_doubt,
    )
    seconds = t.numbers("time_stats.attn_decode.median", may_be_empty=True) * 1e-3
    yield make_points(
        f"{name} (decode)",
        "decode_attention",
        {**shared, "context_tokens": batch * cached},
        seconds,
        (batch,),
        "batch size",
        rows=~prefill & np.isfinite(seconds),
        doubt=decode_doubt,
    )


def vidur_link(root: Path, name: str, operator: str, *, ranks: int, per_node: int, doubt: str = "") -> Points:
    """Vidur: messages by bytes between `ranks` GPUs, `per_node` of them in a node."""
    t = read_columns(root / name)
    rows = (t.numbers("num_workers") == ranks) & (t.numbers("devices_per_node") == per_node)
    size = t.numbers("size")
    seconds = t.numbers(f"time_stats.{operator}.median") * 1e-3
    label = f"{name} ({ranks} ranks, {per_node} a node)"
    by = (np.floor(4 * np.log2(size)),)
    inputs: dict[str, ArrayLike] = {"message_bytes": size, "num_ranks": float(ranks)}
    return make_points(
        label, operator, inputs, seconds, by, "quarter octave of bytes", rows=rows, doubt=doubt
    )


def vidur_legacy_link(root: Path, name: str, doubt: str) -> Points:
    """Vidur's older sends, by tokens; degree 1 only, where a message is tokens x width x 2 bytes."""
    t = read_columns(root / name)
    tokens, width = t.numbers("num_tokens"), t.numbers("n_embd")
    rows = (t.numbers("num_tensor_parallel_workers") == 1) & (tokens > 0)
    inputs: dict[str, ArrayLike] = {"message_bytes": tokens * width * 2, "num_ranks": 2.0}
    seconds = t.numbers("time_stats.send_recv.median") * 1e-3
    return make_points(name, "send_recv", inputs, seconds, (width,), "hidden width", rows=rows, doubt=doubt)


def aic_all_reduce(root: Path, system: str) -> Points:
    """AIConfigurator's NCCL all-reduce.

    `message_size` counts elements: a 16-bit message takes as long as an 8-bit one of twice the
    `message_size`.
    """
    name = f"aiconfigurator/{system}/nccl_perf.csv.gz"
    t = read_columns(root / name)
    t = t.where(t.text("op_name") == "all_reduce")
    size = t.numbers("message_size") * np.where(t.text("nccl_dtype") == "half", 2, 1)
    inputs: dict[str, ArrayLike] = {"message_bytes": size, "num_ranks": t.numbers("num_gpus")}
    by = (np.floor(4 * np.log2(size)),)
    seconds = t.numbers("latency") * 1e-3
    return make_points(name, "all_reduce", inputs, seconds, by, "quarter octave of bytes")
