"""From the keys of each Hugging Face architecture to `ModelSpec`; `hf_config` reads the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from exegpt.hf_keys import HfKeys
from exegpt.specs import ModelFamily, ModelSpec, RopeScaling

_ROPE_TYPES = ("default", "linear", "llama3")

# T5's relative positions have no limit. Our choice: room for the paper's longest task (1,024 + 640 tokens).
T5_WINDOW_TOKENS = 2048


def _llama(keys: HfKeys, model_type: str, name: str) -> ModelSpec:
    heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    # The classes of Qwen and Mistral have defaults of their own (32 and 8 K/V heads), which a
    # file that leaves the key out hardly means; only LLaMA's default is "as many as heads".
    kv_heads = keys.integer("num_key_value_heads", heads if model_type == "llama" else None)
    if model_type in ("qwen3", "qwen3_moe"):
        head_dim = keys.integer("head_dim")
    elif keys.has("head_dim"):
        head_dim = keys.integer("head_dim")
    elif hidden_size % heads:
        raise keys.error(
            "hidden_size",
            f"={hidden_size} is no multiple of num_attention_heads={heads} and head_dim is absent",
        )
    else:
        head_dim = hidden_size // heads
    max_positions = keys.integer("max_position_embeddings")
    _refuse_sliding_window(keys, model_type, max_positions)
    theta, scaling = _rope(keys)
    # What has a bias: LLaMA and Qwen3 switch all four attention products, Qwen2 always has it on
    # q, k and v alone, Mistral never (the modelling files of transformers).
    may_switch = model_type in ("llama", "qwen3", "qwen3_moe")
    switched = keys.flag("attention_bias", False) if may_switch else False
    experts, experts_per_token, expert_size = _experts(keys, model_type)
    return ModelSpec(
        name=name,
        family=ModelFamily.LLAMA,
        num_hidden_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=max_positions,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        hidden_act=keys.text("hidden_act", "silu"),
        norm_eps=keys.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=switched or model_type == "qwen2",
        attention_output_bias=switched,
        mlp_bias=keys.flag("mlp_bias", False) if model_type == "llama" else False,
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        num_experts=experts,
        num_experts_per_token=experts_per_token,
        moe_intermediate_size=expert_size,
    )


def _experts(keys: HfKeys, model_type: str) -> tuple[int, int, int]:
    """Experts, those of one token, and their width; zeros where every layer has one feed-forward block."""
    if model_type == "mixtral":
        experts, size = keys.integer("num_local_experts"), keys.integer("intermediate_size")
        return experts, keys.integer("num_experts_per_tok"), size
    if model_type != "qwen3_moe":
        return 0, 0, 0
    if keys.integer("decoder_sparse_step", 1) != 1:
        raise keys.error(
            "decoder_sparse_step",
            f"={keys.values['decoder_sparse_step']} is not supported (layers of two kinds); allowed: 1",
        )
    if keys.values.get("mlp_only_layers"):
        raise keys.error(
            "mlp_only_layers",
            f"={keys.values['mlp_only_layers']} is not supported (layers of two kinds); allowed: []",
        )
    experts, size = keys.integer("num_experts"), keys.integer("moe_intermediate_size")
    return experts, keys.integer("num_experts_per_tok"), size


def _gpt2(keys: HfKeys, model_type: str, name: str) -> ModelSpec:
    heads, hidden_size = keys.integer("n_head"), keys.integer("n_embd")
    if hidden_size % heads:
        raise keys.error("n_embd", f"={hidden_size} is no multiple of n_head={heads}")
    keys.only("add_cross_attention", False, "the model is a decoder alone")
    return ModelSpec(
        name=name,
        family=ModelFamily.GPT2,
        num_hidden_layers=keys.integer("n_layer"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        intermediate_size=keys.integer("n_inner", 4 * hidden_size),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("n_positions"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        hidden_act=keys.text("activation_function", "gelu_new"),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    )


def _t5(keys: HfKeys, model_type: str, name: str) -> ModelSpec:
    heads, layers = keys.integer("num_heads"), keys.integer("num_layers")
    keys.only("is_encoder_decoder", True, "the model is an encoder and a decoder")
    decoder_layers = keys.integer("num_decoder_layers", layers)
    if decoder_layers != layers:
        raise keys.error(
            "num_decoder_layers",
            f"={decoder_layers} is not supported, since stages hold as many encoder as decoder layers; "
            f"allowed: num_layers={layers}",
        )
    gate, _, act = keys.text("feed_forward_proj", "relu").rpartition("-")
    if gate not in ("", "gated"):
        raise keys.error("feed_forward_proj", f"='{gate}-{act}' is not supported; allowed: ACT or gated-ACT")
    return ModelSpec(
        name=name,
        family=ModelFamily.T5,
        num_hidden_layers=layers,
        hidden_size=keys.integer("d_model"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=keys.integer("d_kv"),
        intermediate_size=keys.integer("d_ff"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=T5_WINDOW_TOKENS,
        tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        # transformers reads gated-gelu as its gelu_new.
        hidden_act="gelu_new" if (gate, act) == ("gated", "gelu") else act,
        norm_eps=keys.number("layer_norm_epsilon", 1e-6),
        is_gated_act=gate == "gated",
        relative_attention_num_buckets=keys.integer("relative_attention_num_buckets", 32),
    )


def _opt(keys: HfKeys, model_type: str, name: str) -> ModelSpec:
    heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    if keys.integer("word_embed_proj_dim", hidden_size) != hidden_size:
        before = keys.flag("do_layer_norm_before", True)
        also = "" if before else ", and do_layer_norm_before=false: norms behind attention and MLP"
        raise keys.error(
            "word_embed_proj_dim",
            f"={keys.values['word_embed_proj_dim']} is not supported (embeddings of another width than the "
            f"layers, as in OPT-350M{also}); allowed: hidden_size={hidden_size}",
        )
    keys.only("do_layer_norm_before", True, "norms come before attention and MLP, as in all OPT but 350M")
    keys.only("_remove_final_layer_norm", False, "the model ends with a norm")
    keys.only("layer_norm_elementwise_affine", True, "norms have weights")
    if hidden_size % heads:
        raise keys.error("hidden_size", f"={hidden_size} is no multiple of num_attention_heads={heads}")
    bias = keys.flag("enable_bias", True)
    return ModelSpec(
        name=name,
        family=ModelFamily.OPT,
        num_hidden_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        intermediate_size=keys.integer("ffn_dim"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        hidden_act=keys.text("activation_function", "relu"),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
    )


def _refuse_sliding_window(keys: HfKeys, model_type: str, max_positions: int) -> None:
    """Raise if any layer would attend to less than the whole context."""
    if model_type == "llama":
        return
    if model_type == "mistral":
        # Null switches the window off; a file without the key means the class's default of 4096.
        window = 4096 if "sliding_window" not in keys.values else keys.values["sliding_window"]
    elif model_type == "mixtral":
        window = keys.values.get("sliding_window")
    elif model_type == "qwen3_moe":
        # Its window, once switched on, is that of every layer.
        window = keys.values.get("sliding_window") if keys.flag("use_sliding_window", False) else None
    else:
        # Qwen files carry a window that `use_sliding_window` switches on, for the later layers.
        layer_types = keys.values.get("layer_types")
        if isinstance(layer_types, list):
            windowed = "sliding_attention" in layer_types
        else:
            windowed = keys.integer("max_window_layers", 28) < keys.integer("num_hidden_layers")
        if not keys.flag("use_sliding_window", False) or not windowed:
            return
        window = keys.values.get("sliding_window")
    if window is not None and keys.integer("sliding_window", window) < max_positions:
        raise keys.error(
            "sliding_window",
            f"={window} is below max_position_embeddings={max_positions}: attention in a window is not "
            "supported; serve shorter contexts by lowering max_position_embeddings to the window",
        )


def _rope(keys: HfKeys) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies.

    transformers 5 writes `rope_parameters` {rope_type, rope_theta, ...}, earlier ones `rope_theta`
    and `rope_scaling` {rope_type (or type), ...}.
    """
    block = "rope_parameters" if keys.has("rope_parameters") else "rope_scaling"
    values = keys.values.get(block)
    # 10,000 is the default of every class that is read here.
    theta = keys.number("rope_theta", 10_000.0)
    _refuse_partial_rotation(keys)
    if values is None:
        return theta, None
    if not isinstance(values, Mapping):
        raise keys.error(block, f"={values!r} must be an object")
    if any(isinstance(value, Mapping) for value in values.values()):
        raise keys.error(block, " differs between kinds of layers, which is not supported")
    rope = HfKeys(values, keys.source, f"{block}.")
    theta = rope.number("rope_theta", theta)
    _refuse_partial_rotation(rope)
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise rope.error("rope_type", f"={rope_type!r} is not supported; known: {list(_ROPE_TYPES)}")
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling(rope_type=rope_type, factor=rope.number("factor"))
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"={low} must be below high_freq_factor={high}")
    return theta, RopeScaling(
        rope_type=rope_type,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _refuse_partial_rotation(keys: HfKeys) -> None:
    factor = keys.number("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise keys.error("partial_rotary_factor", f"={factor} must be 1: heads are rotated as a whole")


# `model_type` -> the function that reads such a config.
BUILDERS: Mapping[str, Callable[[HfKeys, str, str], ModelSpec]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "opt": _opt,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _llama,
    "t5": _t5,
}
