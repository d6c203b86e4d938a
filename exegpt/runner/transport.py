"""Messages between ranks: gloo on CPU and NCCL on CUDA behind one small interface."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from exegpt.errors import LaunchError
from exegpt.runner.models import TensorParallel

logger = logging.getLogger(__name__)

_DATA_TAG = 1
_CONTROL_TAG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Who this process is, as the launcher says (read once, at the start of a worker)."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environ(cls, environ: dict[str, str]) -> RankEnvironment:
        """Read RANK, LOCAL_RANK and WORLD_SIZE; LaunchError names what is missing."""
        try:
            values = {name: int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        except KeyError as error:
            raise LaunchError(
                f"{error} is not set: start workers with `deepspeed launch.py command=run ...`"
            ) from None
        return cls(rank=values["RANK"], local_rank=values["LOCAL_RANK"], world_size=values["WORLD_SIZE"])


class Transport(Protocol):
    """What engine and controller need of a group of ranks."""

    rank: int
    world_size: int

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send without waiting; the tensor must not change until it has arrived."""

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, *, on_host: bool = False
    ) -> torch.Tensor:
        """Wait for the next tensor from `source`; messages of a pair arrive in order.

        `on_host`: it was sent from host memory and is wanted there. On CUDA the two kinds travel
        apart, each in its own order.
        """

    def send_control(self, message: Any) -> None:
        """Send a JSON value to every other rank without waiting."""

    def receive_control(self, source: int = 0) -> Any:
        """Wait for the next control message of `source`."""

    def tensor_parallel(self, ranks: Sequence[int]) -> TensorParallel:
        """Collectives of a tensor-parallel group; every rank calls this for every group, in order."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""


class LocalTransport:
    """The honest single-process double: one rank, nothing to send."""

    rank = 0
    world_size = 1

    def send(self, tensor: torch.Tensor, to: int) -> None:
        raise LaunchError(f"a single rank cannot send to rank {to}")

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, *, on_host: bool = False
    ) -> torch.Tensor:
        raise LaunchError(f"a single rank cannot receive from rank {source}")

    def send_control(self, message: Any) -> None:
        """There is nobody to tell."""

    def receive_control(self, source: int = 0) -> Any:
        raise LaunchError(f"a single rank cannot receive from rank {source}")

    def tensor_parallel(self, ranks: Sequence[int]) -> TensorParallel:
        return TensorParallel.single()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


class DistributedTransport:
    """Ranks of a `deepspeed.comm` process group.

    Data between stages goes over NCCL on CUDA and gloo on CPU, control over gloo always: it is
    read by the host.
    """

    def __init__(self, environment: RankEnvironment, *, timeout_s: float = 600.0) -> None:
        accelerator = get_accelerator()
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.on_cuda = accelerator.device_name() == "cuda"
        if self.on_cuda:
            accelerator.set_device(environment.local_rank)
        self.device = torch.device(accelerator.device_name(environment.local_rank) if self.on_cuda else "cpu")
        backend = "cpu:gloo,cuda:nccl" if self.on_cuda else "gloo"
        dist.init_distributed(backend, timeout=timedelta(seconds=timeout_s), verbose=False)
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()

    def _isend(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
        # The handle keeps the tensor alive until it has left.
        self._in_flight.append((dist.isend(tensor, to, tag=tag), tensor))

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._isend(tensor.contiguous(), to, _DATA_TAG)

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, *, on_host: bool = False
    ) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu" if on_host else self.device)
        dist.recv(tensor, source, tag=_DATA_TAG)
        return tensor

    def send_control(self, message: Any) -> None:
        payload = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        size = torch.tensor([payload.numel()], dtype=torch.int64)
        for rank in range(self.world_size):
            if rank != self.rank:
                self._isend(size, rank, _CONTROL_TAG)
                self._isend(payload, rank, _CONTROL_TAG)

    def receive_control(self, source: int = 0) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, tag=_CONTROL_TAG)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, source, tag=_CONTROL_TAG)
        return json.loads(payload.numpy().tobytes())

    def tensor_parallel(self, ranks: Sequence[int]) -> TensorParallel:
        group = dist.new_group(list(ranks))
        if self.rank not in ranks or len(ranks) == 1:
            return TensorParallel.single()
        spans_world = len(ranks) == self.world_size

        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            if spans_world and not self.on_cuda:
                # DeepSpeed's shared-memory sum knows no groups; it is several times gloo's speed.
                dist.inference_all_reduce(tensor)
            else:
                dist.all_reduce(tensor, group=group)
            return tensor

        def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            parts = [torch.empty_like(tensor) for _ in ranks]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            return parts

        return TensorParallel(
            rank=list(ranks).index(self.rank), size=len(ranks), all_reduce=all_reduce, all_gather=all_gather
        )

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        # Not dist.barrier: with NCCL it would guess a device; a gloo sum is enough.
        dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Wait until everything sent has left, then leave the process group."""
        for handle, _ in self._in_flight:
            handle.wait()
        self._in_flight.clear()
        self.barrier()
        dist.destroy_process_group()


def start_transport(environ: dict[str, str] | None = None) -> tuple[DistributedTransport, RankEnvironment]:
    """Join the process group that the launcher's environment describes."""
    environment = RankEnvironment.from_environ(dict(os.environ if environ is None else environ))
    return DistributedTransport(environment), environment
