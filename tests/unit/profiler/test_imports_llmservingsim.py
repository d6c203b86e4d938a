"""LLMServingSim's tables: both layouts, their units, and models that they are not of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from import_tables import llama, write_table

from exegpt.errors import ProfileError
from exegpt.profiler.imports import llmservingsim_profile
from exegpt.profiler.sheet import read_sheet
from exegpt.specs import Dtype

CARD = read_sheet("rtx4090")
DENSE = (
    "layernorm",
    "qkv_proj",
    "rotary_emb",
    "o_proj",
    "gate_up_proj",
    "act_fn",
    "down_proj",
    "embedding",
    "final_layernorm",
)
OLDER = (
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
    "embedding",
    "final_layernorm",
    "lm_head",
    "attn",
)


def write_newer(folder: Path) -> None:
    """Kernel number i takes i + 1 us a token; head 100 + 10 a sequence; sampler 5."""
    write_table(
        folder / "dense.csv",
        [
            {"layer": name, "tokens": n, "time_us": (i + 1) * n}
            for i, name in enumerate(DENSE)
            for n in (1, 64, 512)
        ],
    )
    write_table(
        folder / "per_sequence.csv",
        [
            {"layer": name, "sequences": n, "time_us": time}
            for n in (1, 16, 64)
            for name, time in (("lm_head", 100 + 10 * n), ("sampler", 5))
        ],
    )
    rows = [
        {"prefill_chunk": c, "kv_prefill": kv, "n_decode": 0, "kv_decode": 0, "time_us": c * c / 100 + kv}
        for c in (16, 128, 1024)
        for kv in (0, 64)
    ]
    rows += [
        {"prefill_chunk": 0, "kv_prefill": 0, "n_decode": q, "kv_decode": n, "time_us": 10 + q * n / 100}
        for q in (1, 8, 64)
        for n in (16, 1024)
    ]
    rows.append({"prefill_chunk": 16, "kv_prefill": 0, "n_decode": 8, "kv_decode": 16, "time_us": 1e6})
    write_table(folder / "attention.csv", rows)


def write_older(folder: Path) -> None:
    write_table(
        folder / "layers.csv",
        [
            {"layer_name": name, "input": n, "kv_cache": 0, "tp_size": 1, "latency(ns)": (i + 1) * n * 1000}
            for i, name in enumerate(OLDER)
            for n in (1, 64, 512)
        ],
    )


def imported(directory: Path, model=None, sheet=CARD, **changes):
    wanted = {"dtype": Dtype.bfloat16, "num_ranks": 1, **changes}
    return llmservingsim_profile(directory, model or llama(), sheet, **wanted)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "Small_Llama"


def test_newer_tables_in_microseconds(folder: Path) -> None:
    write_newer(folder / "tp1")
    table = imported(folder)
    costs = table.layers[1]
    # Kernels 1 to 7 a token, the norm (1) once more.
    assert costs.linear.at(64) == pytest.approx(64e-6 * (28 + 1))
    assert costs.embed.at(64) == pytest.approx(64e-6 * 8)
    assert costs.head.at(16) == pytest.approx(1e-6 * (100 + 160 + 5 + 9 * 16))
    assert costs.encode_attention.at(1, 128) == pytest.approx(128**2 / 100 * 1e-6)
    assert costs.decode_attention.at(8, 8 * 1024) == pytest.approx(1e-6 * (10 + 81.92))
    notes = "\n".join(table.notes)
    assert "measured (dense.csv, per_sequence.csv): tp1.head" in notes
    plain = [name for name, text in table.provenance.items() if text.startswith("formula")]
    assert plain == ["send", "host_copy", "tp1.encode_overhead", "tp1.decode_overhead"]


def test_older_tables_in_nanoseconds(folder: Path) -> None:
    write_older(folder / "tp1")
    costs = imported(folder).layers[1]
    assert costs.linear.at(64) == pytest.approx(64e-6 * 66)
    assert costs.encode_attention.at(1, 512) == pytest.approx(512e-6 * 15)
    assert costs.head.at(64) == pytest.approx(64e-6 * (13 + 14))


def test_degrees_that_divide_the_model_are_taken(folder: Path) -> None:
    for degree in (1, 2, 3):
        write_newer(folder / f"tp{degree}")
    (folder / "tpx").mkdir()
    table = imported(folder)
    assert sorted(table.layers) == [1, 2]
    assert table.layers[2].all_reduce is not None


def test_tables_of_another_model_are_refused(folder: Path) -> None:
    write_newer(folder / "tp1")
    with pytest.raises(ProfileError, match=r"are of Small_Llama, not of other, .*same_shape=True"):
        imported(folder, llama(name="other"))
    assert imported(folder, llama(name="other"), same_shape=True).key.model == "other"


def test_older_attention_of_other_heads_is_refused(folder: Path) -> None:
    write_older(folder / "tp1")
    write_table(
        folder / "tp1" / "attention.csv",
        [{"n_embd": 1024, "n_q_head": 8, "n_kv_head": 8, "is_prefill": False}],
    )
    with pytest.raises(ProfileError, match=r"attention is of n_embd=1024, n_q_head=8, n_kv_head=8, not of"):
        imported(folder)


def test_missing_kernels_tables_and_degrees(folder: Path) -> None:
    with pytest.raises(ProfileError, match="no such directory"):
        imported(folder)
    folder.mkdir()
    with pytest.raises(ProfileError, match="no degree of tensor parallelism in it fits small-llama"):
        imported(folder)
    write_newer(folder / "tp1")
    (folder / "tp1" / "per_sequence.csv").unlink()
    with pytest.raises(ProfileError, match=r"no per_sequence\.csv"):
        imported(folder)
    write_table(folder / "tp1" / "dense.csv", [{"layer": "layernorm", "tokens": 1, "time_us": 1}])
    with pytest.raises(ProfileError, match=r"dense\.csv: lacks rows of 'qkv_proj'"):
        imported(folder)
    write_newer(folder / "tp1")
    with pytest.raises(ProfileError, match=r"lacks tp1\.encode_overhead; give the card's GPU sheet"):
        imported(folder, sheet=None, device="rtx4090")
    with pytest.raises(ProfileError, match="dtype wanted is float32"):
        imported(folder, dtype=Dtype.float32)


LLAMA_8B = llama(
    name="llama-3.1-8b",
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
)


@pytest.mark.parametrize(
    ("folder_name", "card"),
    [("perf/RTX4090", "rtx4090"), ("perf/RTXPRO6000", "rtxpro6000"), ("v0/RTX3090", "rtx3090")],
)
def test_real_tables_are_bound_by_memory(data_dir: Path, folder_name: str, card: str) -> None:
    sheet = read_sheet(card)
    directory = data_dir / "profiles" / "llmservingsim" / folder_name / "Llama-3.1-8B"
    costs = imported(directory, LLAMA_8B, sheet).layers[1]
    weights_s = 2 * LLAMA_8B.layer_parameters / sheet.memory_bandwidth_bytes_per_s
    assert weights_s < costs.linear.at(1) < 1.5 * weights_s
    assert np.all(np.diff(costs.linear.values_s) >= 0)


def test_real_decode_table_that_reads_too_fast_is_replaced(data_dir: Path) -> None:
    directory = data_dir / "profiles" / "llmservingsim" / "v0" / "A6000" / "Llama-3.1-8B"
    notes = "\n".join(imported(directory, LLAMA_8B, read_sheet("a6000"), num_ranks=2).notes)
    assert "times as fast as the card's memory can: tp1.decode_attention" in notes
