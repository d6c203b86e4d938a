"""Tensor parallelism as a stage sees it: who it is, and the two collectives that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from exegpt.errors import LaunchError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's place in a tensor-parallel group.

    Attributes
    ----------
    rank, size : int
        Place in the group, and ranks of the group.
    all_reduce : callable
        Sums a tensor over the group in place and returns it.
    all_gather : callable
        Tensors of all ranks, in the order of ranks; all have the shape of the one given.

    Raises
    ------
    LaunchError
        If `rank` does not lie in 0..size - 1.
    """

    rank: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]
    all_gather: Callable[[Tensor], list[Tensor]]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise LaunchError(f"tensor-parallel rank {self.rank} is outside 0..{self.size - 1}")

    @classmethod
    def single(cls) -> TensorParallel:
        """The group of one: a sum over one rank is its own tensor."""
        return cls(rank=0, size=1, all_reduce=lambda tensor: tensor, all_gather=lambda tensor: [tensor])
