"""What every source of weights offers, and which tensors a model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from exegpt.errors import WeightsError
from exegpt.specs import ModelFamily, ModelSpec

if TYPE_CHECKING:
    import torch


Shape = tuple[int, ...]


class WeightReader(Protocol):
    """Tensors of one model under their Hugging Face names; only what is asked for is materialised."""

    @property
    def source(self) -> str:
        """Where the tensors come from, for messages."""

    def names(self) -> frozenset[str]:
        """Names of all tensors, as transformers' checkpoints have them."""

    def shape(self, name: str) -> Shape:
        """Shape of a tensor, told without reading its data."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """A tensor, or the part of it that one rank holds.

        Parameters
        ----------
        name : str
            One of `names()`.
        rows, columns : slice, optional
            Part of the first and of the second dimension, steps of 1; all of it by default.

        Returns
        -------
        torch.Tensor, shape (rows, columns) or (rows,)
            A floating type, the source's own; on the CPU, not shared with the file.

        Raises
        ------
        WeightsError
            If there is no such tensor, or its data cannot be read.
        """


def tensor_shapes(model: ModelSpec) -> dict[str, Shape]:
    """Every tensor of a model, by its Hugging Face name, with its shape.

    Tied matrices stand once: a model with `tie_word_embeddings` has no `lm_head.weight`.

    Raises
    ------
    ConfigError
        If the runtime has no layers of the model's kind.
    """
    model.require_runnable()
    match model.family:
        case ModelFamily.LLAMA:
            shapes = _llama_shapes(model)
        case ModelFamily.OPT:
            shapes = _opt_shapes(model)
        case _:
            raise AssertionError(f"{model.family} is refused before")
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return shapes


def _linear(out_size: int, in_size: int, bias: bool) -> Mapping[str, Shape]:
    return {"weight": (out_size, in_size)} | ({"bias": (out_size,)} if bias else {})


def _flatten(prefix: str, modules: Mapping[str, Mapping[str, Shape]]) -> dict[str, Shape]:
    return {
        f"{prefix}{module}.{part}": shape
        for module, parts in modules.items()
        for part, shape in parts.items()
    }


def _llama_shapes(model: ModelSpec) -> dict[str, Shape]:
    h, q, kv, ff = model.hidden_size, model.query_size, model.key_value_size, model.intermediate_size
    norm: Mapping[str, Shape] = {"weight": (h,)}
    layer: dict[str, Mapping[str, Shape]] = {
        "input_layernorm": norm,
        "self_attn.q_proj": _linear(q, h, model.attention_bias),
        "self_attn.k_proj": _linear(kv, h, model.attention_bias),
        "self_attn.v_proj": _linear(kv, h, model.attention_bias),
        "self_attn.o_proj": _linear(h, q, model.attention_output_bias),
        "post_attention_layernorm": norm,
        "mlp.gate_proj": _linear(ff, h, model.mlp_bias),
        "mlp.up_proj": _linear(ff, h, model.mlp_bias),
        "mlp.down_proj": _linear(h, ff, model.mlp_bias),
    }
    if model.qk_norm:
        layer["self_attn.q_norm"] = layer["self_attn.k_norm"] = {"weight": (model.head_dim,)}
    shapes = _flatten("model.", {"embed_tokens": {"weight": (model.vocab_size, h)}, "norm": norm})
    for index in range(model.num_hidden_layers):
        shapes |= _flatten(f"model.layers.{index}.", layer)
    return shapes


def _opt_shapes(model: ModelSpec) -> dict[str, Shape]:
    h, q, kv, ff = model.hidden_size, model.query_size, model.key_value_size, model.intermediate_size
    norm: Mapping[str, Shape] = {"weight": (h,), "bias": (h,)}
    layer: dict[str, Mapping[str, Shape]] = {
        "self_attn_layer_norm": norm,
        "self_attn.q_proj": _linear(q, h, model.attention_bias),
        "self_attn.k_proj": _linear(kv, h, model.attention_bias),
        "self_attn.v_proj": _linear(kv, h, model.attention_bias),
        "self_attn.out_proj": _linear(h, q, model.attention_output_bias),
        "final_layer_norm": norm,
        "fc1": _linear(ff, h, model.mlp_bias),
        "fc2": _linear(h, ff, model.mlp_bias),
    }
    top: dict[str, Mapping[str, Shape]] = {
        "embed_tokens": {"weight": (model.vocab_size, h)},
        # OPT's position table starts at offset 2 (Hugging Face OPTLearnedPositionalEmbedding).
        "embed_positions": {"weight": (model.max_position_embeddings + 2, h)},
        "final_layer_norm": norm,
    }
    shapes = _flatten("model.decoder.", top)
    for index in range(model.num_hidden_layers):
        shapes |= _flatten(f"model.decoder.layers.{index}.", layer)
    return shapes


def check_weights(reader: WeightReader, model: ModelSpec) -> None:
    """Raise WeightsError unless every tensor of `model` is there in the right shape; reads no data."""
    names = reader.names()
    for name, shape in tensor_shapes(model).items():
        if name not in names:
            raise WeightsError(
                f"{reader.source}: no tensor {name} {list(shape)}, which {model.name} needs; are these the "
                f"weights of that model? (model.weights, model.name={model.name})"
            )
        if reader.shape(name) != shape:
            raise WeightsError(
                f"{reader.source}: tensor {name} has shape {list(reader.shape(name))}, {model.name} needs "
                f"{list(shape)}; are these the weights of that model? (model.weights)"
            )


def bounds(part: slice | None, size: int) -> tuple[int, int]:
    """Start and stop of a slice with steps of 1 within `size` elements."""
    start, stop, step = (part or slice(None)).indices(size)
    assert step == 1, "weights are split into contiguous parts"
    return start, max(start, stop)


def missing_tensor(source: str, name: str) -> WeightsError:
    """The error for a name that a source does not have."""
    return WeightsError(f"{source}: no tensor {name}; are these the weights of the model? (model.weights)")
