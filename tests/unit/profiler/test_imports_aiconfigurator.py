"""AIConfigurator's tables: units, elements against bytes, interpolated weights, what is not covered."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from import_tables import llama, write_table

from exegpt.errors import ProfileError
from exegpt.profiler.formulas import moving_s, product_shapes
from exegpt.profiler.imports import aiconfigurator_profile
from exegpt.profiler.imports.columns import read_columns
from exegpt.profiler.sheet import read_sheet
from exegpt.specs import Dtype

A100 = read_sheet("a100-80")
SIZES = (512, 1024, 2048, 4096, 8192)


def gemm_rows(dtype="bfloat16", sizes=SIZES):
    """1 us and 1 ps for each of m x n x k."""
    return [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": 1e-3 + 1e-9 * m * n * k}
        for m, n, k in product((1, 16, 256), sizes, sizes)
    ]


def attention_rows(kind, heads=((8, 4),), window=0):
    lengths = (128, 512, 1024, 2048)
    return [
        {
            "batch_size": b,
            "isl": n if kind == "context" else 1,
            "step": 0 if kind == "context" else n - 1,
            "num_heads": h,
            "num_key_value_heads": kv,
            "head_dim": 128,
            "attn_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "window_size": w,
            "latency": (1 + w) * (0.01 + 1e-6 * b * n),
        }
        for (h, kv), b, n in product(heads, (1, 4, 16), lengths)
        for w in (window, 128)
        if b * n <= 8192
    ]


def nccl_rows():
    return [
        {
            "op_name": op,
            "nccl_dtype": dtype,
            "num_gpus": ranks,
            "message_size": size,
            "latency": (0.02 + size * width * 1e-8) * (1 if op == "all_reduce" else 3),
        }
        for op, (dtype, width), ranks, size in product(
            ("all_reduce", "all_gather"), (("half", 2), ("int8", 1)), (2, 4), (1024, 2**20, 2**24)
        )
    ]


def write_all(directory: Path, *, heads=((8, 4), (4, 2))) -> Path:
    write_table(directory / "gemm_perf.csv.gz", [*gemm_rows(), *gemm_rows("fp8_block")])
    write_table(directory / "context_attention_perf.csv", attention_rows("context", heads))
    write_table(directory / "generation_attention_perf.csv", attention_rows("generation", heads))
    write_table(directory / "nccl_perf.csv", nccl_rows())
    return directory


def imported(directory: Path, model=None, sheet=A100, **changes):
    wanted = {"dtype": Dtype.bfloat16, "tp_sizes": (1, 2), "num_ranks": 2, **changes}
    return aiconfigurator_profile(directory, model or llama(), sheet, **wanted)


def test_products_in_seconds_with_elementwise_formulas(tmp_path: Path) -> None:
    model = llama()
    costs = imported(write_all(tmp_path)).layers[1]
    shapes = product_shapes(model, 1).values()
    for m in (1, 16, 256):
        expected = sum(1e-6 + 1e-12 * m * n * k for n, k in shapes)
        expected += moving_s(model, A100, 1, np.array([float(m)]), 2)[0]
        assert costs.linear.at(m) == pytest.approx(expected)
    assert costs.linear.axes[0][:3].tolist() == [1, 16, 256]


def test_weights_between_measured_sizes_are_interpolated_and_said(tmp_path: Path) -> None:
    """A bilinear time is met exactly, whatever the sizes."""
    model = llama(intermediate_size=3000)
    table = imported(write_all(tmp_path), model, tp_sizes=(1,))
    expected = sum(1e-6 + 1e-12 * 256 * n * k for n, k in product_shapes(model, 1).values())
    expected += moving_s(model, A100, 1, np.array([256.0]), 2)[0]
    assert table.layers[1].linear.at(256) == pytest.approx(expected)
    assert any("products interpolated (gemm_perf.csv.gz), other kernels formula" in n for n in table.notes)
    exact = imported(tmp_path, llama(), tp_sizes=(1,))
    assert any("products measured (gemm_perf.csv.gz)" in n for n in exact.notes)


def test_attention_without_window_and_of_the_shard_heads(tmp_path: Path) -> None:
    table = imported(write_all(tmp_path))
    for tp_size in (1, 2):
        costs = table.layers[tp_size]
        assert costs.encode_attention.at(4, 512) == pytest.approx(1e-5 + 1e-9 * 4 * 512)
        # The window of the model is 1024 tokens.
        assert costs.encode_attention.limit(1) == 1024
        assert costs.decode_attention.at(16, 8192) == pytest.approx(1e-5 + 1e-9 * 8192)
        assert costs.decode_attention.at(4, 2048) == pytest.approx(1e-5 + 1e-9 * 2048)


def test_message_sizes_are_elements(tmp_path: Path) -> None:
    table = imported(write_all(tmp_path))
    assert table.layers[2].all_reduce is not None
    # 2^20 bytes are 2^19 elements of 16 bits, which took as long as 2^20 of 8 bits.
    assert table.layers[2].all_reduce.at(2**21) == pytest.approx(2e-5 + 2**21 * 1e-11)
    assert 2**25 in table.layers[2].all_reduce.axes[0]
    assert table.provenance["tp2.all_reduce"].endswith("scaled by formula beyond 33,554,432 bytes")
    assert table.layers[1].all_reduce is None


def test_heads_that_were_not_measured_come_from_the_formula(tmp_path: Path) -> None:
    notes = "\n".join(imported(write_all(tmp_path, heads=((8, 4),))).notes)
    reason = "has no num_heads=4, num_key_value_heads=2, head_dim=128; the nearest is num_heads=8"
    assert f"formula, because context_attention_perf.csv {reason}" in notes
    assert "measured (generation_attention_perf.csv): tp1.decode_attention" in notes


def test_weights_outside_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ProfileError, match=r"the product up of .* n=20000, k=1024, .*nearest is n=8192, k=1024"
    ):
        imported(write_all(tmp_path), llama(intermediate_size=10000), tp_sizes=(1,))


def test_parquet_in_nested_folders(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "gemm" / "vllm" / "1.0"
    folder.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(gemm_rows()), folder / "gemm_perf.parquet")
    from_csv = imported(write_all(tmp_path / "other"))
    assert np.array_equal(
        imported(tmp_path / "gemm").layers[2].linear.values_s, from_csv.layers[2].linear.values_s
    )
    with pytest.raises(ProfileError, match=r"several tables gemm_perf .*name the folder of one"):
        imported(tmp_path)


def test_what_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no gemm_perf\.parquet"):
        imported(tmp_path)
    with pytest.raises(ProfileError, match="no such directory"):
        imported(tmp_path / "nowhere")
    write_all(tmp_path)
    with pytest.raises(
        ProfileError, match="lack norms, activations and overheads; give the card's GPU sheet"
    ):
        imported(tmp_path, sheet=None)
    with pytest.raises(ProfileError, match="dtype wanted is float32"):
        imported(tmp_path, dtype=Dtype.float32)
    with pytest.raises(ProfileError, match="tp_size=3 does not divide small-llama"):
        imported(tmp_path, tp_sizes=(3,))
    write_table(tmp_path / "gemm_perf.csv.gz", gemm_rows("fp8"))
    with pytest.raises(ProfileError, match=r"gemm_perf\.csv\.gz: holds no 16-bit rows"):
        imported(tmp_path)


@pytest.mark.parametrize("system", ["a100_sxm", "h200_sxm"])
def test_real_message_sizes_are_elements(data_dir: Path, system: str) -> None:
    """The evidence: 16-bit messages take as long as 8-bit ones of twice the `message_size`, in every
    collective; were it bytes, they would take as long as those of the same."""
    table = read_columns(data_dir / "profiles" / "aiconfigurator" / system / "nccl_perf.csv.gz")
    columns = (table.text("op_name"), table.numbers("num_gpus"), table.text("nccl_dtype"))
    sizes, times = table.numbers("message_size"), table.numbers("latency")
    known = dict(zip(zip(*columns, sizes, strict=True), times, strict=True))
    same, double = [], []
    for (op, ranks, dtype, size), time in known.items():
        if dtype == "half" and 2**24 <= size < 2**28:
            same.append(time / known[op, ranks, "int8", size])
            double.append(time / known[op, ranks, "int8", 2 * size])
    assert len(double) == 4 * 3 * 4
    assert np.median(double) == pytest.approx(1, abs=0.05)
    assert np.median(same) > 1.6


def test_real_tables_of_an_h200(data_dir: Path) -> None:
    sheet = read_sheet("h200")
    model = llama(
        name="llama-3-70b",
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        max_position_embeddings=8192,
    )
    directory = data_dir / "profiles" / "aiconfigurator" / "h200_sxm"
    table = imported(directory, model, sheet, tp_sizes=(1, 8), num_ranks=8)
    weights_s = 2 * model.layer_parameters / sheet.memory_bandwidth_bytes_per_s
    assert weights_s < table.layers[1].linear.at(1) < 1.6 * weights_s
    assert any("tp1.encode_attention, tp8.encode_attention" in note for note in table.notes)
