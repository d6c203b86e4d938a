"""What a closed form is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.memory import MemoryPlan
from exegpt.specs import Policy

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination of the knobs that are enumerated: what no bound ranges over.

    Beside these every policy has two integer knobs, `batch` and `extent`:

    ====================  =====================================  =======================
    policy                batch                                  extent
    ====================  =====================================  =======================
    RRA                   B_E, queries encoded per cycle         N_D, decode iterations
    WAA, WAA_C, WAA_M     B_E, queries of an encode batch        1
    STATIC(_HYBRID)       queries of a batch                     1
    ITERATION             slots, queries active at once          1
    CHUNKED               slots                                  tokens per iteration
    DISAGGREGATED         queries of an encode batch             1
    ====================  =====================================  =======================

    Attributes
    ----------
    stages : tuple of Stage
        Of one replica. Where encoding and decoding have their own GPUs, the encode pipeline's stages
        (role `encode`) come before the decode pipeline's (role `decode`).
    num_micro_batches : int
        Micro-batches of a decode iteration.
    num_replicas : int
        Independent groups of GPUs that all do the same.
    encode_micro_batches : int, optional
        STATIC_HYBRID: micro-batches of the encode phase.
    num_encode_instances, num_decode_instances : int
        DISAGGREGATED: how many instances of the encode and of the decode pipeline a replica has.
    """

    policy: Policy
    stages: tuple[Stage, ...]
    num_micro_batches: int
    num_replicas: int = 1
    encode_micro_batches: int | None = None
    num_encode_instances: int = 1
    num_decode_instances: int = 1

    @property
    def tp_size(self) -> int:
        """Greatest tensor-parallel degree of the stages that encode."""
        return max(stage.tp_size for stage in self.encode_stages)

    @property
    def encode_stages(self) -> tuple[Stage, ...]:
        """Stages that encode."""
        return tuple(stage for stage in self.stages if stage.role != "decode")

    @property
    def decode_stages(self) -> tuple[Stage, ...]:
        """Stages that decode."""
        return tuple(stage for stage in self.stages if stage.role != "encode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Predictions for an array of candidates; shape (n,), memory (n, num_stages).

    Where the profile does not cover a candidate, times are infinite and throughput is zero.

    Attributes
    ----------
    throughput_per_s : float array
        Sequences of all replicas.
    latency_s, ttft_s, tpot_s : float array
        Of the bound's query, from the start of its encoding.
    decode_batch_size : float array
        Expected pool of one replica at the start of a decode phase, or while decoding.
    cycle_s : float array
        Time between two encode batches of a replica.
    worst : mapping of str to float array, optional
        What has to meet the constraints instead of the estimates, by constraint, where a margin is planned.
    """

    throughput_per_s: FloatArray
    latency_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    decode_batch_size: FloatArray
    cycle_s: FloatArray
    memory: MemoryPlan
    worst: Mapping[str, FloatArray] | None = None


def constraint_values(e: Estimates) -> dict[str, FloatArray]:
    """What constraints bound, by name: the worst values where there are any, else the estimates."""
    if e.worst is not None:
        return dict(e.worst)
    return {
        "memory": np.asarray(e.memory.total_bytes.max(-1)),
        "latency_s": e.latency_s,
        "ttft_s": e.ttft_s,
        "tpot_s": e.tpot_s,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits that hold for every candidate of a box; each of shape (n,), `tpot_lower_s` None if unknown."""

    throughput_upper_per_s: FloatArray
    latency_lower_s: FloatArray
    ttft_lower_s: FloatArray
    memory_lower_bytes: FloatArray
    tpot_lower_s: FloatArray | None = None
