"""Weights from safetensors files, single or sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from exegpt.errors import WeightsError
from exegpt.runner.weights.reader import bounds, missing_tensor

if TYPE_CHECKING:
    import torch

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsWeights:
    """Tensors of a Hugging Face checkpoint in safetensors; parts are cut from the mapped file.

    Parameters
    ----------
    path : Path
        A file, or a directory with `model.safetensors`, with shards and their index
        (`model.safetensors.index.json`), or with other `*.safetensors` files.

    Raises
    ------
    WeightsError
        If a file is missing, truncated, corrupt, or two files hold the same tensor.
    """

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        files = _files(path)
        self._handles = {file: _open(file) for file in dict.fromkeys(files.values())}
        stored = {}
        for name, file in files.items():
            # Cheap: the header is in memory; it catches a shard that is not the one of the index.
            if name not in self._handles[file].keys():
                raise WeightsError(
                    f"{file}: no tensor {name}, which {_INDEX} says is here; download it again"
                )
            stored[name] = (file, name)
        self._stored = {_canonical(name, stored): place for name, place in stored.items()}

    def names(self) -> frozenset[str]:
        """Names of all tensors, with the prefix (`model.`) that base-model checkpoints leave out."""
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Read a tensor or a part of it in its stored type; see `WeightReader.read`."""
        part = self._slice(name)
        shape = part.get_shape()
        cut = tuple(slice(*bounds(cut, size)) for cut, size in zip((rows, columns), shape, strict=False))
        tensor: torch.Tensor = part[cut]
        if not tensor.is_floating_point():
            raise WeightsError(
                f"{self._stored[name][0]}: tensor {name} is stored as {part.get_dtype()}; quantised "
                "safetensors are not supported, use the unquantised checkpoint or a GGUF file (model.weights)"
            )
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._stored:
            raise missing_tensor(self.source, name)
        file, stored_name = self._stored[name]
        return self._handles[file].get_slice(stored_name)


def _open(file: Path) -> Any:
    """Map a file; safetensors compares the file's length with what its header promises."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise WeightsError(f"{file}: no such file; download the checkpoint again (model.weights)") from None
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{file}: truncated or corrupt safetensors file ({error}); download it again (model.weights)"
        ) from error


def _files(path: Path) -> dict[str, Path]:
    """The file of every stored tensor."""
    if path.is_dir() and not (path / _SINGLE).exists() and (path / _INDEX).exists():
        return {name: path / shard for name, shard in _read_index(path / _INDEX).items()}
    if not path.is_dir():
        candidates = [path]
    elif (path / _SINGLE).exists():
        candidates = [path / _SINGLE]
    else:
        candidates = sorted(path.glob("*.safetensors"))
    if not candidates:
        raise WeightsError(f"{path}: no *.safetensors file in this directory (model.weights)")
    files: dict[str, Path] = {}
    for file in candidates:
        for name in _open(file).keys():
            if name in files:
                raise WeightsError(
                    f"{path}: {files[name].name} and {file.name} both hold {name}; name one file"
                )
            files[name] = file
    return files


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: not JSON, corrupt or truncated: {error}") from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise WeightsError(f"{path}: weight_map must be an object of tensor names and file names")
    return shards


def _canonical(name: str, stored: Mapping[str, object]) -> str:
    """Name in a checkpoint of the model with its head.

    Checkpoints of the base model leave out `model.`; OPT's also come without `model.decoder.`.
    """
    if name.startswith(("model.", "lm_head.")):
        return name
    if name.startswith("decoder."):
        return f"model.{name}"
    return f"model.decoder.{name}" if "embed_positions.weight" in stored else f"model.{name}"
