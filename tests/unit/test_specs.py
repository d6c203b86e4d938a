"""Shapes and bounds against published numbers and sums over weights written out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from exegpt.errors import ConfigError
from exegpt.specs import BoundSpec, ClusterSpec, Dtype, ModelFamily, ModelSpec

SMOLLM2 = ModelSpec(
    name="smollm2-135m",
    family=ModelFamily.LLAMA,
    num_hidden_layers=30,
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
)
OPT = ModelSpec(
    name="opt-125m",
    family=ModelFamily.OPT,
    num_hidden_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    intermediate_size=3072,
    vocab_size=50272,
    max_position_embeddings=2048,
    hidden_act="relu",
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)


def test_parameter_counts_are_the_published_ones() -> None:
    # Distinct parameters of HuggingFaceTB/SmolLM2-135M and facebook/opt-125m.
    assert SMOLLM2.num_parameters == 134_515_008
    assert OPT.num_parameters == 125_239_296


def test_layer_parameters_are_the_sum_of_its_matrices() -> None:
    attention = 576 * 576 + 2 * 576 * 192 + 576 * 576
    assert SMOLLM2.layer_parameters == attention + 3 * 576 * 1536 + 2 * 576
    matrices = 4 * 768 * 768 + 2 * 768 * 3072
    biases = 4 * 768 + 3072 + 768
    assert OPT.layer_parameters == matrices + biases + 2 * 2 * 768


def test_untied_head_adds_a_matrix() -> None:
    untied = dataclasses.replace(SMOLLM2, tie_word_embeddings=False)
    assert untied.num_parameters - SMOLLM2.num_parameters == 49152 * 576


def test_biases_and_norms_of_other_llama_models_count() -> None:
    # Qwen2 has biases on query, key and value; Qwen3 norms each head's query and key.
    qwen2 = dataclasses.replace(SMOLLM2, attention_bias=True)
    assert qwen2.layer_parameters - SMOLLM2.layer_parameters == 576 + 192 + 192
    qwen3 = dataclasses.replace(SMOLLM2, qk_norm=True)
    assert qwen3.layer_parameters - SMOLLM2.layer_parameters == 64 + 64
    biased = dataclasses.replace(SMOLLM2, mlp_bias=True)
    assert biased.layer_parameters - SMOLLM2.layer_parameters == 1536 + 1536 + 576


def test_kv_bytes_per_token() -> None:
    assert SMOLLM2.kv_bytes_per_token(Dtype.bfloat16) == 2 * 30 * 3 * 64 * 2
    assert SMOLLM2.kv_bytes_per_token(Dtype.float32) == 2 * 30 * 3 * 64 * 4
    assert SMOLLM2.kv_bytes_per_token(Dtype.bfloat16, num_layers=10) == 2 * 10 * 3 * 64 * 2
    assert SMOLLM2.kv_bytes_per_token(Dtype.bfloat16, tp_size=3) == 2 * 30 * 64 * 2


def test_kv_bytes_of_the_layers_add_up() -> None:
    parts = [SMOLLM2.kv_bytes_per_token(Dtype.float16, num_layers=n) for n in (1, 12, 17)]
    assert sum(parts) == SMOLLM2.kv_bytes_per_token(Dtype.float16)


def test_tp_sizes_divide_the_heads() -> None:
    assert SMOLLM2.tp_sizes(8) == (1, 3)
    assert OPT.tp_sizes(8) == (1, 2, 3, 4, 6)
    assert OPT.tp_sizes(12) == (1, 2, 3, 4, 6, 12)
    assert SMOLLM2.tp_sizes(0) == ()


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "head_dim", "vocab_size"])
def test_sizes_below_one_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{field}=0 of smollm2-135m: must be at least 1"):
        dataclasses.replace(SMOLLM2, **{field: 0})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads=9 .* no multiple of num_key_value_heads=2"):
        dataclasses.replace(SMOLLM2, num_key_value_heads=2)


@pytest.mark.parametrize("field", ["num_nodes", "gpus_per_node", "memory_bytes"])
def test_cluster_needs_something_of_everything(field: str) -> None:
    values = {"num_nodes": 2, "gpus_per_node": 4, "memory_bytes": 1 << 30}
    assert ClusterSpec(name="c", device="d", **values).num_gpus == 8
    with pytest.raises(ConfigError, match=rf"cluster\.{field}=0 of c"):
        ClusterSpec(name="c", device="d", **{**values, field: 0})


@pytest.mark.parametrize("field", ["latency_s", "ttft_s", "tpot_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bounds_are_above_zero(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"bound\.{field}={value}: must be above 0 s \(inf for no bound\)"):
        BoundSpec(**{field: value})


@pytest.mark.parametrize("value", [0.0, 100.5, math.nan])
def test_percentile_lies_in_its_range(value: float) -> None:
    assert BoundSpec(length_percentile=100).length_percentile == 100
    with pytest.raises(ConfigError, match=r"bound\.length_percentile=.*\(0, 100\]"):
        BoundSpec(length_percentile=value)


def test_dtype_bytes() -> None:
    assert {dtype.name: dtype.num_bytes for dtype in Dtype} == {"float32": 4, "bfloat16": 2, "float16": 2}
