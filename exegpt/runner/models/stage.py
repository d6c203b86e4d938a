"""One pipeline stage of a model on one rank: its layers, its slices of weights, its two phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from exegpt.errors import ConfigError
from exegpt.kernels import append_kv, encode_attention, paged_decode_attention
from exegpt.runner.kv_cache import KVCache
from exegpt.runner.models.layers import DecoderLayer, Embedding, Family, Linear, Norm, Rotation
from exegpt.runner.models.llama import LlamaFamily
from exegpt.runner.models.opt import OptFamily
from exegpt.runner.models.parallel import TensorParallel
from exegpt.runner.models.shards import ShardReader, vocabulary_range
from exegpt.specs import ModelFamily, ModelSpec

if TYPE_CHECKING:
    from exegpt.runner.weights import WeightReader


class StageModel:
    """Layers [first, last + 1) of a model, on one rank of the stage's tensor-parallel group.

    Shapes below: n packed prompt tokens, b rows that decode, h = `model.hidden_size`. Nothing is
    padded. Keys and values are written to the cache before attention reads them.

    Parameters
    ----------
    model : ModelSpec
        Shape of the whole model.
    layers : tuple of int
        First layer and the one after the last.
    tp : TensorParallel
        This rank's place in the stage's group.
    dtype, device
        Of weights, activations and K/V.

    Attributes
    ----------
    is_first, is_last : bool
        Whether the stage embeds tokens, and whether it gives logits.
    num_heads, num_kv_heads : int
        Heads on this rank.
    layers : tuple of DecoderLayer
        Empty before `load`.
    seam : callable, optional
        Called with the name of each part as it ends: `embed`, `linear` (twice a layer: all but
        attention, storing K/V included), `encode_attention`, `decode_attention`, `head`. For a
        profiler; None costs nothing.

    Raises
    ------
    ConfigError
        If the runtime has no such layers, they lie outside the model, or the model cannot be split over
        `tp.size` ranks.
    """

    def __init__(
        self,
        model: ModelSpec,
        layers: tuple[int, int],
        tp: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        model.require_runnable()
        if not 0 <= layers[0] < layers[1] <= model.num_hidden_layers:
            raise ConfigError(
                f"stages[].layers={list(layers)} of {model.name}: must be [first, last + 1] within "
                f"0..{model.num_hidden_layers}"
            )
        if tp.size not in model.tp_sizes(tp.size):
            raise ConfigError(
                f"tp_size={tp.size} does not divide the heads of {model.name}; "
                f"allowed up to it: {list(model.tp_sizes(tp.size))}"
            )
        self.model = model
        self.layer_range = layers
        self.tp = tp
        self.dtype = dtype
        self.device = torch.device(device)
        self.is_first = layers[0] == 0
        self.is_last = layers[1] == model.num_hidden_layers
        self.num_layers = layers[1] - layers[0]
        self.num_heads = model.num_attention_heads // tp.size
        self.num_kv_heads = model.num_key_value_heads // tp.size
        self.scale = float(model.head_dim**-0.5)
        self.layers: tuple[DecoderLayer, ...] = ()
        self.seam: Callable[[str], None] | None = None
        self._family = self._new_family()
        self._embedding: Embedding | None = None
        self._final_norm: Norm | None = None
        self._output: Linear | None = None
        self._weight_bytes = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that `load` read; a matrix held once counts once."""
        return self._weight_bytes

    @torch.inference_mode()
    def load(self, reader: WeightReader) -> None:
        """Read this rank's slices of this stage's weights, and nothing else.

        Raises
        ------
        WeightsError
            If a tensor is missing or of another shape.
        """
        shards = ShardReader(reader, self.tp, dtype=self.dtype, device=self.device)
        self.layers = tuple(self._family.layer(index, shards) for index in range(*self.layer_range))
        if self.is_first:
            self._embedding = self._family.embedding(shards)
        if self.is_last:
            self._final_norm = self._family.final_norm(shards)
            self._output = Linear(self._output_weight(shards))
        self._weight_bytes = shards.num_bytes

    def rotation(self, positions: Tensor) -> Rotation | None:
        """What every layer's `pre_attention` needs to know of `positions` (n,); made once per call."""
        return self._family.rotation(positions)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (n, h) of `token_ids` (n,) at `positions` (n,); on the first stage only."""
        assert self._embedding is not None, "embed() belongs to the first stage, after load()"
        hidden = self._embedding(token_ids, positions)
        self._ended("embed")
        return hidden

    @torch.inference_mode()
    def encode(
        self, hidden: Tensor, positions: Tensor, lengths: Sequence[int], cache: KVCache, slots: Tensor
    ) -> Tensor:
        """Encode packed prompts.

        Parameters
        ----------
        hidden : tensor, shape (n, h)
            The prompts' tokens, one prompt after the other.
        positions : int64 tensor, shape (n,)
            Place of each token in its prompt.
        lengths : sequence of int
            Tokens of each prompt; their sum is n.
        cache : KVCache
            Takes the keys and values.
        slots : int64 tensor, shape (n,)
            Where in the cache: page * page_size + offset.

        Returns
        -------
        tensor, shape (n, h)
        """
        rotation = self.rotation(positions)
        for layer, k_pages, v_pages in zip(self.layers, cache.k, cache.v, strict=True):
            query, key, value = layer.pre_attention(hidden, rotation)
            append_kv(key, value, k_pages, v_pages, slots)
            self._ended("linear")
            attended = encode_attention(query, key, value, lengths, self.scale)
            self._ended("encode_attention")
            hidden = layer.post_attention(hidden, attended)
            self._ended("linear")
        return hidden

    @torch.inference_mode()
    def decode(
        self,
        hidden: Tensor,
        positions: Tensor,
        cache: KVCache,
        page_table: Tensor,
        context_lens: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """One more token of every row.

        Parameters
        ----------
        hidden : tensor, shape (b, h)
            The rows' newest tokens.
        positions : int64 tensor, shape (b,)
            Place of each in its sequence.
        cache : KVCache
            Holds the rows' earlier keys and values, takes the new ones.
        page_table : int32 tensor, shape (b, max_pages)
            Pages of each row, in order.
        context_lens : int32 tensor, shape (b,)
            Tokens that each row attends to, the new one included.
        slots : int64 tensor, shape (b,)
            Where in the cache the new keys and values go.

        Returns
        -------
        tensor, shape (b, h)
        """
        rotation = self.rotation(positions)
        for layer, k_pages, v_pages in zip(self.layers, cache.k, cache.v, strict=True):
            query, key, value = layer.pre_attention(hidden, rotation)
            append_kv(key, value, k_pages, v_pages, slots)
            self._ended("linear")
            attended = paged_decode_attention(query, k_pages, v_pages, page_table, context_lens, self.scale)
            self._ended("decode_attention")
            hidden = layer.post_attention(hidden, attended)
            self._ended("linear")
        return hidden

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> tuple[Tensor, int]:
        """Logits of this rank's share of the vocabulary; on the last stage only.

        Parameters
        ----------
        hidden : tensor, shape (b, h)
            Of the tokens to sample after.

        Returns
        -------
        logits : tensor, shape (b, ceil(vocab_size / tp_size))
            Where the vocabulary does not divide, the last columns of the last ranks are minus
            infinity, so that all ranks' shards have one width.
        first_id : int
            Vocabulary id of the first column.
        """
        assert self._final_norm is not None, "head() belongs to the last stage, after load()"
        assert self._output is not None, "head() belongs to the last stage, after load()"
        logits = self._output(self._final_norm(hidden))
        first, last = vocabulary_range(self.model.vocab_size, self.tp)
        missing = -(-self.model.vocab_size // self.tp.size) - (last - first)
        if missing:
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        self._ended("head")
        return logits, first

    def _ended(self, part: str) -> None:
        if self.seam is not None:
            self.seam(part)

    def _new_family(self) -> Family:
        match self.model.family:
            case ModelFamily.LLAMA:
                return LlamaFamily(self.model, dtype=self.dtype, device=self.device)
            case ModelFamily.OPT:
                return OptFamily(self.model)
            case _:
                raise AssertionError(f"{self.model.family} is refused before")

    def _output_weight(self, shards: ShardReader) -> Tensor:
        tied = self.model.tie_word_embeddings
        if tied and self._embedding is not None and self.tp.size == 1:
            return self._embedding.tokens
        # Our choice: above degree 1 a tied shard is held beside the embedding, as the memory plan counts it.
        name = self._family.embedding_name if tied else "lm_head.weight"
        return shards.vocabulary(name, self.model.vocab_size, self.model.hidden_size)
