"""Frozen values that the whole package shares: what is served, on what, under which bound.

Everything here is pure: no torch, no Hydra, no files. Units: seconds, bytes and tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from exegpt.errors import ConfigError


class ModelFamily(Enum):
    """Architectures whose layers the runtime implements."""

    LLAMA = "llama"
    OPT = "opt"


class Policy(Enum):
    """Scheduling policies; the names stand in configs and in schedule files."""

    RRA = "RRA"
    WAA_C = "WAA_C"
    WAA_M = "WAA_M"
    WAA = "WAA"
    STATIC = "STATIC"
    STATIC_HYBRID = "STATIC_HYBRID"
    ITERATION = "ITERATION"
    CHUNKED = "CHUNKED"
    DISAGGREGATED = "DISAGGREGATED"


class Dtype(Enum):
    """Element types of weights, activations and K/V."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.float32 else 2


class Counting(Enum):
    """How output tokens are turned into decode iterations.

    `exact`: encoding yields the first token, so a query of S output tokens decodes S - 1 times,
    and the pool is the exact steady state. `paper`: S iterations and the paper's approximate pool.
    """

    exact = "exact"
    paper = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies, in the terms of Hugging Face configs (`rope_type`)."""

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a decoder-only transformer; fields are named as in Hugging Face configs.

    Raises
    ------
    ConfigError
        If a size is not positive, or heads do not divide as attention needs it.
    """

    name: str
    family: ModelFamily
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True
    hidden_act: str = "silu"
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for field in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(f"model.{field}={value} of {self.name}: must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads={self.num_attention_heads} of {self.name} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block has a gate beside its up projection (SwiGLU)."""
        return self.family is ModelFamily.LLAMA

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        h, q, kv, ff = self.hidden_size, self.query_size, self.key_value_size, self.intermediate_size
        attention = h * (q + 2 * kv) + q * h
        attention += (q + 2 * kv) * self.attention_bias + h * self.attention_output_bias
        num_matrices = 3 if self.is_gated else 2
        mlp = num_matrices * h * ff + (((num_matrices - 1) * ff + h) if self.mlp_bias else 0)
        norms = 2 * h * (1 if self.family is ModelFamily.LLAMA else 2)
        return attention + mlp + norms + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def replicated_layer_parameters(self) -> int:
        """Parameters of one layer that every rank of a tensor-parallel group holds whole.

        Norms, and the biases of the two row-parallel products (which the group's first rank adds).
        """
        norms = 2 * self.hidden_size * (1 if self.family is ModelFamily.LLAMA else 2)
        biases = self.hidden_size * (self.attention_output_bias + self.mlp_bias)
        return norms + biases + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm in front of the output matrix."""
        return self.hidden_size * (1 if self.family is ModelFamily.LLAMA else 2)

    @property
    def embedding_parameters(self) -> int:
        """Parameters that the first stage holds beside its layers (tokens, learned positions)."""
        # OPT's position table starts at offset 2 (Hugging Face OPTLearnedPositionalEmbedding).
        positions = self.max_position_embeddings + 2 if self.family is ModelFamily.OPT else 0
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters that the last stage computes with beside its layers (final norm, output matrix)."""
        return self.final_norm_parameters + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Distinct parameters of the whole model; tied matrices count once."""
        shared = self.vocab_size * self.hidden_size if self.tie_word_embeddings else 0
        layers = self.num_hidden_layers * self.layer_parameters
        return layers + self.embedding_parameters + self.head_parameters - shared

    def kv_bytes_per_token(self, dtype: Dtype, num_layers: int | None = None, tp_size: int = 1) -> int:
        """K/V bytes that one token takes on one rank in `num_layers` layers (default: all)."""
        layers = self.num_hidden_layers if num_layers is None else num_layers
        heads = max(self.num_key_value_heads // tp_size, 1)
        return 2 * layers * heads * self.head_dim * dtype.num_bytes

    def tp_sizes(self, limit: int) -> tuple[int, ...]:
        """Tensor-parallel degrees up to `limit` that divide both head counts and the feed-forward width.

        K/V heads fewer than the degree are not replicated yet, so a degree divides them too.
        """
        return tuple(
            t
            for t in range(1, limit + 1)
            if self.num_attention_heads % t == 0
            and self.num_key_value_heads % t == 0
            and self.intermediate_size % t == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The devices a job may use. `memory_bytes` is per GPU (per worker on CPU)."""

    name: str
    num_nodes: int
    gpus_per_node: int
    memory_bytes: int
    device: str
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        for field in ("num_nodes", "gpus_per_node", "memory_bytes"):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(f"cluster.{field}={value} of {self.name}: must be at least 1")

    @property
    def num_gpus(self) -> int:
        """GPUs (or CPU workers) of all nodes together."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSpec:
    """Latency bounds; all given ones hold together. Infinity means no bound.

    Attributes
    ----------
    latency_s : float
        From the start of a query's encoding to its last token, for a query whose output length is
        the `length_percentile` of the planned lengths (the baseline: the maximum length).
    ttft_s, tpot_s : float
        Time to first token, and mean time per further output token, of the same query.
    """

    latency_s: float = math.inf
    length_percentile: float = 99.0
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        for field in ("latency_s", "ttft_s", "tpot_s"):
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"bound.{field}={value}: must be above 0 s (inf for no bound)")
        if not 0 < self.length_percentile <= 100:
            raise ConfigError(f"bound.length_percentile={self.length_percentile}: must lie in (0, 100]")
