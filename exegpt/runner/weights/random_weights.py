"""Weights drawn at random, the same on every rank of every layout."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from exegpt.runner.weights.reader import bounds, missing_tensor, tensor_shapes
from exegpt.specs import ModelSpec

if TYPE_CHECKING:
    import torch

# Hugging Face's initializer_range of both families.
_STD = 0.02
# A block is what one generator draws: small against a matrix, so a rank that holds an eighth of
# the rows draws little more than that eighth, and large against the cost of seeding.
_BLOCK_ROWS = 256


class RandomWeights:
    """Normal weights and biases of standard deviation 0.02, norms of ones, in float32.

    Every block of 256 rows of a tensor has a generator of its own, seeded from the seed, the
    tensor's name and the block's number. So a part of a tensor equals that part of the whole, and
    tensor-parallel ranks and pipeline stages hold parts of one model.

    Parameters
    ----------
    model : ModelSpec
        Which tensors there are.
    seed : int
        Seed of the whole model.
    """

    def __init__(self, model: ModelSpec, seed: int) -> None:
        self.source = f"random weights of {model.name}"
        self._seed = seed
        self._shapes = tensor_shapes(model)

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        if name not in self._shapes:
            raise missing_tensor(self.source, name)
        return self._shapes[name]

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Draw a tensor or a part of it; see `WeightReader.read`."""
        import torch

        shape = self.shape(name)
        start, stop = bounds(rows, shape[0])
        rest = tuple(slice(*bounds(columns, size)) for size in shape[1:])
        if "norm" in name and name.endswith(".weight"):
            return torch.ones(stop - start)
        if start == stop:
            return torch.empty((0, *(part.stop - part.start for part in rest)))
        parts = []
        for block in range(start // _BLOCK_ROWS, (stop - 1) // _BLOCK_ROWS + 1):
            first = block * _BLOCK_ROWS
            drawn = self._draw(name, block, (min(_BLOCK_ROWS, shape[0] - first), *shape[1:]))
            cut = (slice(max(start - first, 0), stop - first), *rest)
            parts.append(drawn[cut])
        return torch.cat(parts)

    def _draw(self, name: str, block: int, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        digest = hashlib.sha256(f"{self._seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(shape, generator=generator) * _STD
