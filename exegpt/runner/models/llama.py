"""LLaMA family: RMS norms, rotary positions, grouped K/V heads, SwiGLU.

Covers SmolLM2 and Mistral, Qwen2 (biases of Q, K and V) and Qwen3 (norms of each query and key
head). Tensor names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exegpt.runner.models.layers import Embedding, Linear, Norm, Rotation, RowLinear, activation
from exegpt.runner.models.rotary import inverse_frequencies, rotate_, rotation
from exegpt.runner.models.shards import ShardReader
from exegpt.specs import ModelSpec


class LlamaLayer:
    """One layer; see `layers.DecoderLayer`."""

    def __init__(self, model: ModelSpec, index: int, shards: ShardReader) -> None:
        prefix = f"model.layers.{index}."
        h, ff, tp = model.hidden_size, model.intermediate_size, shards.tp
        self._head_dim = model.head_dim
        self._num_heads = model.num_attention_heads // tp.size
        self._num_kv_heads = model.num_key_value_heads // tp.size
        self._eps = model.norm_eps
        self._act = activation(model.hidden_act)

        self._input_norm = Norm(shards.replicated(prefix + "input_layernorm.weight", h), model.norm_eps)
        qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        qkv_sizes = [model.query_size, model.key_value_size, model.key_value_size]
        self._qkv = Linear.read(shards, qkv, qkv_sizes, h, has_bias=model.attention_bias)
        self._head_norms = self._read_head_norms(prefix, shards) if model.qk_norm else None
        self._output = RowLinear.read(
            shards, prefix + "self_attn.o_proj", h, model.query_size, has_bias=model.attention_output_bias
        )
        self._mlp_norm = Norm(
            shards.replicated(prefix + "post_attention_layernorm.weight", h), model.norm_eps
        )
        gate_up = [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"]
        self._gate_up = Linear.read(shards, gate_up, [ff, ff], h, has_bias=model.mlp_bias)
        self._down = RowLinear.read(shards, prefix + "mlp.down_proj", h, ff, has_bias=model.mlp_bias)

    def pre_attention(self, hidden: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `hidden` (n, h), rotated."""
        assert rotation is not None, "the LLaMA family turns queries and keys"
        num_turned = self._num_heads + self._num_kv_heads
        qkv = self._qkv(self._input_norm(hidden))
        qkv = qkv.view(-1, num_turned + self._num_kv_heads, self._head_dim)
        turned, value = qkv.split_with_sizes((num_turned, self._num_kv_heads), 1)
        if self._head_norms is not None:
            turned = F.rms_norm(turned, (self._head_dim,), None, self._eps).mul_(self._head_norms)
        rotate_(turned, rotation)
        query, key = turned.split_with_sizes((self._num_heads, self._num_kv_heads), 1)
        return query, key, value

    def post_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (n, h)."""
        hidden = self._output.add_to(hidden, attended.flatten(1))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, -1)
        return self._down.add_to(hidden, self._act(gate).mul_(up))

    def _read_head_norms(self, prefix: str, shards: ShardReader) -> Tensor:
        """Norm weights of query heads, then key heads, shape (num_turned, head_dim).

        All query heads share one weight and all key heads another; a row for each head lets one
        product scale both.
        """
        query = shards.replicated(prefix + "self_attn.q_norm.weight", self._head_dim)
        key = shards.replicated(prefix + "self_attn.k_norm.weight", self._head_dim)
        return torch.stack([query] * self._num_heads + [key] * self._num_kv_heads)


class LlamaFamily:
    """Names and positions of the LLaMA family; see `layers.Family`."""

    embedding_name = "model.embed_tokens.weight"

    def __init__(self, model: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._dtype = dtype
        self._frequencies = inverse_frequencies(model).to(device)

    def embedding(self, shards: ShardReader) -> Embedding:
        """The token embedding."""
        return Embedding(
            shards.replicated(self.embedding_name, self._model.vocab_size, self._model.hidden_size)
        )

    def layer(self, index: int, shards: ShardReader) -> LlamaLayer:
        """Layer `index` of the whole model."""
        return LlamaLayer(self._model, index, shards)

    def final_norm(self, shards: ShardReader) -> Norm:
        """The norm before the output matrix."""
        return Norm(shards.replicated("model.norm.weight", self._model.hidden_size), self._model.norm_eps)

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotary factors of `positions` (n,)."""
        return rotation(positions, self._frequencies, self._dtype)
