"""Time of one operator on one card: a roofline with the waste that tiles, waves and starts cause.

The same formulas hold for every card; a `GpuSheet` gives the numbers. All functions broadcast over
arrays, return seconds, and never fall as rows, tokens, queries or contexts grow: each is a sum or a
p-norm (`overlap` >= 1) of terms that grow with them. The solver's bounds rest on that. Waves and
tiles are therefore counted by their mean waste, not rounded up, which also keeps interpolation
between grid points close. Real kernels step around these curves.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from exegpt.profiler.grid import FloatArray
from exegpt.profiler.sheet import GpuSheet, Link

# Side of the output tile that GPU matrix kernels compute at once; attention's tile of queries.
TILE = 128

# How suddenly a cache is too small: replacement lets part of a larger array survive.
CACHE_SHARPNESS = 4


def matmul_s(
    sheet: GpuSheet,
    rows: ArrayLike,
    columns: ArrayLike,
    inner: ArrayLike,
    dtype_bytes: int = 2,
    *,
    groups: ArrayLike = 1,
) -> FloatArray:
    """Time of (rows, inner) x (inner, columns).

    With `groups` the rows are spread over so many matrices of that shape, all in one kernel: the experts
    that tokens chose. A mean number of them may be a fraction.

    Notes
    -----
    Computing: 2 (inner + depth) ((rows + groups tile)(columns + tile) + idle area) / reachable peak.
    Reading: all inputs and the output once, at the reachable bandwidth.
    """
    m, n, k, matrices = _floats(rows, columns, inner, groups)
    parameters = sheet.efficiency.matmul
    idle_area = parameters.idle_wave * sheet.num_multiprocessors * TILE**2
    area = (m + matrices * parameters.tile_tokens) * (n + parameters.tile_tokens) + idle_area
    computing = 2 * (k + parameters.depth) * area / (_peak(sheet, dtype_bytes) * parameters.peak_fraction)
    read = dtype_bytes * (m * k + matrices * k * n + m * n)
    reading = read / (sheet.memory_bandwidth_bytes_per_s * parameters.bandwidth_fraction)
    return parameters.fixed_s + _overlapped(computing, reading, parameters.overlap)


def elementwise_s(
    sheet: GpuSheet,
    moved_bytes: ArrayLike,
    kind: Literal["stream", "norm", "activation", "rotation"],
    num_kernels: ArrayLike = 1,
) -> FloatArray:
    """Time of kernels that read and write `moved_bytes` in all and compute little.

    Notes
    -----
    The bandwidth falls from `cached_speed` times that of memory to that of memory itself around
    `cached_bytes`.
    """
    moved, kernels = _floats(moved_bytes, num_kernels)
    parameters = sheet.efficiency.elementwise
    slower = 1.0 if kind == "stream" else getattr(parameters, kind)
    bandwidth = sheet.memory_bandwidth_bytes_per_s * parameters.bandwidth_fraction
    # Powers of ratios, not of sizes, so that none leaves the range of floats.
    larger = np.maximum(np.maximum(moved, parameters.cached_bytes), 1.0)
    held, beyond = ((size / larger) ** CACHE_SHARPNESS for size in (parameters.cached_bytes, moved))
    hits = np.divide(held, held + beyond, out=np.zeros_like(larger), where=held + beyond > 0)
    streamed = moved / (bandwidth * (1 + (parameters.cached_speed - 1) * hits))
    return np.asarray(kernels * parameters.fixed_s + slower * streamed)


def encode_attention_s(
    sheet: GpuSheet,
    queries: ArrayLike,
    length_tokens: ArrayLike,
    *,
    num_heads: ArrayLike,
    num_kv_heads: ArrayLike,
    head_dim: ArrayLike,
    cached_tokens: ArrayLike = 0,
    dtype_bytes: int = 2,
    causal: bool = True,
) -> FloatArray:
    """Time of attention over prompts of one layer, causal or (an encoder's) of all tokens to all.

    Parameters
    ----------
    queries, length_tokens : arrays
        Prompts and their length; for prompts of several lengths the root-mean-square length, which
        keeps the pairs of tokens (`rms_length`).
    num_heads, num_kv_heads, head_dim : arrays
        Of one rank.
    cached_tokens : array
        Tokens of each prompt that were encoded before and are attended to as well.

    Notes
    -----
    Work: 4 (head_dim + softmax) heads per pair, pairs = (L + query tile) ((L + key tile) / 2 + cached), or
    without the halving where attention is not causal, plus reading Q, K, V and writing the output. Beside
    it the longest chain, one tile of queries over all its keys, which bounds short batches.
    """
    q, length, cached, heads, kv_heads, dim = _floats(
        queries, length_tokens, cached_tokens, num_heads, num_kv_heads, head_dim
    )
    parameters = sheet.efficiency.encode_attention
    peak = _peak(sheet, dtype_bytes)
    keys = (length + parameters.key_tile) * (0.5 if causal else 1.0) + cached
    pairs = q * (length + parameters.query_tile) * keys
    computing = 4 * heads * (dim + parameters.softmax_width) * pairs / (peak * parameters.peak_fraction)
    moved = dtype_bytes * dim * q * (2 * (heads + kv_heads) * length + 2 * kv_heads * cached)
    moving = moved / (sheet.memory_bandwidth_bytes_per_s * sheet.efficiency.elementwise.bandwidth_fraction)
    chain = parameters.serial * 4 * TILE * dim * (length + cached) * sheet.num_multiprocessors / peak
    return parameters.fixed_s + _overlapped(computing + moving, chain, parameters.overlap)


def decode_attention_s(
    sheet: GpuSheet,
    queries: ArrayLike,
    context_tokens: ArrayLike,
    *,
    num_heads: ArrayLike,
    num_kv_heads: ArrayLike,
    head_dim: ArrayLike,
    dtype_bytes: int = 2,
) -> FloatArray:
    """Time of attention of one new token per query over contexts that sum to `context_tokens`, one layer.

    Notes
    -----
    Reading K and V of the contexts, or of `key_tile` tokens per query where contexts are shorter, at
    the reachable bandwidth, and the queries in and out.
    """
    q, context, heads, kv_heads, dim = _floats(queries, context_tokens, num_heads, num_kv_heads, head_dim)
    parameters = sheet.efficiency.decode_attention
    tokens = _overlapped(context, q * parameters.key_tile, parameters.overlap)
    moved = dtype_bytes * dim * (2 * kv_heads * tokens + 2 * heads * q)
    return np.asarray(
        parameters.fixed_s + moved / (sheet.memory_bandwidth_bytes_per_s * parameters.bandwidth_fraction)
    )


def all_reduce_s(link: Link, message_bytes: ArrayLike, num_ranks: int) -> FloatArray:
    """Time to sum `message_bytes` over `num_ranks` ranks of a link (a ring: 2 (n - 1) / n per rank)."""
    size = _floats(message_bytes)[0]
    if num_ranks < 2:
        return np.zeros_like(size)
    carried = 2 * (num_ranks - 1) / num_ranks * size
    ramp = link.ramp_s * carried / (carried + link.ramp_bytes) if link.ramp_bytes else link.ramp_s
    started = link.step_s * (num_ranks - 2) + ramp
    return np.asarray(started + point_to_point_s(link, link.all_reduce * carried))


def point_to_point_s(link: Link, message_bytes: ArrayLike) -> FloatArray:
    """Time of a message over a link."""
    size = _floats(message_bytes)[0]
    return np.asarray(link.latency_s + size / (link.bandwidth_bytes_per_s * link.bandwidth_fraction))


def host_copy_s(sheet: GpuSheet, message_bytes: ArrayLike) -> FloatArray:
    """Time to copy between a GPU and host memory, one direction."""
    return point_to_point_s(sheet.host, message_bytes)


def rms_length(lengths: ArrayLike) -> float:
    """Root-mean-square of prompt lengths: equal prompts of it have as many pairs of tokens."""
    return float(np.sqrt(np.mean(np.square(_floats(lengths)[0]))))


def _peak(sheet: GpuSheet, dtype_bytes: int) -> float:
    return sheet.peak_flops_per_s if dtype_bytes <= 2 else sheet.peak_float32_flops_per_s


def _floats(*values: ArrayLike) -> tuple[FloatArray, ...]:
    return tuple(np.asarray(value, dtype=np.float64) for value in values)


def _overlapped(first: FloatArray, second: FloatArray, overlap: float) -> FloatArray:
    """The p-norm of two times; scaled by the longer one so that powers stay in range."""
    longer = np.maximum(first, second)
    shorter = np.minimum(first, second)
    ratio = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    return np.asarray(longer * (1 + ratio**overlap) ** (1 / overlap))
