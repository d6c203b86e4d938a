"""Weight readers against transformers' checkpoints; random weights; checks before reading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exegpt.errors import ConfigError, WeightsError
from exegpt.hf_config import read_hf_config
from exegpt.runner.weights import (
    RandomWeights,
    SafetensorsWeights,
    WeightReader,
    WeightsLocation,
    check_weights,
    open_weights,
    tensor_shapes,
)
from exegpt.specs import ModelFamily, ModelSpec

LLAMA = ModelSpec(
    name="tiny-llama",
    family=ModelFamily.LLAMA,
    num_hidden_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=40,
    vocab_size=600,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
QWEN3 = replace(LLAMA, name="tiny-qwen3", qk_norm=True, head_dim=8, tie_word_embeddings=True)
OPT = replace(
    LLAMA,
    name="tiny-opt",
    family=ModelFamily.OPT,
    num_key_value_heads=4,
    tie_word_embeddings=True,
    hidden_act="relu",
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)


def transformers_model(model: ModelSpec) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    shape = {
        "hidden_size": model.hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_hidden_layers,
        "tie_word_embeddings": model.tie_word_embeddings,
        "vocab_size": model.vocab_size,
    }
    if model.family is ModelFamily.OPT:
        config = transformers.OPTConfig(
            **shape, ffn_dim=model.intermediate_size, word_embed_proj_dim=model.hidden_size
        )
        return transformers.OPTForCausalLM(config)
    shape |= {"num_key_value_heads": model.num_key_value_heads, "intermediate_size": model.intermediate_size}
    if model.qk_norm:
        config = transformers.Qwen3Config(**shape, head_dim=model.head_dim, rms_norm_eps=model.norm_eps)
        return transformers.Qwen3ForCausalLM(config)
    config = transformers.LlamaConfig(
        **shape, attention_bias=model.attention_bias, mlp_bias=model.mlp_bias, rms_norm_eps=model.norm_eps
    )
    return transformers.LlamaForCausalLM(config)


def own_tensors(module: torch.nn.Module, model: ModelSpec) -> dict[str, torch.Tensor]:
    tensors = module.state_dict()
    if model.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny LLaMA in two shards or more, and its tensors."""
    module = transformers_model(LLAMA)
    module.save_pretrained(tmp_path, max_shard_size="30KB")
    return tmp_path, own_tensors(module, LLAMA)


@pytest.mark.parametrize(
    "model",
    [LLAMA, replace(LLAMA, attention_bias=True, attention_output_bias=True, mlp_bias=True), QWEN3, OPT],
)
def test_tensor_names_and_shapes_are_those_of_transformers(model: ModelSpec) -> None:
    tensors = own_tensors(transformers_model(model), model)
    assert tensor_shapes(model) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_models_that_can_only_be_planned_have_no_tensors() -> None:
    with pytest.raises(ConfigError, match="tiny-opt: planning only"):
        tensor_shapes(replace(OPT, family=ModelFamily.GPT2))


@pytest.mark.parametrize("model", [LLAMA, QWEN3, OPT])
def test_safetensors_are_read_as_saved(tmp_path: Path, model: ModelSpec) -> None:
    module = transformers_model(model)
    module.save_pretrained(tmp_path)
    spec = read_hf_config(tmp_path, name=model.name)
    assert spec == model
    reader = open_weights(WeightsLocation("safetensors", tmp_path, tmp_path), spec, seed=0)
    check_weights(reader, spec)
    for name, tensor in own_tensors(module, model).items():
        assert torch.equal(reader.read(name), tensor)


def assert_parts_are_parts(reader: WeightReader, name: str) -> None:
    whole = reader.read(name)
    for rows, columns in [
        (slice(2, 7), None),
        (None, slice(5, 20)),
        (slice(20, 40), slice(0, 3)),
        (slice(3, 3), None),
        (slice(None), slice(7, None)),
    ]:
        part = reader.read(name, rows, columns)
        assert torch.equal(part, whole[rows or slice(None), columns or slice(None)])


def test_sharded_safetensors_give_parts(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory, tensors = checkpoint
    assert len(list(directory.glob("*.safetensors"))) > 1
    reader = SafetensorsWeights(directory)
    check_weights(reader, LLAMA)
    assert reader.names() == frozenset(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name), tensor)
    assert_parts_are_parts(reader, "model.layers.1.mlp.gate_proj.weight")
    norm = tensors["model.norm.weight"]
    assert torch.equal(reader.read("model.norm.weight", slice(3, 9)), norm[3:9])


@pytest.mark.parametrize(
    ("model", "prefix"),
    [(LLAMA, "model."), (OPT, "model."), (OPT, "model.decoder.")],
    ids=["llama", "opt", "opt-decoder"],
)
def test_checkpoints_without_the_leading_prefix_are_found(
    tmp_path: Path, model: ModelSpec, prefix: str
) -> None:
    tensors = own_tensors(transformers_model(model), model)
    save_file(
        {name.removeprefix(prefix): value for name, value in tensors.items()}, tmp_path / "model.safetensors"
    )
    reader = SafetensorsWeights(tmp_path)
    assert reader.names() == frozenset(tensors)
    check_weights(reader, model)


def test_stored_types_are_kept_and_integers_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.int8)}, file)
    reader = SafetensorsWeights(file)
    assert reader.read("model.a").dtype is torch.bfloat16
    with pytest.raises(WeightsError, match=r"model\.b is stored as I8; quantised"):
        reader.read("model.b")


def test_a_missing_tensor_and_another_shape_are_named(tmp_path: Path) -> None:
    tensors = own_tensors(transformers_model(LLAMA), LLAMA)
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in tensors.items() if name != "model.norm.weight"}, file)
    with pytest.raises(WeightsError) as caught:
        check_weights(SafetensorsWeights(file), LLAMA)
    assert str(file) in str(caught.value)
    assert "no tensor model.norm.weight [24]" in str(caught.value)
    save_file(tensors, file)
    with pytest.raises(
        WeightsError, match=r"embed_tokens\.weight has shape \[600, 24\], .* needs \[601, 24\]"
    ):
        check_weights(SafetensorsWeights(file), replace(LLAMA, vocab_size=601))
    with pytest.raises(WeightsError, match=r"no tensor model\.absent"):
        SafetensorsWeights(file).read("model.absent")


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file({"model.norm.weight": torch.ones(8), "lm_head.weight": torch.ones(4, 8)}, whole)
    content = whole.read_bytes()
    file = tmp_path / "model.safetensors"
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(WeightsError, match=r"model\.safetensors: truncated or corrupt"):
            SafetensorsWeights(file)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_corrupt_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json: "):
        SafetensorsWeights(tmp_path)


def test_shards_and_index_must_agree(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory, _ = checkpoint
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    name, shard = next(iter(index["weight_map"].items()))
    kept = load_file(directory / shard)
    save_file({key: value for key, value in kept.items() if key != name}, directory / shard)
    with pytest.raises(WeightsError, match=f"{shard}: no tensor {name}"):
        SafetensorsWeights(directory)
    (directory / shard).unlink()
    with pytest.raises(WeightsError, match=f"{shard}: no such file"):
        SafetensorsWeights(directory)


def test_files_without_an_index_are_joined_unless_they_overlap(tmp_path: Path) -> None:
    save_file({"model.a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"model.b": torch.ones(3)}, tmp_path / "2.safetensors")
    assert SafetensorsWeights(tmp_path).names() == {"model.a", "model.b"}
    save_file({"model.b": torch.ones(3)}, tmp_path / "3.safetensors")
    with pytest.raises(WeightsError, match=r"2\.safetensors and 3\.safetensors both hold model\.b"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        # The same shapes as 4 heads of 6 and 2 K/V heads of 6: only the config tells.
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 3}, "num_attention_heads=4"),
        ({"rope_theta": 5e5}, "rope_theta=10000.0"),
        ({"norm_eps": 1e-6}, "norm_eps=1e-05"),
    ],
)
def test_a_config_beside_the_weights_must_agree(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], changes: dict[str, float], key: str
) -> None:
    directory, _ = checkpoint
    location = WeightsLocation("safetensors", directory, directory)
    other = replace(LLAMA, **changes)
    assert tensor_shapes(other) == tensor_shapes(LLAMA)
    with pytest.raises(WeightsError, match=f"config.json: the weights have {key}"):
        open_weights(location, other, seed=0)
    renamed = replace(LLAMA, name="mine", max_position_embeddings=32)
    assert open_weights(location, renamed, seed=0).names() == frozenset(tensor_shapes(LLAMA))


@pytest.mark.parametrize("model", [LLAMA, QWEN3, OPT])
def test_random_weights_are_one_model_on_every_rank(model: ModelSpec) -> None:
    reader = open_weights(WeightsLocation("random"), model, seed=3)
    check_weights(reader, model)
    embedding = next(name for name in reader.names() if name.endswith("embed_tokens.weight"))
    whole = reader.read(embedding)
    # 600 rows are three blocks; the parts start and end within and at blocks.
    for start, stop in [(0, 300), (300, 600), (255, 257), (256, 512), (599, 600), (10, 10)]:
        assert torch.equal(reader.read(embedding, slice(start, stop)), whole[start:stop])
    assert_parts_are_parts(
        reader, next(name for name in reader.names() if name.endswith("0.self_attn.v_proj.weight"))
    )
    assert torch.equal(RandomWeights(model, 3).read(embedding), whole)
    assert not torch.equal(RandomWeights(model, 4).read(embedding), whole)


def test_random_weights_have_the_usual_scale() -> None:
    reader = RandomWeights(OPT, seed=0)
    drawn = torch.cat([reader.read(n).flatten() for n in reader.names() if "norm" not in n])
    # 0.02 within four standard errors of a sample of this size (sigma / sqrt(2 n), sigma / sqrt(n)).
    assert drawn.std().item() == pytest.approx(0.02, abs=4 * 0.02 / (2 * drawn.numel()) ** 0.5)
    assert drawn.mean().item() == pytest.approx(0.0, abs=4 * 0.02 / drawn.numel() ** 0.5)
    assert torch.equal(reader.read("model.decoder.final_layer_norm.weight"), torch.ones(24))
    assert 0 < reader.read("model.decoder.final_layer_norm.bias").abs().max() < 0.2
    layers = [reader.read(f"model.decoder.layers.{i}.fc1.weight") for i in (0, 1)]
    assert not torch.equal(*layers)
    with pytest.raises(WeightsError, match=r"no tensor lm_head\.weight"):
        reader.read("lm_head.weight")
