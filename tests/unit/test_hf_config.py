"""Model shapes from config.json: known parameter counts, both spellings of rotary keys, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exegpt.errors import ConfigError
from exegpt.hf_config import model_from_hf, read_hf_config
from exegpt.specs import ModelFamily, ModelSpec, RopeScaling

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
}
OPT = {
    "model_type": "opt",
    "ffn_dim": 96,
    "hidden_size": 64,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 2,
    "n_positions": 128,
    "vocab_size": 100,
}
T5 = {
    "model_type": "t5",
    "d_ff": 96,
    "d_kv": 32,
    "d_model": 64,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 100,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_from_hf(config | changes, name="tiny", source="tiny/config.json")


# Parameters that transformers' models of these configs have (torch.device("meta"), p.numel()).
@pytest.mark.parametrize(
    ("file", "num_parameters"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248),
        ("meta-llama--Meta-Llama-3.1-70B", 70_553_706_496),
        ("llama-2-13b", 13_015_864_320),
        ("Qwen--Qwen3-0.6B", 596_049_920),
        ("Qwen--Qwen3-32B", 32_762_123_264),
        ("facebook--opt-1.3b", 1_315_758_080),
        ("facebook--opt-13b", 12_853_473_280),
        ("facebook--opt-30b", 29_974_540_288),
        ("gpt2-large", 774_030_080),
        ("mistralai--Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Qwen--Qwen3-30B-A3B", 30_532_122_624),
        ("t5-small", 60_506_624),
        ("t5-large", 737_668_096),
        ("t5-3b", 2_851_598_336),
        # The published checkpoint, with its own output matrix, which transformers 5 ties.
        ("t5-v1_1-large", 783_150_080),
    ],
)
def test_published_configs_have_the_published_number_of_parameters(
    data_dir: Path, file: str, num_parameters: int
) -> None:
    model = read_hf_config(data_dir / "model_configs" / "hf" / f"{file}.config.json")
    assert model.num_parameters == num_parameters
    assert model.name == file


def test_published_llama_3_1_scales_its_rotary_frequencies(data_dir: Path) -> None:
    file = data_dir / "model_configs" / "hf" / "meta-llama--Meta-Llama-3.1-8B.config.json"
    model = read_hf_config(file, name="llama-3.1-8b")
    assert model.name == "llama-3.1-8b"
    assert (model.rope_theta, model.rope_scaling) == (500_000.0, LLAMA3_SCALING)
    assert (model.num_key_value_heads, model.head_dim, model.max_position_embeddings) == (8, 128, 131_072)


KNOWN = "['gpt2', 'llama', 'mistral', 'mixtral', 'opt', 'qwen2', 'qwen3', 'qwen3_moe', 't5']"


def test_published_configs_of_other_architectures_are_refused(data_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hf_config(data_dir / "model_configs" / "hf" / "openai--gpt-oss-20b.config.json")
    message = str(caught.value)
    assert "openai--gpt-oss-20b.config.json: model_type='gpt_oss' (GptOssForCausalLM)" in message
    assert KNOWN in message


def test_published_opt_350m_is_refused_for_its_embedding_and_norms(data_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"word_embed_proj_dim=512 .*do_layer_norm_before=false"):
        read_hf_config(data_dir / "model_configs" / "hf" / "facebook--opt-350m.config.json")


def test_every_published_config_is_read_or_refused(data_dir: Path) -> None:
    files = sorted((data_dir / "model_configs" / "hf").glob("*.config.json"))
    assert len(files) >= 17
    refused = []
    for file in files:
        try:
            assert read_hf_config(file).num_parameters > 0
        except ConfigError:
            refused.append(file.name.removesuffix(".config.json"))
    assert refused == ["facebook--opt-350m", "openai--gpt-oss-20b"]


@pytest.mark.parametrize(
    ("hf", "flat"),
    [
        ("facebook--opt-13b", "facebook_opt-13b"),
        ("gpt2-large", "gpt2-large"),
        ("llama-2-13b", "decapoda-research_llama-13b-hf"),
    ],
)
def test_flat_configs_of_the_same_model_agree(data_dir: Path, hf: str, flat: str) -> None:
    model = read_hf_config(data_dir / "model_configs" / "hf" / f"{hf}.config.json")
    values = json.loads((data_dir / "model_configs" / "flat" / f"{flat}.json").read_text())
    shape = (model.num_hidden_layers, model.hidden_size, model.num_attention_heads, model.vocab_size)
    assert shape == tuple(values[key] for key in ("num_layers", "hidden_dim", "n_head", "vocab_size"))
    # The flat file's width of LLaMA's feed-forward block is wrong, as its README says.
    if values["model_type"] != "llama":
        assert model.intermediate_size == values["ffn_embed_dim"]


def test_llama_fills_in_what_old_files_leave_out() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    model = spec(config, head_dim=None)
    assert model.family is ModelFamily.LLAMA
    assert (model.num_key_value_heads, model.head_dim) == (4, 16)
    assert (model.rope_theta, model.rope_scaling, model.hidden_act) == (10_000.0, None, "silu")
    assert not model.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({}, (False, False, False, False)),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ({"model_type": "mistral", "sliding_window": None}, (False, False, False, False)),
        ({"model_type": "qwen2"}, (True, False, False, False)),
        ({"model_type": "qwen3", "head_dim": 32}, (False, False, False, True)),
    ],
)
def test_biases_and_head_norms_are_those_of_the_family(
    changes: dict[str, Any], biases: tuple[bool, bool, bool, bool]
) -> None:
    model = spec(LLAMA, **changes)
    found = (model.attention_bias, model.attention_output_bias, model.mlp_bias, model.qk_norm)
    assert found == biases


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 500_000}, 500_000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, 5e5, LLAMA3_SCALING),
        ({"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}, 5e5, LLAMA3_SCALING),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling(rope_type="linear", factor=2.0)),
    ],
)
def test_rotary_keys_of_transformers_4_and_5(
    changes: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    model = spec(LLAMA, **changes)
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)


def test_gpt2_has_biases_and_four_times_the_width() -> None:
    model = spec(GPT2)
    assert model.family is ModelFamily.GPT2
    assert (model.num_key_value_heads, model.head_dim, model.intermediate_size) == (4, 16, 256)
    assert (model.attention_bias, model.attention_output_bias, model.mlp_bias) == (True, True, True)
    assert (model.hidden_act, model.tie_word_embeddings, model.norm_eps) == ("gelu_new", True, 1e-5)
    assert spec(GPT2, n_inner=96).intermediate_size == 96


@pytest.mark.parametrize(
    ("changes", "act", "gated"),
    [
        ({}, "relu", False),
        ({"feed_forward_proj": "gated-gelu"}, "gelu_new", True),
        ({"feed_forward_proj": "gated-silu"}, "silu", True),
        ({"feed_forward_proj": "gelu"}, "gelu", False),
    ],
)
def test_t5_counts_pairs_of_layers_and_may_be_gated(changes: dict[str, Any], act: str, gated: bool) -> None:
    model = spec(T5, **changes)
    assert (model.family, model.num_hidden_layers) == (ModelFamily.T5, 2)
    assert (model.hidden_act, model.is_gated_act, model.is_gated) == (act, gated, gated)
    # Heads need not fill the hidden width; positions have no limit.
    assert (model.head_dim, model.query_size, model.max_position_embeddings) == (32, 128, 2048)
    assert (model.attention_bias, model.attention_output_bias, model.mlp_bias) == (False, False, False)


def test_experts_are_read_under_both_spellings() -> None:
    mixtral = spec(LLAMA, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert (mixtral.num_experts, mixtral.num_experts_per_token, mixtral.moe_intermediate_size) == (8, 2, 96)
    qwen = spec(LLAMA, **QWEN3_MOE)
    assert (qwen.num_experts, qwen.num_experts_per_token, qwen.moe_intermediate_size) == (16, 4, 24)
    assert qwen.qk_norm
    assert spec(LLAMA).num_experts == 0


def test_opt_has_biases_and_as_many_key_value_heads_as_heads() -> None:
    model = spec(OPT)
    assert model.family is ModelFamily.OPT
    assert (model.num_key_value_heads, model.head_dim, model.intermediate_size) == (4, 16, 96)
    assert (model.attention_bias, model.attention_output_bias, model.mlp_bias) == (True, True, True)
    assert (model.hidden_act, model.tie_word_embeddings) == ("relu", True)
    assert not spec(OPT, enable_bias=False).mlp_bias


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 128},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2},
    ],
)
def test_windows_that_cut_nothing_are_accepted(changes: dict[str, Any]) -> None:
    assert spec(LLAMA, **changes).max_position_embeddings == 128


@pytest.mark.parametrize(
    ("config", "changes", "problem"),
    [
        (LLAMA, {"model_type": "mistral", "sliding_window": 64}, "sliding_window=64 is below"),
        (
            LLAMA,
            {"model_type": "mistral", "max_position_embeddings": 8192},
            "sliding_window=4096 is below max_position_embeddings=8192",
        ),
        (
            LLAMA,
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "sliding_window=64 is below",
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type='yarn'"),
        (LLAMA, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type='dynamic'"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between kinds of layers"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        (LLAMA, {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "must be below high_freq_factor"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
        (LLAMA, {"num_attention_heads": 5}, "hidden_size=64 is no multiple of num_attention_heads=5"),
        (LLAMA, {"model_type": "qwen3"}, "head_dim is missing"),
        (LLAMA, {"model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        (LLAMA, {"model_type": None}, "model_type is missing"),
        (LLAMA, {"model_type": 3}, "model_type=3 must be a name"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        (LLAMA, {"hidden_size": 64.0}, "hidden_size=64.0 must be an integer"),
        (LLAMA, {"hidden_size": True}, "hidden_size=True must be an integer"),
        (LLAMA, {"vocab_size": 0}, "vocab_size=0 must be an integer of at least 1"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before=false is not supported"),
        (OPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=true is not supported"),
        (
            OPT,
            {"word_embed_proj_dim": 32},
            "word_embed_proj_dim=32 is not supported (embeddings of another width than the layers, as in "
            "OPT-350M); allowed: hidden_size=64",
        ),
        (OPT, {"num_attention_heads": 3}, "hidden_size=64 is no multiple of num_attention_heads=3"),
        (GPT2, {"n_head": 3}, "n_embd=64 is no multiple of n_head=3"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=true is not supported"),
        (GPT2, {"n_embd": None}, "n_embd is missing"),
        (T5, {"num_decoder_layers": 3}, "num_decoder_layers=3 is not supported, since stages hold as many"),
        (T5, {"is_encoder_decoder": False}, "is_encoder_decoder=false is not supported"),
        (T5, {"feed_forward_proj": "sparse-relu"}, "feed_forward_proj='sparse-relu' is not supported"),
        (T5, {"d_kv": None}, "d_kv is missing"),
        (LLAMA, {"model_type": "mixtral"}, "num_local_experts is missing"),
        (
            LLAMA,
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
            "sliding_window=64 is below",
        ),
        (LLAMA, QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        (LLAMA, QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported"),
        (
            LLAMA,
            QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            "sliding_window=64 is below",
        ),
    ],
)
def test_what_the_runtime_does_not_compute_is_refused_with_file_and_key(
    config: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(config, **changes)
    assert str(caught.value).startswith("tiny/config.json: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"tiny/config.json: {key} is missing"):
        spec({name: value for name, value in LLAMA.items() if name != key})


def test_a_directory_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    directory = tmp_path / "tiny-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    model = read_hf_config(directory)
    assert model.name == "tiny-llama"
    assert read_hf_config(directory / "config.json") == model


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (json.dumps(LLAMA).encode()[:-20], "not JSON, corrupt or truncated"),
        (b"[1, 2]", "expected a JSON object of config keys, found list"),
        (b"\xff\xfe\x00", "cannot be read as text"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_hf_config(file)
    assert str(file) in str(caught.value)
    assert problem in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent: no such file or directory"):
        read_hf_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"the directory has no config\.json"):
        read_hf_config(tmp_path)
