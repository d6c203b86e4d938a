"""What the model families share: products, norms, activations, and the shape of a layer.

Every eager call costs microseconds and decoding makes them per layer and token, so products are
fused (Q, K and V; gate and up) and residuals are added inside the product where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from exegpt.errors import ConfigError
from exegpt.runner.models.parallel import TensorParallel
from exegpt.runner.models.shards import ShardReader

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation that Hugging Face configs call `name`; ConfigError if there is none."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"model.hidden_act={name!r} is not known; allowed: {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Rotation(NamedTuple):
    """Rotary factors of one call's tokens, shape (n, 1, head_dim) each.

    `sin` carries the sign of the half that it is multiplied with: a head x becomes
    x * cos + roll(x, head_dim / 2) * sin.
    """

    cos: Tensor
    sin: Tensor


class DecoderLayer(Protocol):
    """One transformer layer on one rank, cut where attention is.

    The caller stores the keys and values and attends in between, so that a profiler times the two
    sides, which cost by tokens, apart from attention, which costs by context.
    """

    def pre_attention(self, hidden: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `hidden` (n, h): (n, num_heads or num_kv_heads, head_dim)."""

    def post_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (n, h) from its input (n, h) and attention's (n, num_heads, head_dim)."""


class Family(Protocol):
    """What tells one model family from another: layers, names of tensors, and how positions enter."""

    embedding_name: str

    def embedding(self, shards: ShardReader) -> Embedding:
        """The embedding of tokens (and positions)."""

    def layer(self, index: int, shards: ShardReader) -> DecoderLayer:
        """Layer `index` of the whole model."""

    def final_norm(self, shards: ShardReader) -> Norm:
        """The norm before the output matrix."""

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Rotary factors of `positions` (n,); None where positions enter at the embedding."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm where there is a bias; over the last dimension."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Linear:
    """A product with a matrix of shape (out, in), column-parallel or not parallel at all."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def read(
        cls, shards: ShardReader, names: list[str], sizes: list[int], width: int, *, has_bias: bool
    ) -> Linear:
        """Several column-parallel products of one input (n, width), fused; `sizes` are those of all ranks."""
        weight = shards.column_parallel([f"{name}.weight" for name in names], sizes, width)
        bias = shards.column_parallel([f"{name}.bias" for name in names], sizes) if has_bias else None
        return cls(weight, bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RowLinear:
    """A row-parallel product, summed over the ranks and added to the residual."""

    weight: Tensor
    bias: Tensor | None
    tp: TensorParallel

    @classmethod
    def read(cls, shards: ShardReader, name: str, height: int, width: int, *, has_bias: bool) -> RowLinear:
        """The product from `width` features of all ranks together to `height`."""
        weight = shards.row_parallel(f"{name}.weight", height, width)
        bias = shards.row_parallel_bias(f"{name}.bias", height) if has_bias else None
        return cls(weight, bias, shards.tp)

    def add_to(self, residual: Tensor, hidden: Tensor) -> Tensor:
        """`residual` (n, h) + the whole product of `hidden` (n, in / tp_size); a new tensor."""
        if self.tp.size == 1 and self.bias is None:
            return torch.addmm(residual, hidden, self.weight.t())
        return self.tp.all_reduce(F.linear(hidden, self.weight, self.bias)).add_(residual)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding, with learned positions where the family has them."""

    tokens: Tensor
    positions: Tensor | None = None
    position_offset: int = 0

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = F.embedding(token_ids, self.tokens)
        if self.positions is not None:
            hidden += F.embedding(positions + self.position_offset, self.positions)
        return hidden
