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
GPT2 = dataclasses.replace(
    OPT,
    name="gpt2",
    family=ModelFamily.GPT2,
    vocab_size=50257,
    max_position_embeddings=1024,
    hidden_act="gelu_new",
)
T5_SMALL = ModelSpec(
    name="t5-small",
    family=ModelFamily.T5,
    num_hidden_layers=6,
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2048,
    vocab_size=32128,
    max_position_embeddings=2048,
    hidden_act="relu",
)
MIXTRAL = ModelSpec(
    name="mixtral-8x7b",
    family=ModelFamily.LLAMA,
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=32000,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=14336,
)


def test_parameter_counts_are_the_published_ones() -> None:
    # Distinct parameters of HuggingFaceTB/SmolLM2-135M and facebook/opt-125m.
    assert SMOLLM2.num_parameters == 134_515_008
    assert OPT.num_parameters == 125_239_296
    # What transformers' models of gpt2, t5-small and mistralai/Mixtral-8x7B-v0.1 hold.
    assert GPT2.num_parameters == 124_439_808
    assert T5_SMALL.num_parameters == 60_506_624
    assert MIXTRAL.num_parameters == 46_702_792_704


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


def test_layers_of_an_encoder_decoder_differ() -> None:
    attention, mlp = 4 * 512 * 512, 2 * 512 * 2048
    assert T5_SMALL.is_encoder_decoder
    assert T5_SMALL.encode_layer_parameters == attention + mlp + 2 * 512
    assert T5_SMALL.decode_layer_parameters == 2 * attention + mlp + 3 * 512
    assert T5_SMALL.layer_parameters == 3 * attention + 2 * mlp + 5 * 512
    assert T5_SMALL.cross_key_value_parameters == attention // 2
    assert T5_SMALL.replicated_encode_layer_parameters == 2 * 512
    assert T5_SMALL.replicated_layer_parameters == 5 * 512
    gated = dataclasses.replace(T5_SMALL, is_gated_act=True)
    assert gated.encode_layer_parameters - T5_SMALL.encode_layer_parameters == 512 * 2048


@pytest.mark.parametrize("model", [SMOLLM2, OPT, GPT2, MIXTRAL], ids=lambda model: model.name)
def test_layers_of_a_decoder_only_model_serve_both_phases(model: ModelSpec) -> None:
    assert not model.is_encoder_decoder
    assert model.encode_layer_parameters == model.decode_layer_parameters == model.layer_parameters
    assert model.cross_key_value_parameters == model.relative_position_parameters == 0


def test_experts_count_each_and_the_router_is_replicated() -> None:
    dense = dataclasses.replace(MIXTRAL, num_experts=0, num_experts_per_token=0, moe_intermediate_size=0)
    assert MIXTRAL.layer_parameters - dense.layer_parameters == 7 * 3 * 4096 * 14336 + 8 * 4096
    assert MIXTRAL.replicated_layer_parameters - dense.replicated_layer_parameters == 8 * 4096
    # Experts are split over their width; the dense width that nothing reads does not count.
    assert dataclasses.replace(MIXTRAL, moe_intermediate_size=14).tp_sizes(8) == (1, 2)


@pytest.mark.parametrize(
    ("model", "changes", "problem"),
    [
        (OPT, {"is_gated_act": True}, "is_gated_act=true of opt-125m: .* never gated"),
        (SMOLLM2, {"is_gated_act": True}, "family llama is always gated"),
        (T5_SMALL, {"num_key_value_heads": 4}, "num_key_value_heads=4 of t5-small: .*num_attention_heads=8"),
        (T5_SMALL, {"relative_attention_num_buckets": 0}, "relative_attention_num_buckets=0"),
        (OPT, {"num_experts": 2}, "num_experts=2 of opt-125m: .* not with family opt"),
        (MIXTRAL, {"mlp_bias": True}, "not with mlp_bias=true"),
        (MIXTRAL, {"num_experts_per_token": 0}, "num_experts_per_token=0 .* at least 1 beside num_experts=8"),
        (MIXTRAL, {"num_experts_per_token": 9}, "num_experts_per_token=9 .* 1..num_experts=8"),
        (SMOLLM2, {"moe_intermediate_size": 64}, "num_experts=0 .* beside moe_intermediate_size=64"),
    ],
)
def test_fields_of_another_family_are_refused(model: ModelSpec, changes: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        dataclasses.replace(model, **changes)


def test_the_runtime_runs_llama_and_opt() -> None:
    for model in (SMOLLM2, OPT):
        assert model.is_runnable
        model.require_runnable()
    for model, kind in ((GPT2, "gpt2;"), (T5_SMALL, "t5;"), (MIXTRAL, "llama with 8 experts;")):
        assert not model.is_runnable
        with pytest.raises(ConfigError, match=f"{model.name}: planning only, .* family {kind}"):
            model.require_runnable()


def test_kv_bytes_per_token() -> None:
    assert SMOLLM2.kv_bytes_per_token(Dtype.bfloat16) == 2 * 30 * 3 * 64 * 2
    assert SMOLLM2.kv_bytes_per_token(Dtype.float32) == 2 * 30 * 3 * 64 * 4
    assert SMOLLM2.kv_bytes_per_token(Dtype.bfloat16, num_layers=10) == 2 * 10 * 3 * 64 * 2
    assert SMOLLM2.kv_bytes_per_token(Dtype.bfloat16, tp_size=3) == 2 * 30 * 64 * 2
    # Decoder layers only; callers add up input and generated tokens.
    assert T5_SMALL.kv_bytes_per_token(Dtype.float16) == 2 * 6 * 512 * 2


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
