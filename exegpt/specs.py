"""Frozen values that the whole package shares: what is served, on what, under which bound.

Everything here is pure: no torch, no Hydra, no files. Units: seconds, bytes and tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from exegpt.errors import ConfigError


class ModelFamily(Enum):
    """Kinds of layers that can be planned for; `ModelSpec.is_runnable` says which ones the runtime has.

    `llama`: RMS norms, rotary positions, gated feed-forward block, also with experts (Qwen, Mistral,
    Mixtral). `opt` and `gpt2`: layer norms with bias, learned positions. `t5`: encoder and decoder, RMS
    norms, relative positions, cross attention.
    """

    LLAMA = "llama"
    OPT = "opt"
    GPT2 = "gpt2"
    T5 = "t5"


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


class SolverName(Enum):
    """How the space of schedules is searched.

    `branch_and_bound` proves its answer; `exhaustive` looks at everything and finds the same; `paper` is the
    paper's Algorithm 1, which proves nothing.
    """

    branch_and_bound = "branch_and_bound"
    exhaustive = "exhaustive"
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
    """Shape of a transformer; fields are named as in Hugging Face configs.

    Attributes
    ----------
    num_hidden_layers : int
        Layers; of T5 pairs of them, an encoder and a decoder layer.
    is_gated_act : bool
        T5 only: whether the feed-forward block is gated. LLaMA's always is, the others' never.
    relative_attention_num_buckets : int
        T5 only: rows of the table of relative positions that each of its two stacks has.
    num_experts, num_experts_per_token, moe_intermediate_size : int
        Feed-forward blocks of a layer, those that one token passes, and the inner width of each. 0 where
        there is a single block of `intermediate_size`, which experts do not read.

    Raises
    ------
    ConfigError
        If a size is not positive, heads do not divide as attention needs it, or a field is set that the
        family does not have.
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
    is_gated_act: bool = False
    relative_attention_num_buckets: int = 32
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0

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
            "relative_attention_num_buckets",
        ):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(f"model.{field}={value} of {self.name}: must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads={self.num_attention_heads} of {self.name} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.is_gated_act and self.family is not ModelFamily.T5:
            often = "always" if self.family is ModelFamily.LLAMA else "never"
            raise ConfigError(
                f"model.is_gated_act=true of {self.name}: read by family t5 only; family "
                f"{self.family.value} is {often} gated, leave it false"
            )
        if self.family is ModelFamily.T5 and self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"model.num_key_value_heads={self.num_key_value_heads} of {self.name}: family t5 has as many "
                f"as num_attention_heads={self.num_attention_heads}"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        fields = ("num_experts", "num_experts_per_token", "moe_intermediate_size")
        given = [field for field in fields if getattr(self, field)]
        if not given:
            return
        if self.family is not ModelFamily.LLAMA or self.mlp_bias:
            llama = self.family is ModelFamily.LLAMA
            why = "mlp_bias=true" if llama else f"family {self.family.value}"
            raise ConfigError(
                f"model.{given[0]}={getattr(self, given[0])} of {self.name}: experts go with family llama "
                f"without mlp_bias only, not with {why}; set it to 0"
            )
        for field in fields:
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(
                    f"model.{field}={value} of {self.name}: must be at least 1 beside {given[0]}="
                    f"{getattr(self, given[0])}; all of {', '.join(fields)} are 0 in a model without experts"
                )
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"model.num_experts_per_token={self.num_experts_per_token} of {self.name}: must lie in "
                f"1..num_experts={self.num_experts}"
            )

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts pass layers of their own, whose output the decoder's layers attend to."""
        return self.family is ModelFamily.T5

    @property
    def is_runnable(self) -> bool:
        """Whether the runtime has this model's layers; the others can be planned for."""
        return self.family in (ModelFamily.LLAMA, ModelFamily.OPT) and not self.num_experts

    def require_runnable(self) -> None:
        """Raise ConfigError unless the runtime has this model's layers."""
        if not self.is_runnable:
            kind = f" with {self.num_experts} experts" if self.num_experts else ""
            raise ConfigError(
                f"model.name={self.name}: planning only, since the runtime has no layers of family "
                f"{self.family.value}{kind}; it runs families llama (without experts) and opt. Plan with "
                "command=solve or simulate and profile.source=analytic"
            )

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block has a gate beside its up projection (SwiGLU)."""
        return self.family is ModelFamily.LLAMA or self.is_gated_act

    @property
    def has_rotary_positions(self) -> bool:
        """Whether query and key heads are rotated by their position."""
        return self.family is ModelFamily.LLAMA

    @property
    def has_learned_positions(self) -> bool:
        """Whether a table of positions is added to the embedding."""
        return self.family in (ModelFamily.OPT, ModelFamily.GPT2)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def mlp_size(self) -> int:
        """Inner width of one feed-forward block: the only one, or an expert."""
        return self.moe_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer; of T5 those of an encoder and a decoder layer."""
        encode = self.encode_layer_parameters if self.is_encoder_decoder else 0
        return encode + self.decode_layer_parameters

    @property
    def encode_layer_parameters(self) -> int:
        """Parameters of a layer as prompts pass it: T5's encoder layer, elsewhere the only kind."""
        return self._layer_parameters(num_attentions=1)

    @property
    def decode_layer_parameters(self) -> int:
        """Parameters of a layer as new tokens pass it; T5's decoder layer holds its cross attention."""
        return self._layer_parameters(num_attentions=2 if self.is_encoder_decoder else 1)

    def _layer_parameters(self, num_attentions: int) -> int:
        h, q, kv, ff = self.hidden_size, self.query_size, self.key_value_size, self.mlp_size
        attention = h * (q + 2 * kv) + q * h
        attention += (q + 2 * kv) * self.attention_bias + h * self.attention_output_bias
        num_matrices = 3 if self.is_gated else 2
        mlp = num_matrices * h * ff + (((num_matrices - 1) * ff + h) if self.mlp_bias else 0)
        mlp = mlp * max(self.num_experts, 1) + self.router_parameters
        norms = (num_attentions + 1) * self.norm_parameters + (2 * self.head_dim if self.qk_norm else 0)
        return num_attentions * attention + mlp + norms

    @property
    def cross_key_value_parameters(self) -> int:
        """Parameters of one T5 decoder layer that project the encoder's output to keys and values."""
        return 2 * self.hidden_size * self.key_value_size if self.is_encoder_decoder else 0

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer that choose a token's experts."""
        return self.num_experts * self.hidden_size

    @property
    def replicated_layer_parameters(self) -> int:
        """Parameters of one layer (T5: of a pair) that every rank of a tensor-parallel group holds whole.

        Norms, the router, and the biases of the row-parallel products (which the group's first rank adds).
        """
        encode = self.replicated_encode_layer_parameters if self.is_encoder_decoder else 0
        return encode + self.replicated_decode_layer_parameters

    @property
    def replicated_encode_layer_parameters(self) -> int:
        """The part of `encode_layer_parameters` that every rank of a group holds."""
        return self._replicated_parameters(num_attentions=1)

    @property
    def replicated_decode_layer_parameters(self) -> int:
        """The part of `decode_layer_parameters` that every rank of a group holds."""
        return self._replicated_parameters(num_attentions=2 if self.is_encoder_decoder else 1)

    def _replicated_parameters(self, num_attentions: int) -> int:
        norms = (num_attentions + 1) * self.norm_parameters + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.hidden_size * (num_attentions * self.attention_output_bias + self.mlp_bias)
        return norms + biases + self.router_parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden width: a scale, in layer norms also a bias."""
        return self.hidden_size * (1 if self.family in (ModelFamily.LLAMA, ModelFamily.T5) else 2)

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm in front of the output matrix (T5: of either stack's last norm)."""
        return self.norm_parameters

    @property
    def relative_position_parameters(self) -> int:
        """Parameters of the table of relative positions of one T5 stack, which all its layers read."""
        if self.family is not ModelFamily.T5:
            return 0
        return self.relative_attention_num_buckets * self.num_attention_heads

    @property
    def embedding_parameters(self) -> int:
        """Parameters that the first stage holds beside its layers (tokens, learned positions)."""
        # OPT's position table starts at offset 2 (Hugging Face OPTLearnedPositionalEmbedding).
        offset = 2 if self.family is ModelFamily.OPT else 0
        positions = self.max_position_embeddings + offset if self.has_learned_positions else 0
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
        stacks = self.final_norm_parameters if self.is_encoder_decoder else 0
        stacks += 2 * self.relative_position_parameters
        return layers + stacks + self.embedding_parameters + self.head_parameters - shared

    def kv_bytes_per_token(self, dtype: Dtype, num_layers: int | None = None, tp_size: int = 1) -> int:
        """K/V bytes that one token takes on one rank in `num_layers` layers (default: all).

        A T5 decoder layer holds K/V of generated tokens and, equally wide, cross K/V of input tokens: ask
        for the sum of both kinds of tokens.
        """
        layers = self.num_hidden_layers if num_layers is None else num_layers
        heads = max(self.num_key_value_heads // tp_size, 1)
        return 2 * layers * heads * self.head_dim * dtype.num_bytes

    def tp_sizes(self, limit: int) -> tuple[int, ...]:
        """Tensor-parallel degrees up to `limit` that divide both head counts and the feed-forward width.

        K/V heads fewer than the degree are not replicated yet, so a degree divides them too. Experts are
        each split over their inner width.
        """
        return tuple(
            t
            for t in range(1, limit + 1)
            if self.num_attention_heads % t == 0
            and self.num_key_value_heads % t == 0
            and self.mlp_size % t == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The devices a job may use.

    Attributes
    ----------
    memory_bytes : int
        Per GPU (per worker on CPU).
    device : str
        As profiles name it: what this machine calls its device, or the name of a GPU's data sheet.
    price_per_gpu_hour : float, optional
        In the currency of the user's choice.
    is_local : bool
        Whether the devices are this machine's own; those of a data sheet are only planned for.
    """

    name: str
    num_nodes: int
    gpus_per_node: int
    memory_bytes: int
    device: str
    device_type: str = "cpu"
    price_per_gpu_hour: float | None = None
    is_local: bool = True

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
