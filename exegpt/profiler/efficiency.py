"""How much of a card's stated numbers its kernels reach: few parameters with a meaning, fitted per card.

`roofline` has the formulas, `benchmarks/calibrate.py` fits the parameters to measured tables.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """Efficiency of matrix products.

    Attributes
    ----------
    fixed_s : float
        Start and drain of one kernel on the device.
    peak_fraction : float
        Share of the peak rate that large products reach (boost clocks may lift it above 1).
    bandwidth_fraction : float
        Share of the memory bandwidth that products of few rows reach.
    tile_tokens : float
        Rows and columns that tiles compute in vain, on average: half a tile or so.
    idle_wave : float
        Part of a wave of 128 x 128 tiles on all multiprocessors that idles at the end.
    depth : float
        Inner length that filling a tile's pipeline is worth.
    overlap : float
        How well computing and reading hide each other: 1 adds them, infinity takes the longer one.
    """

    fixed_s: float
    peak_fraction: float
    bandwidth_fraction: float
    tile_tokens: float
    idle_wave: float
    depth: float
    overlap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Efficiency of kernels that read and write memory and compute little.

    Attributes
    ----------
    fixed_s : float
        Start and drain of one kernel on the device.
    bandwidth_fraction : float
        Share of the memory bandwidth that plain streaming (residual sums, copies) reaches.
    cached_bytes, cached_speed : float
        About so many bytes are still in the last-level cache from the kernel before, and so many times
        as fast to read and write.
    norm, activation, rotation : float
        Time of those kernels relative to streaming as many bytes.
    """

    fixed_s: float
    bandwidth_fraction: float
    cached_bytes: float
    cached_speed: float
    norm: float
    activation: float
    rotation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeAttention:
    """Efficiency of causal attention over prompts.

    Attributes
    ----------
    fixed_s : float
        Start and drain of the kernel.
    peak_fraction : float
        Share of the peak rate that long prompts reach.
    query_tile, key_tile : float
        Tokens that tiles compute in vain per prompt, among its queries and among their keys.
    softmax_width : float
        Exponentials of one pair of tokens, counted as so many more elements of a head.
    serial : float
        Time of the longest chain, a tile of 128 queries over all their keys on one multiprocessor,
        relative to that multiprocessor's peak rate.
    overlap : float
        As for `Matmul`, between the whole work and the longest chain.
    """

    fixed_s: float
    peak_fraction: float
    query_tile: float
    key_tile: float
    softmax_width: float
    serial: float
    overlap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttention:
    """Efficiency of attention of one new token per query.

    Attributes
    ----------
    fixed_s : float
        Start and drain of the kernel.
    bandwidth_fraction : float
        Share of the memory bandwidth that long contexts reach.
    key_tile : float
        Context tokens that a query of no context still costs, per K/V head.
    overlap : float
        How sharply the context takes over from `key_tile`.
    """

    fixed_s: float
    bandwidth_fraction: float
    key_tile: float
    overlap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """All calibrated parameters of a card."""

    matmul: Matmul
    elementwise: Elementwise
    encode_attention: EncodeAttention
    decode_attention: DecodeAttention
