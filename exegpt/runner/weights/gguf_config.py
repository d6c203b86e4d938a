"""Model shapes from the metadata of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exegpt.errors import WeightsError
from exegpt.runner.weights.gguf_header import GgufHeader, read_gguf_header
from exegpt.specs import ModelFamily, ModelSpec, RopeScaling

# Mistral's files carry the architecture llama.
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def gguf_model_spec(path: Path, name: str) -> ModelSpec:
    """Shape of the model in a GGUF file, from its metadata and tensor list; reads no weights.

    Raises
    ------
    WeightsError
        If the file is corrupt, the architecture is not one of `llama`, `qwen2` and `qwen3`, or the
        model asks for something the runtime does not compute.
    """
    return spec_of_header(read_gguf_header(path), name)


def spec_of_header(header: GgufHeader, name: str) -> ModelSpec:
    """Shape of the model that a header describes; see `gguf_model_spec`."""
    keys = _Metadata(header)
    _refuse_unsupported(keys)
    tensors = header.tensors
    heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{header.path}: no tensor token_embd.weight (model.weights)")
    return ModelSpec(
        name=name,
        family=ModelFamily.LLAMA,
        num_hidden_layers=keys.integer("block_count"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=keys.integer("attention.key_length", hidden_size // heads),
        intermediate_size=keys.integer("feed_forward_length"),
        vocab_size=embedding.shape[0],
        max_position_embeddings=keys.integer("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        hidden_act="silu",
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(keys),
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )


class _Metadata:
    """Checked access to the keys of a file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = header.metadata.get("general.architecture")
        if self.architecture not in GGUF_ARCHITECTURES:
            raise WeightsError(
                f"{header.path}: general.architecture={self.architecture!r} is not supported; known "
                f"architectures: {list(GGUF_ARCHITECTURES)} (model.weights)"
            )

    def error(self, key: str, problem: str) -> WeightsError:
        return WeightsError(f"{self.header.path}: {self.architecture}.{key}{problem} (model.weights)")

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, " is missing")
        if type(value) is not int or value < 1:
            raise self.error(key, f"={value!r} must be an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, " is missing")
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(key, f"={value!r} must be a finite number above 0")
        # Stored in float32, which holds seven digits: 1e-5 would come back as 9.99999975e-6.
        return float(f"{value:.7g}")


def _refuse_unsupported(keys: _Metadata) -> None:
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // heads)
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.error(
            "attention.head_count", f"={heads} is no multiple of attention.head_count_kv={kv_heads}"
        )
    if keys.get("expert_count", 0):
        raise keys.error(
            "expert_count", f"={keys.get('expert_count')}: mixtures of experts are not supported"
        )
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f" differs from the key length {head_dim}: not supported")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.error(
            "rope.dimension_count", f" must be {head_dim}: rotating a part of a head is not supported"
        )
    window = keys.get("attention.sliding_window")
    if window and window < keys.integer("context_length"):
        raise keys.error("attention.sliding_window", f"={window}: attention in a window is not supported")
    if "rope_freqs.weight" in keys.header.tensors:
        raise WeightsError(
            f"{keys.header.path}: tensor rope_freqs.weight (frequencies scaled as in Llama 3.1) is not "
            "supported; use the model's safetensors (model.weights)"
        )


def _rope_scaling(keys: _Metadata) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise keys.error("rope.scaling.type", f"={kind!r} is not supported; known: ['linear', 'none']")
    return RopeScaling(rope_type="linear", factor=keys.number("rope.scaling.factor"))
