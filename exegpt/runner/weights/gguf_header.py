"""The header of a GGUF file: metadata and the place of every tensor.

The `gguf` package has a reader, but it makes a numpy view of every string of the vocabulary (4 s
for the 49 thousand tokens of SmolLM2) and takes a truncated file for a shorter one. This one steps
over the vocabulary (0.1 s) and checks every length against the file's. Format: ggml,
docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from exegpt.errors import WeightsError

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies and how; `shape` is in torch's order, rows first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset_bytes: int
    num_bytes: int

    @property
    def block(self) -> tuple[int, int]:
        """Elements of a quantisation block and the bytes that it takes."""
        elements, num_bytes = GGML_QUANT_SIZES[self.kind]
        return elements, num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata without arrays of strings (the vocabulary), tensors by name, and the header's length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    num_bytes: int


class _Cursor:
    """Reads little-endian values; whatever goes past the end of the file is an error that says so."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def corrupt(self, problem: str) -> WeightsError:
        return WeightsError(
            f"{self.path}: truncated or corrupt GGUF file: {problem}; download it again (model.weights)"
        )

    def skip(self, num_bytes: int) -> int:
        start = self.at
        if num_bytes > len(self.data) - start:
            raise self.corrupt(f"the file ends after {len(self.data)} bytes, inside its header")
        self.at += num_bytes
        return start

    def values(self, code: str, count: int = 1) -> tuple[Any, ...]:
        start = self.skip(struct.calcsize("<" + code) * count)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def integer(self, code: str) -> int:
        return int(self.values(code)[0])

    def text(self) -> str:
        length = self.integer("Q")
        start = self.skip(length)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"the name at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """A metadata value; None for arrays of strings, which are stepped over."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.integer("I"), self.integer("Q")
            if item in _SCALARS:
                return self.values(_SCALARS[item], count)
            if item == _STRING:
                for _ in range(count):
                    self.skip(self.integer("Q"))
                return None
            raise self.corrupt(f"array of unknown type {item} at byte {self.at}")
        if kind not in _SCALARS:
            raise self.corrupt(f"value of unknown type {kind} at byte {self.at}")
        return self.values(_SCALARS[kind])[0]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor places of a GGUF file.

    Raises
    ------
    WeightsError
        If the file is missing, is no GGUF file, or its length is not what its header promises.
    """
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise WeightsError(f"{path}: the file is empty; download it again (model.weights)")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path))
    except FileNotFoundError:
        raise WeightsError(f"model.weights={path}: no such file or directory") from None
    except OSError as error:
        raise WeightsError(f"model.weights={path}: {error}") from error


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.data[:4] != b"GGUF":
        raise WeightsError(
            f"{cursor.path}: not a GGUF file: it starts with {cursor.data[:4]!r} (model.weights)"
        )
    cursor.skip(4)
    version = cursor.integer("I")
    if version not in _VERSIONS:
        raise WeightsError(
            f"{cursor.path}: GGUF version {version} is not supported; known: {list(_VERSIONS)}"
        )
    num_tensors, num_keys = cursor.integer("Q"), cursor.integer("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.text()
        value = cursor.value(cursor.integer("I"))
        if value is not None:
            metadata[key] = value
    places = [_place(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise cursor.corrupt(f"general.alignment={alignment!r}")
    data_offset = math.ceil(cursor.at / alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in places:
        if name in tensors:
            raise cursor.corrupt(f"tensor {name} stands twice")
        tensors[name] = _tensor(cursor, name, shape, kind, data_offset + offset)
    return GgufHeader(path=cursor.path, metadata=metadata, tensors=tensors, num_bytes=cursor.at)


def _place(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    num_dimensions = cursor.integer("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.corrupt(f"tensor {name} has {num_dimensions} dimensions")
    # GGUF lists the fastest dimension first.
    shape = tuple(reversed(cursor.values("Q", num_dimensions)))
    return name, shape, cursor.integer("I"), cursor.integer("Q")


def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise cursor.corrupt(f"tensor {name} has the unknown type {kind}") from None
    elements, block_bytes = GGML_QUANT_SIZES[quantization]
    if 0 in shape or shape[-1] % elements:
        raise cursor.corrupt(f"tensor {name} {list(shape)} does not divide into blocks of {elements}")
    num_bytes = math.prod(shape) // elements * block_bytes
    if offset + num_bytes > len(cursor.data):
        raise cursor.corrupt(
            f"tensor {name} ends at byte {offset + num_bytes}, the file after {len(cursor.data)} bytes"
        )
    return GgufTensor(name, shape, quantization, offset, num_bytes)
