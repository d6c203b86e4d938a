"""Bytes on each rank: one formula for solver, simulator and runtime."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from exegpt.errors import CapacityError
from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.specs import Dtype, ModelSpec

# Standard normal quantile of 1 - 1e-3: K/V of the pool overflows in at most one cycle of a thousand.
OVERFLOW_SIGMAS = 3.0902

# Python, torch and the communication library on one rank, measured as resident size of a worker
# without weights (CPU: 0.45 GiB; a CUDA context with NCCL takes about the same on the device).
RUNTIME_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank of every stage; arrays have shape (..., num_stages)."""

    weights_bytes: FloatArray
    kv_bytes: FloatArray
    activation_bytes: FloatArray
    runtime_bytes: float = float(RUNTIME_BYTES)

    @property
    def total_bytes(self) -> FloatArray:
        """Everything together."""
        return np.asarray(self.weights_bytes + self.kv_bytes + self.activation_bytes + self.runtime_bytes)

    @property
    def parts_bytes(self) -> dict[str, FloatArray]:
        """What `total_bytes` is the sum of, by name, in its shape."""
        return {
            "weights": self.weights_bytes,
            "kv": self.kv_bytes,
            "activations": self.activation_bytes,
            "runtime": np.full_like(self.kv_bytes, self.runtime_bytes),
        }


def stage_weight_bytes(model: ModelSpec, stages: tuple[Stage, ...], dtype: Dtype) -> FloatArray:
    """Weight bytes on the fullest rank of every stage of one pipeline, shape (num_stages,).

    Matrices of a layer are split by the stage's degree; the embedding is replicated in the group, the
    head is split by vocabulary. A tied matrix is held once where first and last stage are one rank.

    Stages of role encode or decode are one side of a model that both phases do not share. A decoder-only
    model has the same layers on either side, embedding and head included: encoding yields a token too. An
    encoder-decoder model has its encoder on one and its decoder on the other; the matrices that project
    cross K/V lie with the encoder, since encoding computes with them, and a head lies with the decoder only.
    """
    last = len(stages) - 1
    parameters = []
    for index, stage in enumerate(stages):
        split, whole = _layer_shares(model, stage.role)
        held = stage.num_layers * (split // stage.tp_size + whole)
        held += _stack_parameters(model, stage, is_last=index == last)
        if index == 0:
            held += model.embedding_parameters
        if index == last and not (model.is_encoder_decoder and stage.role == "encode"):
            held += model.final_norm_parameters
            if not (index == 0 and stage.tp_size == 1 and model.tie_word_embeddings):
                held += math.ceil(model.vocab_size / stage.tp_size) * model.hidden_size
        parameters.append(held)
    return np.asarray(parameters, dtype=np.float64) * dtype.num_bytes


@cache
def _layer_shares(model: ModelSpec, role: str) -> tuple[int, int]:
    """Parameters of one layer in a stage of `role`: those that a group splits, and those it replicates."""
    if role == "both" or not model.is_encoder_decoder:
        whole = model.replicated_layer_parameters
        return model.layer_parameters - whole, whole
    cross = model.cross_key_value_parameters
    if role == "encode":
        whole = model.replicated_encode_layer_parameters
        return model.encode_layer_parameters + cross - whole, whole
    whole = model.replicated_decode_layer_parameters
    return model.decode_layer_parameters - cross - whole, whole


def _stack_parameters(model: ModelSpec, stage: Stage, *, is_last: bool) -> int:
    """What a T5 stage holds for its stacks: their tables of relative positions, the encoder's last norm."""
    if not model.is_encoder_decoder:
        return 0
    tables = model.relative_position_parameters // stage.tp_size
    if stage.role == "both":
        tables *= 2
    return tables + (model.final_norm_parameters if is_last and stage.role != "decode" else 0)


def kv_page_bytes(model: ModelSpec, stage: Stage, dtype: Dtype, page_size: int) -> int:
    """Bytes of one K/V page of `page_size` tokens on one rank of a stage."""
    return page_size * model.kv_bytes_per_token(dtype, stage.num_layers, stage.tp_size)


def activation_bytes(
    model: ModelSpec, stages: tuple[Stage, ...], dtype: Dtype, tokens: ArrayLike
) -> FloatArray:
    """Peak bytes of intermediate tensors for `tokens` tokens in flight, shape (..., num_stages).

    Per token: residual, normed input, attention output and its product (4 hidden), Q, K, V, and the
    feed-forward block's inner width (twice when gated: gate and up, then their product). With experts that
    of each one a token passes, its row before and after each, and the router's scores. Of T5 also the
    encoder's output, which every decoder layer projects to cross K/V.
    """
    shape = np.asarray(tokens, dtype=np.float64)[..., None]
    rows = 5 if model.is_encoder_decoder else 4
    per_token = []
    for stage in stages:
        inner = model.mlp_size * (3 if model.is_gated else 2) / stage.tp_size
        if model.num_experts:
            inner = model.num_experts_per_token * (inner + 2 * model.hidden_size) + model.num_experts
        qkv = (model.query_size + 2 * model.key_value_size) / stage.tp_size
        per_token.append((rows * model.hidden_size + inner + qkv) * dtype.num_bytes)
    return np.asarray(shape * np.asarray(per_token))


def plan_memory(
    model: ModelSpec,
    stages: tuple[Stage, ...],
    dtype: Dtype,
    *,
    kv_tokens: ArrayLike,
    encode_tokens: ArrayLike,
    decode_queries: ArrayLike,
) -> MemoryPlan:
    """Memory of every stage.

    Parameters
    ----------
    kv_tokens : array, shape (...)
        Tokens whose K/V pages must exist at once, page rounding and reserve included.
    encode_tokens, decode_queries : arrays, shape (...)
        Tokens of the largest encode micro-batch; rows whose logits exist at once.
    """
    per_token = [model.kv_bytes_per_token(dtype, s.num_layers, s.tp_size) for s in stages]
    kv = np.asarray(kv_tokens, dtype=np.float64)[..., None] * np.asarray(per_token, dtype=np.float64)
    activations = activation_bytes(model, stages, dtype, encode_tokens)
    # Logits of the rows sampled at once, with their float32 copy.
    logits = np.asarray(decode_queries, dtype=np.float64) * model.vocab_size * (dtype.num_bytes + 4)
    last_only = np.zeros(len(stages))
    if not (model.is_encoder_decoder and stages[-1].role == "encode"):
        last_only[-1] = 1 / stages[-1].tp_size
    return MemoryPlan(
        weights_bytes=np.broadcast_to(stage_weight_bytes(model, stages, dtype), kv.shape),
        kv_bytes=kv,
        activation_bytes=activations + logits[..., None] * last_only,
    )


def num_kv_pages(
    model: ModelSpec,
    stages: tuple[Stage, ...],
    dtype: Dtype,
    *,
    memory_bytes: int,
    page_size: int,
    encode_tokens: float,
    decode_queries: float,
) -> int:
    """K/V pages per layer that every stage has room for beside weights and activations.

    Raises
    ------
    CapacityError
        If not a single page fits; the message names the fullest stage.
    """
    fixed = plan_memory(
        model, stages, dtype, kv_tokens=0.0, encode_tokens=encode_tokens, decode_queries=decode_queries
    ).total_bytes
    free = memory_bytes - fixed
    pages = [int(f // kv_page_bytes(model, s, dtype, page_size)) for f, s in zip(free, stages, strict=True)]
    if min(pages) < 1:
        fullest = int(np.argmin(free))
        raise CapacityError(
            f"stage {fullest} of {model.name} needs {fixed[fullest] / 2**30:.2f} GiB before any K/V, "
            "but a rank has "
            f"cluster.memory_gib={memory_bytes / 2**30:.2f}. Use more ranks or a smaller runner.dtype."
        )
    return min(pages)
