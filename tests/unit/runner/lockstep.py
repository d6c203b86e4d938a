"""Tensor parallelism in one process: a thread for each rank, collectives that wait for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from exegpt.runner.models import TensorParallel

T = TypeVar("T")


class LockstepGroup:
    """`size` ranks that exchange tensors through shared memory, bit for bit the same on each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Tensor | None] = [None] * size

    def tensor_parallel(self, rank: int) -> TensorParallel:
        """The group as `rank` sees it."""

        def all_gather(tensor: Tensor) -> list[Tensor]:
            self._given[rank] = tensor.clone()
            self._barrier.wait()
            gathered = [given for given in self._given if given is not None]
            self._barrier.wait()
            assert len({given.shape for given in gathered}) == 1, "collectives move tensors of one shape"
            return gathered

        def all_reduce(tensor: Tensor) -> Tensor:
            total = all_gather(tensor)
            tensor.copy_(sum(total[1:], start=total[0].clone()))
            return tensor

        return TensorParallel(rank=rank, size=self.size, all_reduce=all_reduce, all_gather=all_gather)

    def run(self, rank_main: Callable[[TensorParallel], T]) -> list[T]:
        """Results of `rank_main` on all ranks at once."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: rank_main(self.tensor_parallel(rank)), range(self.size)))
