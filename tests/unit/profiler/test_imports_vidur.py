"""Vidur's tables: units, which kernels make a layer, what is filled in, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from import_tables import llama, write_table

from exegpt.errors import ProfileError
from exegpt.profiler.analytic import MAX_TOKENS, analytic_profile
from exegpt.profiler.imports import vidur_profile
from exegpt.profiler.sheet import read_sheet
from exegpt.specs import Dtype, ModelFamily

A40 = read_sheet("a40-48")
KERNELS = (
    "emb",
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)


def mlp_rows(tokens=(1, 64, 512), degrees=(1, 2), **changes):
    """Kernel number i of the list takes (i + 1) us a token at degree 1."""
    return [
        {
            **{f"time_stats.{name}.median": (i + 1) * 1e-3 * n / tp for i, name in enumerate(KERNELS)},
            "n_head": 8,
            "n_kv_head": 4,
            "n_embd": 1024,
            "n_expanded_embd": 4096,
            "vocab_size": 32000,
            "use_gated_mlp": True,
            "num_tokens": n,
            "num_tensor_parallel_workers": tp,
            **changes,
        }
        for tp in degrees
        for n in tokens
    ]


def attention_rows(tp=2, decode_ms_per_token=1e-4, contexts=(64, 256, 1024), **changes):
    shared = {
        "n_embd": 1024,
        "n_q_head": 8,
        "n_kv_head": 4,
        "num_tensor_parallel_workers": tp,
        **changes,
    }
    prefill = [
        {
            **shared,
            "batch_size": 1,
            "prefill_chunk_size": n,
            "kv_cache_size": cached,
            "is_prefill": True,
            "time_stats.attn_prefill.median": n * n * 1e-6 + cached,
            "time_stats.attn_decode.median": "",
        }
        for n in (64, 256, 1024)
        for cached in (0, 512)
    ]
    decode = [
        {
            **shared,
            "batch_size": b,
            "prefill_chunk_size": 0,
            "kv_cache_size": n,
            "is_prefill": False,
            "time_stats.attn_prefill.median": "",
            "time_stats.attn_decode.median": 0.01 + decode_ms_per_token * b * n,
        }
        for b in (1, 4, 16)
        for n in contexts
    ]
    return prefill + decode


def imported(directory: Path, model=None, sheet=A40, **changes):
    wanted = {"dtype": Dtype.float16, "num_ranks": 2, **changes}
    return vidur_profile(directory, model or llama(), sheet, **wanted)


def test_a_layer_is_the_sum_of_its_kernels_in_seconds(tmp_path: Path) -> None:
    write_table(tmp_path / "small-llama" / "mlp.csv", mlp_rows())
    table = imported(tmp_path)
    assert sorted(table.layers) == [1, 2]
    # Kernels 2 to 10 of the list, the sum (10) twice: 2 + 3 + ... + 10 + 10 us a token.
    assert table.layers[1].linear.at(64) == pytest.approx(64e-6 * (54 + 10))
    assert table.layers[2].linear.at(64) == pytest.approx(32e-6 * (54 + 10))
    assert table.layers[1].embed.at(512) == pytest.approx(512e-6)
    assert table.layers[1].linear.limit() == MAX_TOKENS
    assert table.key.device == "a40-48"
    assert table.measured_s == 0


def test_a_model_without_rotation_leaves_it_out(tmp_path: Path) -> None:
    write_table(tmp_path / "mlp.csv.gz", mlp_rows(use_gated_mlp=False))
    table = imported(tmp_path, llama(family=ModelFamily.OPT))
    assert table.layers[1].linear.at(64) == pytest.approx(64e-6 * (64 - 4))


def test_what_the_tables_lack_comes_from_the_sheet_and_is_said(tmp_path: Path) -> None:
    write_table(tmp_path / "mlp.csv", mlp_rows())
    table = imported(tmp_path)
    formula = analytic_profile(llama(), A40, dtype=Dtype.float16, tp_sizes=(1, 2), num_ranks=2)
    for operator in ("head", "encode_attention", "decode_attention", "decode_overhead", "all_reduce"):
        assert np.array_equal(
            getattr(table.layers[2], operator).values_s, getattr(formula.layers[2], operator).values_s
        )
    assert np.array_equal(table.send.values_s, formula.send.values_s)
    notes = "\n".join(table.notes)
    assert "measured (mlp.csv): tp1.linear, tp1.embed, tp2.linear, tp2.embed" in notes
    assert table.provenance["tp1.encode_attention"] == "formula (a40-48, uncalibrated)"
    assert table.provenance["tp2.linear"] == "measured (Vidur), scaled by formula beyond 512 tokens"
    assert f"formulas: {A40.label}" in notes


def test_attention_of_the_degree_that_has_it(tmp_path: Path) -> None:
    write_table(tmp_path / "mlp.csv", mlp_rows())
    write_table(tmp_path / "attention.csv", attention_rows())
    costs = imported(tmp_path).layers[2]
    # Prompts with cached tokens are left out; several prompts are computed one after another.
    assert costs.encode_attention.at(1, 256) == pytest.approx(256**2 * 1e-9)
    assert costs.encode_attention.limit(0) == 1
    # K/V of 16 x 1024 tokens; and a point between measured batches.
    assert costs.decode_attention.at(16, 16384) == pytest.approx(1e-5 + 16384e-7)
    assert costs.decode_attention.at(10, 4096) == pytest.approx(1e-5 + 4096e-7)
    notes = "\n".join(imported(tmp_path).notes)
    assert "measured (attention.csv): tp2.encode_attention, tp2.decode_attention" in notes


def test_attention_of_other_heads_is_not_taken(tmp_path: Path) -> None:
    write_table(tmp_path / "mlp.csv", mlp_rows())
    write_table(tmp_path / "attention.csv", attention_rows(n_kv_head=8))
    assert "attention.csv" not in "\n".join(imported(tmp_path).notes)


def test_decode_times_that_no_memory_allows_are_not_taken(tmp_path: Path) -> None:
    write_table(tmp_path / "mlp.csv", mlp_rows())
    # 16 requests of 8192 tokens are 134 MB of K/V, beyond any cache; 10 us would be 13 TB/s.
    write_table(tmp_path / "attention.csv", attention_rows(decode_ms_per_token=0, contexts=(64, 8192)))
    notes = "\n".join(imported(tmp_path).notes)
    assert "formula, because its table reads K/V" in notes
    assert "times as fast as the card's memory can: tp2.decode_attention" in notes


def test_collectives_in_bytes(tmp_path: Path) -> None:
    write_table(tmp_path / "mlp.csv", mlp_rows())
    network = tmp_path / "network"
    sizes = (2048, 2**20, 2**24)
    for name in ("all_reduce", "send_recv"):
        rows = [
            {
                f"time_stats.{name}.median": 0.02 + size / 1e7,
                "rank": 0,
                "num_workers": 2,
                "size": size,
                "devices_per_node": per_node,
            }
            for size in sizes
            for per_node in (1, 2)
        ]
        for row in rows:
            # Between nodes ten times as slow: not what stands inside a node.
            row[f"time_stats.{name}.median"] *= 10 if row["devices_per_node"] == 1 else 1
        write_table(network / f"{name}.csv", rows)
    table = imported(tmp_path, network=network)
    assert table.layers[2].all_reduce is not None
    assert table.layers[2].all_reduce.at(2**20) == pytest.approx(2e-5 + 2**20 / 1e10)
    assert table.send.at(2**24) == pytest.approx(2e-5 + 2**24 / 1e10)
    # Below the shortest message a table would fall to zero; a token's id costs as much as that one.
    assert table.send.at(8) == pytest.approx(2e-5 + 2048 / 1e10)


def test_times_that_fall_are_mended_and_said(tmp_path: Path) -> None:
    rows = mlp_rows(tokens=(1, 64, 128, 512), degrees=(1,))
    for row in rows:
        if row["num_tokens"] == 128:
            row["time_stats.mlp_up_proj.median"] = 0.0
            row["time_stats.mlp_act.median"] = 0.0
            row["time_stats.mlp_down_proj.median"] = 0.0
            row["time_stats.attn_pre_proj.median"] = 0.0
            row["time_stats.add.median"] = 0.0
    write_table(tmp_path / "mlp.csv", rows)
    table = imported(tmp_path)
    assert np.all(np.diff(table.layers[1].linear.values_s) >= 0)
    assert any("fell in places and was made isotone, by up to" in note for note in table.notes)


def test_other_shapes_are_refused_with_the_nearest(tmp_path: Path) -> None:
    write_table(tmp_path / "near" / "mlp.csv", mlp_rows())
    write_table(tmp_path / "far" / "mlp.csv", mlp_rows(n_embd=8192))
    with pytest.raises(ProfileError, match=r"shape of wide .*n_expanded_embd=5000.*the nearest is near"):
        imported(tmp_path, llama(name="wide", intermediate_size=5000))


def test_without_a_sheet_the_first_lack_is_named(tmp_path: Path) -> None:
    write_table(tmp_path / "mlp.csv", mlp_rows())
    with pytest.raises(ProfileError, match=r"lacks tp1\.encode_attention; give the card's GPU sheet"):
        imported(tmp_path, sheet=None, device="a40")
    with pytest.raises(ProfileError, match="say which device"):
        imported(tmp_path, sheet=None)


def test_foreign_directories_and_types(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no such directory"):
        imported(tmp_path / "nowhere")
    with pytest.raises(ProfileError, match=r"no mlp\.csv"):
        imported(tmp_path)
    write_table(tmp_path / "mlp.csv", mlp_rows())
    with pytest.raises(ProfileError, match=r"16-bit types, but the dtype wanted is float32"):
        imported(tmp_path, dtype=Dtype.float32)
    write_table(tmp_path / "mlp.csv", [{"tokens": 1, "time": 2}])
    with pytest.raises(ProfileError, match=r"mlp\.csv: lacks the column 'n_embd'"):
        imported(tmp_path)
    write_table(tmp_path / "mlp.csv", mlp_rows(**{"time_stats.add.median": "nan"}))
    with pytest.raises(ProfileError, match=r"mlp\.csv: column 'time_stats\.add\.median' holds nan"):
        imported(tmp_path)


def test_real_tables_of_an_a100(data_dir: Path) -> None:
    """A layer of Llama-2-70B cannot beat the memory, and the all-reduce reaches about 170 GB/s."""
    profiles = data_dir / "profiles" / "vidur"
    model = llama(
        name="llama-2-70b",
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        max_position_embeddings=4096,
    )
    sheet = read_sheet("a100-80")
    table = imported(profiles / "a100", model, sheet, network=profiles / "network" / "a100_dgx", num_ranks=8)
    assert sorted(table.layers) == [1, 2, 4, 8]
    for tp_size, costs in table.layers.items():
        weights_s = 2 * model.layer_parameters / tp_size / sheet.memory_bandwidth_bytes_per_s
        assert weights_s < costs.linear.at(1) < 2 * weights_s
    assert table.layers[8].all_reduce is not None
    size = 64 * 2**20
    assert 2 * 7 / 8 * size / table.layers[8].all_reduce.at(size) == pytest.approx(174e9, rel=0.1)
    assert any("attention_tp2_legacy" in note for note in table.notes)
