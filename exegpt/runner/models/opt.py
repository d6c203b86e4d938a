"""OPT family: layer norms, learned positions, a feed-forward block without gate, biases.

Tensor names are those of transformers' checkpoints.
"""

from __future__ import annotations

from torch import Tensor

from exegpt.runner.models.layers import Embedding, Linear, Norm, Rotation, RowLinear, activation
from exegpt.runner.models.shards import ShardReader
from exegpt.specs import ModelSpec

# The first two rows of OPT's position table are unused (Hugging Face OPTLearnedPositionalEmbedding).
POSITION_OFFSET = 2


class OptLayer:
    """One layer; see `layers.DecoderLayer`."""

    def __init__(self, model: ModelSpec, index: int, shards: ShardReader) -> None:
        prefix = f"model.decoder.layers.{index}."
        h, ff, tp = model.hidden_size, model.intermediate_size, shards.tp
        self._head_dim = model.head_dim
        num_kv_heads = model.num_key_value_heads // tp.size
        self._heads = (model.num_attention_heads // tp.size, num_kv_heads, num_kv_heads)
        self._act = activation(model.hidden_act)

        self._attention_norm = _layer_norm(shards, prefix + "self_attn_layer_norm", model)
        qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        qkv_sizes = [model.query_size, model.key_value_size, model.key_value_size]
        self._qkv = Linear.read(shards, qkv, qkv_sizes, h, has_bias=model.attention_bias)
        self._output = RowLinear.read(
            shards, prefix + "self_attn.out_proj", h, model.query_size, has_bias=model.attention_output_bias
        )
        self._mlp_norm = _layer_norm(shards, prefix + "final_layer_norm", model)
        self._up = Linear.read(shards, [prefix + "fc1"], [ff], h, has_bias=model.mlp_bias)
        self._down = RowLinear.read(shards, prefix + "fc2", h, ff, has_bias=model.mlp_bias)

    def pre_attention(self, hidden: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `hidden` (n, h); positions came in at the embedding."""
        assert rotation is None, "OPT does not turn queries and keys"
        qkv = self._qkv(self._attention_norm(hidden)).view(-1, sum(self._heads), self._head_dim)
        query, key, value = qkv.split_with_sizes(self._heads, 1)
        return query, key, value

    def post_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (n, h)."""
        hidden = self._output.add_to(hidden, attended.flatten(1))
        return self._down.add_to(hidden, self._act(self._up(self._mlp_norm(hidden))))


class OptFamily:
    """Names and positions of the OPT family; see `layers.Family`."""

    embedding_name = "model.decoder.embed_tokens.weight"

    def __init__(self, model: ModelSpec) -> None:
        self._model = model

    def embedding(self, shards: ShardReader) -> Embedding:
        """The embedding of tokens and positions."""
        model = self._model
        num_positions = model.max_position_embeddings + POSITION_OFFSET
        return Embedding(
            shards.replicated(self.embedding_name, model.vocab_size, model.hidden_size),
            shards.replicated("model.decoder.embed_positions.weight", num_positions, model.hidden_size),
            POSITION_OFFSET,
        )

    def layer(self, index: int, shards: ShardReader) -> OptLayer:
        """Layer `index` of the whole model."""
        return OptLayer(self._model, index, shards)

    def final_norm(self, shards: ShardReader) -> Norm:
        """The norm before the output matrix."""
        return _layer_norm(shards, "model.decoder.final_layer_norm", self._model)

    def rotation(self, positions: Tensor) -> None:
        """None: positions are learned and added at the embedding."""


def _layer_norm(shards: ShardReader, name: str, model: ModelSpec) -> Norm:
    weight = shards.replicated(f"{name}.weight", model.hidden_size)
    return Norm(weight, model.norm_eps, shards.replicated(f"{name}.bias", model.hidden_size))
