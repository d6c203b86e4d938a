"""The formulas: their limits by hand, and that no cost falls as work grows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.profiler.efficiency import DecodeAttention, Efficiency, Elementwise, EncodeAttention, Matmul
from exegpt.profiler.roofline import (
    all_reduce_s,
    decode_attention_s,
    elementwise_s,
    encode_attention_s,
    host_copy_s,
    matmul_s,
    point_to_point_s,
    rms_length,
)
from exegpt.profiler.sheet import read_sheet, sheet_names

A100 = read_sheet("a100-80")
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def ideal(overlap: float = 1e3):
    """An A100 whose kernels reach everything the sheet states."""
    return replace(
        A100,
        efficiency=Efficiency(
            matmul=Matmul(
                fixed_s=0,
                peak_fraction=1,
                bandwidth_fraction=1,
                tile_tokens=0,
                idle_wave=0,
                depth=0,
                overlap=overlap,
            ),
            elementwise=Elementwise(
                fixed_s=0,
                bandwidth_fraction=1,
                cached_bytes=0,
                cached_speed=1,
                norm=1,
                activation=1,
                rotation=1,
            ),
            encode_attention=EncodeAttention(
                fixed_s=0,
                peak_fraction=1,
                query_tile=0,
                key_tile=0,
                softmax_width=0,
                serial=0,
                overlap=overlap,
            ),
            decode_attention=DecodeAttention(fixed_s=0, bandwidth_fraction=1, key_tile=0, overlap=overlap),
        ),
    )


def test_products_of_an_ideal_card_are_the_roofline() -> None:
    m, n, k = 4096, 8192, 8192
    assert matmul_s(ideal(), m, n, k) == pytest.approx(2 * m * n * k / 312e12)
    moved = 2 * (k + n * k + n)
    assert matmul_s(ideal(), 1, n, k) == pytest.approx(moved / 2.039e12)
    # overlap 1 adds computing and reading
    m = 64
    both = 2 * m * n * k / 312e12 + 2 * (m * k + n * k + m * n) / 2.039e12
    assert matmul_s(ideal(overlap=1), m, n, k) == pytest.approx(both)


def test_float32_has_its_own_peak() -> None:
    assert matmul_s(ideal(), 4096, 4096, 4096, 4) == pytest.approx(2 * 4096**3 / 19.5e12)


def test_attention_of_an_ideal_card() -> None:
    # Causal: half of all pairs, two products of 2 x head_dim operations each; K and V twice 2 bytes.
    expected = 4 * 32 * 128 * 8 * 4096**2 / 2 / 312e12
    moved = 2 * 128 * 8 * 2 * (32 + 8) * 4096 / 2.039e12
    assert encode_attention_s(ideal(), 8, 4096, **HEADS) == pytest.approx(expected + moved)
    context = 10**6
    expected = (4 * 8 * 128 * context + 4 * 32 * 128) / 2.039e12
    assert decode_attention_s(ideal(), 1, context, **HEADS) == pytest.approx(expected)


def test_cached_tokens_are_attended_to() -> None:
    whole = encode_attention_s(ideal(), 1, 2048, **HEADS)
    halves = encode_attention_s(ideal(), 1, 1024, **HEADS) + encode_attention_s(
        ideal(), 1, 1024, cached_tokens=1024, **HEADS
    )
    # The second half reads the first half's K/V once more.
    assert halves - whole == pytest.approx(2 * 128 * 2 * 8 * 1024 / 2.039e12)


def test_rms_length_keeps_the_pairs_of_ragged_prompts() -> None:
    lengths = np.array([1024.0, 2048.0, 4096.0])
    parts = sum(4 * 32 * 128 * n**2 / 2 / 312e12 for n in lengths)
    together = encode_attention_s(
        replace(ideal(), memory_bandwidth_bytes_per_s=1e30), 3, rms_length(lengths), **HEADS
    )
    assert together == pytest.approx(parts)


def test_elementwise_bandwidth_falls_to_that_of_memory() -> None:
    sheet = replace(
        ideal(),
        efficiency=replace(
            ideal().efficiency,
            elementwise=replace(
                ideal().efficiency.elementwise, cached_bytes=4e7, cached_speed=3.0, norm=2.0, fixed_s=1e-6
            ),
        ),
    )
    assert elementwise_s(sheet, 1e5, "stream") == pytest.approx(1e-6 + 1e5 / 3 / 2.039e12, rel=1e-6)
    assert elementwise_s(sheet, 1e10, "stream") == pytest.approx(1e-6 + 1e10 / 2.039e12, rel=1e-6)
    assert elementwise_s(sheet, 1e10, "norm", 3) == pytest.approx(3e-6 + 2e10 / 2.039e12, rel=1e-6)


def test_ring_all_reduce_carries_twice_the_message_less_its_own_part() -> None:
    link = replace(
        A100.intra_node,
        latency_s=0.0,
        step_s=0.0,
        ramp_s=0.0,
        all_reduce=1.0,
        bandwidth_fraction=1.0,
        bandwidth_bytes_per_s=1e11,
    )
    assert all_reduce_s(link, 1e9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / 1e11)
    assert all_reduce_s(link, 1e9, 1) == 0
    assert point_to_point_s(link, 1e9) == pytest.approx(1e-2)
    assert host_copy_s(replace(A100, host=link), 2e9) == pytest.approx(2e-2)


@pytest.mark.parametrize("name", sheet_names())
def test_no_time_beats_the_data_sheet_by_more_than_boost_clocks(name: str) -> None:
    sheet = read_sheet(name)
    assert matmul_s(sheet, 16384, 16384, 16384) > 2 * 16384**3 / sheet.peak_flops_per_s / 1.2
    assert matmul_s(sheet, 1, 16384, 16384) > 2 * 16384**2 / sheet.memory_bandwidth_bytes_per_s
    context = 4e6
    fastest = 4 * 8 * 128 * context / sheet.memory_bandwidth_bytes_per_s
    assert decode_attention_s(sheet, 64, context, **HEADS) > fastest


PARTS = st.floats(0, 1e3)
SHARES = st.floats(0.05, 1.2)
OVERLAPS = st.floats(1, 20)
SIZES = st.floats(1, 1e6)


@st.composite
def sheets(draw):
    """Any parameters that `read_sheet` lets pass."""
    seconds = st.floats(0, 1e-3)
    efficiency = Efficiency(
        matmul=Matmul(
            fixed_s=draw(seconds),
            peak_fraction=draw(SHARES),
            bandwidth_fraction=draw(SHARES),
            tile_tokens=draw(PARTS),
            idle_wave=draw(PARTS),
            depth=draw(PARTS),
            overlap=draw(OVERLAPS),
        ),
        elementwise=Elementwise(
            fixed_s=draw(seconds),
            bandwidth_fraction=draw(SHARES),
            cached_bytes=draw(st.floats(0, 1e9)),
            cached_speed=draw(st.floats(1, 20)),
            norm=draw(SHARES),
            activation=draw(SHARES),
            rotation=draw(SHARES),
        ),
        encode_attention=EncodeAttention(
            fixed_s=draw(seconds),
            peak_fraction=draw(SHARES),
            query_tile=draw(PARTS),
            key_tile=draw(PARTS),
            softmax_width=draw(PARTS),
            serial=draw(PARTS),
            overlap=draw(OVERLAPS),
        ),
        decode_attention=DecodeAttention(
            fixed_s=draw(seconds),
            bandwidth_fraction=draw(SHARES),
            key_tile=draw(PARTS),
            overlap=draw(OVERLAPS),
        ),
    )
    return replace(A100, efficiency=efficiency)


@settings(max_examples=150, deadline=None)
@given(sheets(), SIZES, SIZES, st.floats(1, 100), st.floats(1, 100), st.integers(1, 64))
def test_no_cost_falls_as_work_grows(sheet, first, second, more, further, columns) -> None:
    """Isotone in each variable, which the solver's bounds rest on; 1e-12 is for rounding."""

    def rises(low, high) -> bool:
        return bool(np.all(high >= low * (1 - 1e-12)))

    n = 128.0 * columns
    assert rises(matmul_s(sheet, first, n, n), matmul_s(sheet, first * more, n, n))
    for kind in ("stream", "norm"):
        assert rises(elementwise_s(sheet, first * 1e4, kind), elementwise_s(sheet, first * 1e4 * more, kind))
    for function in (encode_attention_s, decode_attention_s):
        here = function(sheet, first, second, **HEADS)
        assert rises(here, function(sheet, first * more, second, **HEADS))
        assert rises(here, function(sheet, first, second * further, **HEADS))
    for ranks in (2, 8):
        assert rises(
            all_reduce_s(sheet.intra_node, first, ranks), all_reduce_s(sheet.intra_node, first * more, ranks)
        )


@pytest.mark.slow
def test_shipped_efficiencies_meet_their_goal_on_held_out_shapes(repository: Path, data_dir: Path) -> None:
    """Median error at most 15 % above 50 us on each table of products and attention that fitted a card."""
    command = [sys.executable, "benchmarks/calibrate.py", "--data", str(data_dir)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:] if line]
    judged = [row for row in rows if "node" not in row[1] and row[5] and "not fitted" not in row[8]]
    assert {row[0] for row in judged} == {
        "a100-80",
        "a40-48",
        "a6000",
        "h200",
        "rtx3090",
        "rtx4090",
        "rtxpro6000",
    }
    for row in judged:
        assert float(row[5].rstrip("%")) <= 15, row
