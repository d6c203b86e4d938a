"""Times of a stage's parts that are not attention, put together from the roofline of their kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.profiler.roofline import all_reduce_s, elementwise_s, matmul_s
from exegpt.profiler.sheet import GpuSheet
from exegpt.specs import ModelSpec

# Bytes read and written per logit while sampling: 16-bit logits in, 32-bit out and in again.
SAMPLING_BYTES = 10
# What ranks of a group exchange per query to agree on a token: value and index.
AGREEMENT_BYTES = 16

# A kernel that moves memory, and the elements it reads and writes per token.
_Kernel = tuple[Literal["stream", "norm", "activation", "rotation"], float]


def product_shapes(model: ModelSpec, tp_size: int) -> dict[str, tuple[float, float]]:
    """Columns and inner length of the matrix products of a layer on one rank, as new tokens pass it.

    Of a model with experts, `up` and `down` are those of one expert.
    """
    queries, keys = model.query_size / tp_size, _key_width(model, tp_size)
    cross = {
        "cross_query": (queries, model.hidden_size),
        "cross_output": (model.hidden_size, queries),
    }
    router = {"router": (model.num_experts, model.hidden_size)}
    gates = 2 if model.is_gated else 1
    return {
        "query_key_value": (queries + 2 * keys, model.hidden_size),
        "output": (model.hidden_size, queries),
        **(cross if model.is_encoder_decoder else {}),
        **(router if model.num_experts else {}),
        "up": (gates * model.mlp_size / tp_size, model.hidden_size),
        "down": (model.hidden_size, model.mlp_size / tp_size),
    }


def encode_product_shapes(model: ModelSpec, tp_size: int) -> dict[str, tuple[float, float]]:
    """Products of an encoder layer, and the one that gives a decoder layer its cross K/V."""
    shapes = product_shapes(model, tp_size)
    own = {name: shapes[name] for name in ("query_key_value", "output", "up", "down")}
    return own | {"cross_key_value": (2 * _key_width(model, tp_size), model.hidden_size)}


def chosen_experts(model: ModelSpec, tokens: FloatArray) -> FloatArray:
    """Expected number of experts that at least one of `tokens` tokens passes.

    Assumes that every token chooses k of E experts, all choices equally likely and independent:
    E (1 - (1 - k / E) ** tokens).
    """
    missed = 1 - model.num_experts_per_token / model.num_experts
    return np.asarray(model.num_experts * (1 - missed**tokens))


def linear_s(
    model: ModelSpec, sheet: GpuSheet, tp_size: int, tokens: FloatArray, dtype_bytes: int
) -> FloatArray:
    """A layer without attention and all-reduce: products, and kernels that only move memory.

    Never less than what the host takes to issue the kernels one after another.
    """
    kernels = _moving_kernels(model, tp_size)
    if model.is_encoder_decoder:
        # Cross attention has a norm and a sum of its own.
        kernels = [*kernels, ("norm", 2.0 * model.hidden_size), ("stream", 3.0 * model.hidden_size)]
    return _layer_s(model, sheet, product_shapes(model, tp_size), kernels, tokens, dtype_bytes)


def encode_linear_s(
    model: ModelSpec, sheet: GpuSheet, tp_size: int, tokens: FloatArray, dtype_bytes: int
) -> FloatArray:
    """`linear_s` of an encoder layer, and of projecting and storing the cross K/V of a decoder layer."""
    kernels = _moving_kernels(model, tp_size)
    return _layer_s(model, sheet, encode_product_shapes(model, tp_size), kernels, tokens, dtype_bytes)


def moving_s(
    model: ModelSpec, sheet: GpuSheet, tp_size: int, tokens: FloatArray, dtype_bytes: int
) -> FloatArray:
    """The part of `linear_s` that matrix products leave: norms, rotation, activation, sums, storing K/V.

    Defined for models without cross attention, as the tables that need it are.
    """
    return _moving_s(sheet, _moving_kernels(model, tp_size), tokens, dtype_bytes)


def head_s(
    model: ModelSpec, sheet: GpuSheet, tp_size: int, queries: FloatArray, dtype_bytes: int
) -> FloatArray:
    """Final norm, output matrix (split by vocabulary) and sampling."""
    vocabulary = model.vocab_size / tp_size
    norm = elementwise_s(sheet, 2 * model.hidden_size * dtype_bytes * queries, "norm")
    product = matmul_s(sheet, queries, vocabulary, model.hidden_size, dtype_bytes)
    sampling = elementwise_s(sheet, SAMPLING_BYTES * vocabulary * queries, "stream")
    agreeing = all_reduce_s(sheet.intra_node, AGREEMENT_BYTES * queries, tp_size)
    return np.asarray(norm + product + sampling + agreeing)


def embed_s(model: ModelSpec, sheet: GpuSheet, tokens: FloatArray, dtype_bytes: int) -> FloatArray:
    """Rows of the token table, and of the position table where the family has one, added."""
    rows = 5 if model.has_learned_positions else 2
    kernels = 2 if model.has_learned_positions else 1
    return elementwise_s(sheet, rows * model.hidden_size * dtype_bytes * tokens, "stream", kernels)


def _layer_s(
    model: ModelSpec,
    sheet: GpuSheet,
    shapes: Mapping[str, tuple[float, float]],
    kernels: Sequence[_Kernel],
    tokens: FloatArray,
    dtype_bytes: int,
) -> FloatArray:
    time = _moving_s(sheet, kernels, tokens, dtype_bytes)
    for name, (columns, inner) in shapes.items():
        rows, groups = tokens, np.ones_like(tokens)
        if model.num_experts and name in ("up", "down"):
            rows, groups = model.num_experts_per_token * tokens, chosen_experts(model, tokens)
        time = time + matmul_s(sheet, rows, columns, inner, dtype_bytes, groups=groups)
    return np.asarray(np.maximum(time, (len(shapes) + len(kernels)) * sheet.kernel_launch_s))


def _moving_s(
    sheet: GpuSheet, kernels: Sequence[_Kernel], tokens: FloatArray, dtype_bytes: int
) -> FloatArray:
    per_element = tokens * dtype_bytes
    times = [elementwise_s(sheet, elements * per_element, kind) for kind, elements in kernels]
    return np.asarray(np.sum(times, axis=0))


def _moving_kernels(model: ModelSpec, tp_size: int) -> list[_Kernel]:
    """Kernels of a layer with one attention; T5's encoder layer stores the cross K/V in place of its own."""
    hidden, keys = model.hidden_size, _key_width(model, tp_size)
    turned = model.query_size / tp_size + keys
    kernels: list[_Kernel] = [("norm", 2.0 * hidden), ("norm", 2.0 * hidden)]
    if model.qk_norm:
        kernels.append(("norm", 2 * turned))
    passed = max(model.num_experts_per_token, 1)
    kernels.append(("activation", (3 if model.is_gated else 2) * passed * model.mlp_size / tp_size))
    # Two residual sums, and storing K and V.
    kernels += [("stream", 3.0 * hidden), ("stream", 3.0 * hidden), ("stream", 4 * keys)]
    if model.has_rotary_positions:
        kernels.append(("rotation", 2 * turned))
    if model.num_experts:
        # Choosing experts, a copy of the row for each, and the weighted sum of what they give.
        kernels += [
            ("stream", 2.0 * model.num_experts),
            ("stream", (1.0 + passed) * hidden),
            ("stream", (1.0 + passed) * hidden),
        ]
    return kernels


def _key_width(model: ModelSpec, tp_size: int) -> float:
    """Width of the keys (or values) on one rank; a head that is not split is held whole."""
    return max(model.num_key_value_heads / tp_size, 1) * model.head_dim
