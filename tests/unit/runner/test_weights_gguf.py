"""GGUF files against transformers' own GGUF loader; refusals of corrupt and foreign files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from exegpt.errors import WeightsError
from exegpt.runner.weights import (
    GgufWeights,
    WeightsLocation,
    check_weights,
    gguf_model_spec,
    open_weights,
    tensor_shapes,
)
from exegpt.runner.weights.gguf_header import read_gguf_header
from exegpt.specs import ModelFamily, ModelSpec

LLAMA = ModelSpec(
    name="tiny",
    family=ModelFamily.LLAMA,
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=40,
    max_position_embeddings=128,
    rope_theta=50_000.0,
)
QWEN2 = replace(LLAMA, attention_bias=True, tie_word_embeddings=False)
# transformers' loader does not read the head's width of qwen3 files; 128 is its default.
QWEN3 = replace(LLAMA, qk_norm=True, head_dim=128)
Quantization = gguf.GGMLQuantizationType


def tensor_sizes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensors in llama.cpp's names, as its converter would write them."""
    h, q, kv, ff = model.hidden_size, model.query_size, model.key_value_size, model.intermediate_size
    sizes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (model.vocab_size, h),
        "output_norm.weight": (h,),
    }
    if not model.tie_word_embeddings:
        sizes["output.weight"] = (model.vocab_size, h)
    for index in range(model.num_hidden_layers):
        layer = {
            "attn_norm.weight": (h,),
            "attn_q.weight": (q, h),
            "attn_k.weight": (kv, h),
            "attn_v.weight": (kv, h),
            "attn_output.weight": (h, q),
            "ffn_norm.weight": (h,),
            "ffn_gate.weight": (ff, h),
            "ffn_up.weight": (ff, h),
            "ffn_down.weight": (h, ff),
        }
        if model.attention_bias:
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if model.qk_norm:
            layer |= {"attn_q_norm.weight": (model.head_dim,), "attn_k_norm.weight": (model.head_dim,)}
        sizes |= {f"blk.{index}.{name}": size for name, size in layer.items()}
    return sizes


def write_gguf(
    path: Path,
    model: ModelSpec = LLAMA,
    architecture: str = "llama",
    kind: Quantization = Quantization.F32,
    extra: Mapping[str, Any] | None = None,
    drop: str = "",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_vocab_size(model.vocab_size)
    writer.add_token_list([f"<{i}>" for i in range(model.vocab_size)])
    for key, value in (extra or {}).items():
        match value:
            case str():
                writer.add_string(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_uint32(key, value)
    rng = np.random.default_rng(0)
    for name, size in tensor_sizes(model).items():
        if name == drop:
            continue
        data = rng.standard_normal(size).astype(np.float32)
        # As llama.cpp does, vectors stay in float32.
        kept = Quantization.F32 if len(size) == 1 else kind
        quantised = gguf.quantize(data, kept)
        writer.add_tensor(name, quantised, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("model", "architecture"),
    [(LLAMA, "llama"), (QWEN2, "qwen2"), (QWEN3, "qwen3")],
    ids=["llama", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("kind", [Quantization.F32, Quantization.BF16, Quantization.Q4_1, Quantization.Q8_0])
def test_tensors_are_those_of_transformers_gguf_loader(
    tmp_path: Path, model: ModelSpec, architecture: str, kind: Quantization
) -> None:
    from transformers import AutoModelForCausalLM

    file = write_gguf(tmp_path / "tiny.gguf", model, architecture, kind)
    assert gguf_model_spec(file, "tiny") == model
    reader = open_weights(WeightsLocation("gguf", file, tmp_path), model, seed=0)
    check_weights(reader, model)
    assert reader.names() == frozenset(tensor_shapes(model))
    module = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    state = module.state_dict()
    for name in reader.names():
        assert torch.equal(reader.read(name), state[name]), name


@pytest.mark.parametrize("kind", [Quantization.F16, Quantization.Q4_0, Quantization.Q8_0])
def test_parts_are_parts_of_the_whole(tmp_path: Path, kind: Quantization) -> None:
    reader = GgufWeights(write_gguf(tmp_path / "tiny.gguf", kind=kind))
    # Columns within, at and across the blocks of 32; q's rows are permuted within heads of 16.
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = reader.read(name)
        for rows in (None, slice(0, 16), slice(5, 39), slice(7, 7), slice(60, None)):
            for columns in (None, slice(0, 32), slice(32, 64), slice(3, 35), slice(9, 9)):
                part = reader.read(name, rows, columns)
                assert torch.equal(part, whole[rows or slice(None), columns or slice(None)])
    norm = reader.read("model.norm.weight")
    assert torch.equal(reader.read("model.norm.weight", slice(4, 9)), norm[4:9])


def test_biases_of_q_and_k_are_permuted_like_their_rows(tmp_path: Path) -> None:
    # transformers' loader leaves the biases of `llama` files interleaved; llama.cpp's converter
    # permutes them like the weights, so a bias must follow the row of the weight that it belongs to.
    file = write_gguf(tmp_path / "tiny.gguf", QWEN2, "llama")
    reader = GgufWeights(file)
    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(file).tensors}
    weight, bias = (reader.read(f"model.layers.0.self_attn.k_proj.{part}") for part in ("weight", "bias"))
    for row, value in zip(weight.numpy(), bias.numpy(), strict=True):
        at = np.flatnonzero((stored["blk.0.attn_k.weight"] == row).all(axis=1))
        assert stored["blk.0.attn_k.bias"][at] == [value]


def test_the_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind=Quantization.Q5_0)
    header, oracle = read_gguf_header(file), gguf.GGUFReader(file)
    for key, value in header.metadata.items():
        assert oracle.fields[key].contents() == value
    for tensor in oracle.tensors:
        place = header.tensors[tensor.name]
        assert place.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (place.kind, place.offset_bytes, place.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", kind=Quantization.Q8_0)
    content = whole.read_bytes()
    header = read_gguf_header(whole)
    end = max(tensor.offset_bytes + tensor.num_bytes for tensor in header.tensors.values())
    file = tmp_path / "cut.gguf"
    lengths = [*range(0, header.num_bytes + 64, 7), *range(header.num_bytes, end, 4999), end - 1]
    for length in lengths:
        file.write_bytes(content[:length])
        with pytest.raises(WeightsError, match=r"cut\.gguf: "):
            GgufWeights(file)
    # What follows the last tensor is padding.
    file.write_bytes(content[:end])
    check_weights(GgufWeights(file), LLAMA)


def test_a_header_with_any_byte_changed_never_escapes_as_another_error(tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "whole.gguf").read_bytes())
    header_bytes = read_gguf_header(tmp_path / "whole.gguf").num_bytes
    file = tmp_path / "bad.gguf"
    rng = np.random.default_rng(1)
    refused = 0
    for at in rng.choice(header_bytes, size=400, replace=False):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        file.write_bytes(damaged)
        try:
            check_weights(GgufWeights(file), LLAMA)
        except WeightsError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window=64"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
    ],
)
def test_what_the_runtime_does_not_compute_is_refused(
    tmp_path: Path, extra: dict[str, Any], problem: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", extra=extra)
    with pytest.raises(WeightsError) as caught:
        GgufWeights(file)
    assert str(file) in str(caught.value)
    assert problem in str(caught.value)


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaling = gguf_model_spec(write_gguf(tmp_path / "tiny.gguf", extra=extra), "tiny").rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor) == ("linear", 4.0)


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", architecture="gemma2")
    with pytest.raises(WeightsError, match=r"='gemma2' is not supported; known architectures: \['llama'"):
        gguf_model_spec(file, "tiny")
    file.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(WeightsError, match=r"tiny\.gguf: not a GGUF file"):
        gguf_model_spec(file, "tiny")
    with pytest.raises(WeightsError, match=r"absent\.gguf: no such file"):
        gguf_model_spec(tmp_path / "absent.gguf", "tiny")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", drop="blk.1.ffn_up.weight")
    with pytest.raises(WeightsError, match=r"tiny\.gguf: no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        check_weights(GgufWeights(file), LLAMA)


def test_metadata_must_agree_with_the_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    other = replace(LLAMA, rope_theta=10_000.0)
    with pytest.raises(WeightsError, match=r"rope_theta=50000\.0, but model\.rope_theta=10000\.0"):
        open_weights(WeightsLocation("gguf", file, tmp_path), other, seed=0)
