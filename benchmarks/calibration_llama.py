"""LLMServingSim's tables of Llama-3.1-8B as calibration points, and the list of all tables by card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from calibration_tables import (
    Points,
    aic_all_reduce,
    aic_attention,
    aic_gemm,
    attention_by_phase,
    elementwise,
    make_points,
    vidur_attention,
    vidur_legacy_link,
    vidur_link,
    vidur_mlp,
)
from numpy.typing import NDArray

from exegpt.profiler.grid import FloatArray
from exegpt.profiler.imports.columns import Columns, read_columns

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256

# Bytes per element and kernels of the older tables' eager modules of transformers: RMS norm in float32 (cast,
# square, mean, root, scale, cast, weight), SiLU apart from the product, rotation as products with cosine and
# sine of a concatenated half. Seven to eleven kernels explain the times of a single token (16 and 24 us).
EAGER_NORM, EAGER_ACTIVATION, EAGER_ROTATION = (34, 7), (10, 2), (20, 11)

# Whole runs of tokens are held out where a table knows one shape only.
BLOCK = 128


def heads(tp: int) -> dict[str, float]:
    """Heads of one rank."""
    return {"num_heads": HEADS / tp, "num_kv_heads": KV_HEADS / tp, "head_dim": HEAD_DIM}


def products(
    name: str,
    t: Columns,
    columns: tuple[str, str, str],
    unit_s: float,
    weights: Mapping[str, tuple[float, float]],
) -> Points:
    """Matrix products of a table of layers; `columns` name its layer, tokens and time."""
    t = t.where(np.isin(t.text(columns[0]), list(weights)))
    layer = t.text(columns[0])
    n, k = (np.array([weights[op][i] for op in layer]) for i in range(2))
    inputs = {"rows": t.numbers(columns[1]), "columns": n, "inner": k}
    return make_points(name, "matmul", inputs, t.numbers(columns[2]) * unit_s, (n, k), "weight (n, k)")


def newer_tables(root: Path, card: str, *degrees: int) -> Iterator[Points]:
    """The newer profiler: vLLM's kernels."""
    for tp in degrees:
        folder = f"llmservingsim/perf/{card}/Llama-3.1-8B/tp{tp}"
        name = f"{folder}/dense.csv.gz"
        t = read_columns(root / name)
        weights = {
            "qkv_proj": ((HEADS + 2 * KV_HEADS) * HEAD_DIM / tp, HIDDEN),
            "o_proj": (HIDDEN, HEADS * HEAD_DIM / tp),
            "gate_up_proj": (2 * INNER / tp, HIDDEN),
            "down_proj": (HIDDEN, INNER / tp),
        }
        yield products(name, t, ("layer", "tokens", "time_us"), 1e-6, weights)
        moved = {
            ("layernorm", "norm"): 8 * HIDDEN,  # vLLM adds the residual in it
            ("act_fn", "activation"): 6 * INNER / tp,
            ("rotary_emb", "rotation"): 4 * (HEADS + KV_HEADS) / tp * HEAD_DIM,
        }
        layer, tokens, seconds = t.text("layer"), t.numbers("tokens"), t.numbers("time_us") * 1e-6
        parts = {
            kind: (tokens[layer == op] * width, seconds[layer == op], tokens[layer == op] // BLOCK)
            for (op, kind), width in moved.items()
        }
        yield elementwise(name, parts, f"kernel and block of {BLOCK} tokens")
        yield from newer_attention(root, f"{folder}/attention.csv.gz", tp)


def newer_attention(root: Path, name: str, tp: int) -> Iterator[Points]:
    """Prefill of one prompt with cached tokens, and decoding; mixed batches are left out."""
    t = read_columns(root / name)
    chunk, cached, decodes, context = (
        t.numbers(c) for c in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    )
    seconds = t.numbers("time_us") * 1e-6
    yield make_points(
        f"{name} (prefill)",
        "encode_attention",
        {**heads(tp), "queries": 1.0, "length_tokens": chunk, "cached_tokens": cached},
        seconds,
        (cached,),
        "cached tokens",
        rows=(decodes == 0) & (chunk > 0),
    )
    yield make_points(
        f"{name} (decode)",
        "decode_attention",
        {**heads(tp), "queries": decodes, "context_tokens": decodes * context},
        seconds,
        (decodes,),
        "batch size",
        rows=(chunk == 0) & (decodes > 0),
    )


def older_tables(root: Path, card: str, *degrees: int, with_attention: bool) -> Iterator[Points]:
    """The older profiler: transformers' modules, and FlashAttention."""
    for tp in degrees:
        folder = f"llmservingsim/v0/{card}/Llama-3.1-8B/tp{tp}"
        name = f"{folder}/layers.csv.gz"
        t = read_columns(root / name)
        sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        qkv = {f"{part}_proj": (n * HEAD_DIM / tp, HIDDEN) for part, n in sizes.items()}
        weights = {
            **qkv,
            "o_proj": (HIDDEN, HEADS * HEAD_DIM / tp),
            "gate_proj": (INNER / tp, HIDDEN),
            "up_proj": (INNER / tp, HIDDEN),
            "down_proj": (HIDDEN, INNER / tp),
            "lm_head": (VOCAB / tp, HIDDEN),
        }
        yield products(name, t, ("layer_name", "input", "latency(ns)"), 1e-9, weights)
        layer, tokens, seconds = t.text("layer_name"), t.numbers("input"), t.numbers("latency(ns)") * 1e-9
        yield eager_elementwise(name, layer, tokens, seconds, tp)
        rows = layer == "attn"
        yield make_points(
            f"{name} (attn)",
            "encode_attention",
            {**heads(tp), "queries": 1.0, "length_tokens": tokens},
            seconds,
            (tokens // BLOCK,),
            f"block of {BLOCK} lengths",
            rows=rows,
        )
        if with_attention:
            name = f"{folder}/attention.csv.gz"
            t = read_columns(root / name)
            # kv_cache_size counts the chunk itself here: it is never less than the chunk.
            counted, chunk = t.numbers("kv_cache_size"), t.numbers("prefill_chunk_size")
            cached = np.where(t.text("is_prefill") == "True", np.maximum(counted - chunk, 0), counted)
            doubt = "it reads up to 98 times as fast as the card's memory can: its requests share one cache"
            yield from attention_by_phase(t, name, cached=cached, decode_doubt=doubt)


def eager_elementwise(
    name: str, layer: NDArray[np.str_], tokens: FloatArray, seconds: FloatArray, tp: int
) -> Points:
    """Norm, activation and rotation as chains of plain streaming kernels."""
    widths = {
        "input_layernorm": (HIDDEN, EAGER_NORM),
        "act_fn": (INNER / tp, EAGER_ACTIVATION),
        "rope": ((HEADS + KV_HEADS) / tp * HEAD_DIM, EAGER_ROTATION),
    }
    rows = np.isin(layer, list(widths))
    layer, tokens = layer[rows], tokens[rows]
    inputs = {
        "moved_bytes": tokens * np.array([widths[op][0] * widths[op][1][0] for op in layer]),
        "num_kernels": np.array([float(widths[op][1][1]) for op in layer]),
        "kind": "stream",
    }
    by = (layer, tokens // BLOCK)
    return make_points(name, "elementwise", inputs, seconds[rows], by, f"kernel and block of {BLOCK} tokens")


CARDS: Mapping[str, Callable[[Path], list[Points]]] = {
    "a100-80": lambda root: [
        aic_gemm(root, "a100_sxm"),
        *aic_attention(root, "a100_sxm"),
        *vidur_mlp(
            root,
            *(
                f"vidur/a100/{model}/mlp.csv.gz"
                for model in ("Llama-2-7b-hf", "Llama-2-70b-hf", "internlm-20b", "Meta-Llama-3-8B")
            ),
        ),
        *vidur_attention(root, "vidur/a100/Llama-2-70b-hf/attention_tp2_legacy.csv.gz"),
    ],
    "a40-48": lambda root: list(
        vidur_mlp(
            root,
            *(f"vidur/a40/{m}/mlp.csv.gz" for m in ("Llama-2-7b-hf", "phi-2", "CodeLlama-34b-Instruct-hf")),
        )
    ),
    "a6000": lambda root: list(older_tables(root, "A6000", 1, 2, with_attention=True)),
    "h200": lambda root: [aic_gemm(root, "h200_sxm"), *aic_attention(root, "h200_sxm")],
    "rtx3090": lambda root: list(older_tables(root, "RTX3090", 1, with_attention=False)),
    "rtx4090": lambda root: list(newer_tables(root, "RTX4090", 1)),
    "rtxpro6000": lambda root: list(newer_tables(root, "RTXPRO6000", 1, 2)),
}

NETWORK = "the network between its nodes is not known"
OTHER_LINK = "over {}, not the sheet's PCIe 4.0 x16"

# Link of a card -> its tables.
LINKS: Mapping[tuple[str, str], Callable[[Path], list[Points]]] = {
    ("a100-80", "intra_node"): lambda root: [
        aic_all_reduce(root, "a100_sxm"),
        vidur_link(root, "vidur/network/a100_dgx/send_recv.csv.gz", "send_recv", ranks=2, per_node=2),
        *(
            vidur_link(
                root,
                "vidur/network/a100_dgx/all_reduce.csv.gz",
                "all_reduce",
                ranks=n,
                per_node=n,
                doubt="an older NCCL than the first table's",
            )
            for n in (2, 4, 8)
        ),
    ],
    ("a100-80", "inter_node"): lambda root: [
        vidur_link(
            root,
            "vidur/network/a100_dgx/send_recv.csv.gz",
            "send_recv",
            ranks=2,
            per_node=1,
            doubt=NETWORK,
        )
    ],
    ("a40-48", "intra_node"): lambda root: [
        vidur_legacy_link(
            root,
            "vidur/network/a40_legacy/p2p_intra_node.csv.gz",
            OTHER_LINK.format("an NVLink pair (50 GB/s)"),
        ),
        vidur_link(
            root,
            "vidur/network/a40_pairwise_nvlink/send_recv.csv.gz",
            "send_recv",
            ranks=2,
            per_node=2,
            doubt=OTHER_LINK.format("a slower path (4 GB/s)"),
        ),
    ],
    ("a40-48", "inter_node"): lambda root: [
        vidur_legacy_link(root, "vidur/network/a40_legacy/p2p_inter_node.csv.gz", NETWORK),
    ],
    ("h200", "intra_node"): lambda root: [aic_all_reduce(root, "h200_sxm")],
}
