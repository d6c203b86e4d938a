"""Weights from GGUF files, dequantised tensor by tensor under Hugging Face names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import dequantize

from exegpt.errors import WeightsError
from exegpt.runner.weights.gguf_config import spec_of_header
from exegpt.runner.weights.gguf_header import GgufTensor, read_gguf_header
from exegpt.runner.weights.reader import bounds, missing_tensor

if TYPE_CHECKING:
    import torch

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufWeights:
    """Tensors of a GGUF file in float32; parts are cut from the mapped file before dequantising.

    Parameters
    ----------
    path : Path
        The `.gguf` file.

    Raises
    ------
    WeightsError
        If the file is missing, truncated or corrupt, or its architecture is not supported.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.source = str(path)
        self._spec = spec_of_header(header, path.stem)
        self._permuted = header.metadata["general.architecture"] == "llama"
        self._tensors: dict[str, GgufTensor] = {}
        for stored, tensor in header.tensors.items():
            name = _hugging_face_name(stored)
            if name is not None:
                self._tensors[name] = tensor
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def names(self) -> frozenset[str]:
        """Names of all tensors, translated from those of llama.cpp."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        if name not in self._tensors:
            raise missing_tensor(self.source, name)
        return self._tensors[name].shape

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Dequantise a tensor or a part of it; see `WeightReader.read`."""
        import torch

        shape = self.shape(name)
        tensor = self._tensors[name]
        flat = len(shape) == 1
        num_rows, num_columns = (shape[0], 1) if flat else shape
        start, stop = bounds(rows, num_rows)
        first, last = bounds(columns, num_columns)
        indices = self._stored_rows(name, num_rows)[start:stop]
        if flat:
            # A vector is one row of the file: its rows are elements there.
            return torch.from_numpy(self._dequantize(tensor, np.zeros(1, np.intp), 0, num_rows)[0][indices])
        return torch.from_numpy(self._dequantize(tensor, indices, first, last))

    def _stored_rows(self, name: str, num_rows: int) -> npt.NDArray[np.intp]:
        """Row of the file for each row of the Hugging Face tensor.

        llama.cpp rotates neighbouring elements where transformers rotates the two halves of a
        head, so files of its architecture `llama` hold the rows of q and k interleaved (their
        weights and their biases; `LlamaModel.permute` in its converter).
        """
        rows = np.arange(num_rows, dtype=np.intp)
        match = re.search(r"self_attn\.([qk])_proj\.", name)
        if not self._permuted or match is None:
            return rows
        heads = self._spec.num_attention_heads if match[1] == "q" else self._spec.num_key_value_heads
        interleaved: npt.NDArray[np.intp] = rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return interleaved

    def _dequantize(
        self, tensor: GgufTensor, rows: npt.NDArray[np.intp], first: int, last: int
    ) -> npt.NDArray[np.float32]:
        """Elements `first` to `last` of the given rows of the file, as float32."""
        elements, block_bytes = tensor.block
        row_bytes = tensor.shape[-1] // elements * block_bytes
        data = self._data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes].reshape(-1, row_bytes)
        first_block, last_block = first // elements, -(-last // elements)
        raw: npt.NDArray[Any] = data[rows, first_block * block_bytes : last_block * block_bytes]
        if raw.size == 0:
            return np.empty((len(rows), last - first), np.float32)
        try:
            values = dequantize(np.ascontiguousarray(raw), tensor.kind)
        except NotImplementedError as error:
            raise WeightsError(
                f"{self.source}: tensor {tensor.name} has the type {tensor.kind.name}, which the gguf "
                "package does not dequantise; choose another quantisation of the model (model.weights)"
            ) from error
        offset = first_block * elements
        return np.array(values[:, first - offset : last - offset], dtype=np.float32)


def _hugging_face_name(stored: str) -> str | None:
    """Hugging Face's name for a tensor of llama.cpp's; None for one that no layer reads."""
    module, _, part = stored.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{part}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{part}"
