"""Reads the slices of weights that one tensor-parallel rank holds, fused as the layers use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exegpt.errors import WeightsError
from exegpt.runner.models.parallel import TensorParallel

if TYPE_CHECKING:
    from exegpt.runner.weights import WeightReader


class ShardReader:
    """One rank's view of a model's weights.

    Slices go straight to their place in the fused tensor, so that no rank ever holds a tensor
    of which it needs a part only.

    Parameters
    ----------
    reader : WeightReader
        Tensors by their Hugging Face names.
    tp : TensorParallel
        The rank that reads.
    dtype, device
        Of the tensors returned.

    Attributes
    ----------
    num_bytes : int
        Bytes of all tensors returned so far.
    """

    def __init__(
        self, reader: WeightReader, tp: TensorParallel, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tp = tp
        self.num_bytes = 0
        self._reader = reader
        self._dtype = dtype
        self._device = device

    def replicated(self, name: str, *shape: int) -> Tensor:
        """The whole tensor, on every rank."""
        return self._fill([(name, None, None)], [shape])

    def column_parallel(self, names: Sequence[str], sizes: Sequence[int], width: int | None = None) -> Tensor:
        """This rank's output features of several products, one below the other.

        Parameters
        ----------
        names, sizes
            Tensors, and the rows (output features) that each has on all ranks together.
        width : int, optional
            Columns (input features); None for a bias.

        Returns
        -------
        tensor, shape (sum(sizes) / tp_size, width) or (sum(sizes) / tp_size,)
        """
        rank, size = self.tp.rank, self.tp.size
        parts = [
            (name, slice(rank * rows // size, (rank + 1) * rows // size), None)
            for name, rows in zip(names, sizes, strict=True)
        ]
        return self._fill(parts, [(rows // size, *_columns(width)) for rows in sizes])

    def row_parallel(self, name: str, height: int, width: int) -> Tensor:
        """This rank's input features of a product, shape (height, width / tp_size)."""
        rank, size = self.tp.rank, self.tp.size
        columns = slice(rank * width // size, (rank + 1) * width // size)
        return self._fill([(name, None, columns)], [(height, width // size)])

    def row_parallel_bias(self, name: str, size: int) -> Tensor | None:
        """The bias of a row-parallel product: on rank 0 only, since the ranks' products are summed."""
        return self.replicated(name, size) if self.tp.rank == 0 else None

    def vocabulary(self, name: str, vocab_size: int, width: int) -> Tensor:
        """This rank's rows of the output matrix; the last ranks have fewer if they do not divide."""
        first, last = vocabulary_range(vocab_size, self.tp)
        return self._fill([(name, slice(first, last), None)], [(last - first, width)])

    def _fill(
        self, parts: Sequence[tuple[str, slice | None, slice | None]], shapes: Sequence[tuple[int, ...]]
    ) -> Tensor:
        fused = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device
        )
        at = 0
        for (name, rows, columns), shape in zip(parts, shapes, strict=True):
            part = self._reader.read(name, rows, columns)
            if part.shape != shape:
                raise WeightsError(
                    f"model.weights: tensor {name} gave shape {list(part.shape)} where the model needs "
                    f"{list(shape)} on rank {self.tp.rank} of {self.tp.size}. The weights are of another "
                    "model; set model=... to the one they belong to."
                )
            fused[at : at + shape[0]].copy_(part)
            at += shape[0]
        self.num_bytes += fused.nbytes
        return fused


def vocabulary_range(vocab_size: int, tp: TensorParallel) -> tuple[int, int]:
    """First vocabulary id of a rank's shard, and the one after its last.

    All shards but the last ones hold ceil(vocab_size / tp_size) ids.
    """
    width = -(-vocab_size // tp.size)
    first = min(tp.rank * width, vocab_size)
    return first, min(first + width, vocab_size)


def _columns(width: int | None) -> tuple[int, ...]:
    return () if width is None else (width,)
