"""K/V in pages: the memory itself, and the live rows of a micro-batch in it.

A page holds the keys and values of `page_size` tokens of one row in every layer of the stage. Rows
that finish give their pages back at once, and the rows that live on stay dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exegpt.errors import CapacityError
from exegpt.runner.pages import PageAllocator, PageError

__all__ = ["BatchRows", "KVCache", "PageAllocator", "PageError", "PromptTokens"]


class KVCache:
    """Keys and values of one stage on one rank.

    Attributes
    ----------
    k, v : tuples of tensors, one per layer
        Shape (num_pages, num_kv_heads, page_size, head_dim); not initialised. All layers' keys are
        one allocation, their values another.
    num_bytes : int
        Bytes of both.

    Raises
    ------
    CapacityError
        If the device has no room for it.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_bytes = num_pages * self.bytes_per_page(num_layers, page_size, num_kv_heads, head_dim, dtype)
        shape = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
        try:
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        except RuntimeError as error:
            raise CapacityError(
                f"K/V cache: {self.num_bytes} bytes ({num_pages} pages of {page_size} tokens in "
                f"{num_layers} layers) do not fit on {device}. Lower cluster.memory_gib, "
                "or the batch sizes of the schedule."
            ) from error
        self.k: tuple[Tensor, ...] = keys.unbind(0)
        self.v: tuple[Tensor, ...] = values.unbind(0)

    @staticmethod
    def bytes_per_page(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one page: keys and values in all layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Packed prompt tokens, as `StageModel.encode` takes them: int64 tensors of shape (n,)."""

    positions: Tensor
    slots: Tensor


class BatchRows:
    """The live rows of one micro-batch, dense and in the order in which they came.

    `add` rows and encode them; then, for each decode iteration, `advance`, decode, and `keep` the
    rows that go on. A call is a few array operations; single rows are touched only when they come,
    leave, or need another page.

    Parameters
    ----------
    allocator : PageAllocator
        Shared by all micro-batches of a rank.
    capacity : int
        Most rows at once.
    max_pages : int
        Most pages of one row; width of the page table.
    device
        Where the tensors are wanted.

    Attributes
    ----------
    positions, slots : int64 tensors, shape (b,)
        Set by `advance`, for `StageModel.decode`: place of each row's new token in its sequence and
        in the cache.
    context_lens : int32 tensor, shape (b,)
        Likewise: tokens attended to, the new one included.
    page_table : int32 tensor, shape (b, max_pages)
        Likewise: pages of each row; columns behind its last page hold anything. On the CPU it
        shares memory with the rows, so it is valid until rows come or leave.
    """

    def __init__(
        self, allocator: PageAllocator, capacity: int, max_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._device = torch.device(device)
        self._num_rows = 0
        self._ids: NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        # Tokens of each row whose keys and values are stored.
        self._stored: NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        # Rows whose pages are given back already, though they have not left yet.
        self._released: NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)
        self._table: NDArray[np.int32] = np.zeros((capacity, max_pages), dtype=np.int32)
        self._hold(np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return self._num_rows

    @property
    def row_ids(self) -> NDArray[np.int64]:
        """Ids of the live rows, shape (b,)."""
        return np.array(self._ids[: self._num_rows], dtype=np.int64)

    @property
    def stored_tokens(self) -> NDArray[np.int64]:
        """Tokens of each live row whose keys and values are stored, shape (b,)."""
        return np.array(self._stored[: self._num_rows], dtype=np.int64)

    def add(self, row_ids: Sequence[int], lengths: Sequence[int]) -> PromptTokens:
        """Append rows behind the live ones, with pages for prompts of `lengths` tokens.

        Returns
        -------
        PromptTokens
            Where each prompt token stands and is stored, prompt after prompt.

        Raises
        ------
        CapacityError
            If rows, pages, or the pages of one row run out; nothing has changed then.
        PageError
            If an id holds pages already, or a prompt is empty.
        """
        new_lengths = np.asarray(lengths, dtype=np.int64)
        self._check_new(row_ids, new_lengths)
        first, end = self._num_rows, self._num_rows + len(row_ids)
        for row, (row_id, length) in enumerate(zip(row_ids, lengths, strict=True), start=first):
            pages = self._allocator.reserve(row_id, length)
            self._table[row, : len(pages)] = pages
        self._num_rows = end
        self._ids[first:end] = row_ids
        self._stored[first:end] = new_lengths
        self._released[first:end] = False

        starts = np.cumsum(new_lengths) - new_lengths
        positions = np.arange(new_lengths.sum()) - np.repeat(starts, new_lengths)
        rows = np.repeat(np.arange(first, end), new_lengths)
        return PromptTokens(self._tensor(positions), self._tensor(self._slots(rows, positions)))

    def advance(self, frozen: NDArray[np.bool_] | None = None) -> None:
        """Make room for the next token of every row, and set the tensors that decoding it takes.

        Parameters
        ----------
        frozen : bool array, shape (b,), optional
            Rows that are computed at the place of their last token again and take no more room: the
            finished ones of a batch that runs until its longest ends. None by default.

        Raises
        ------
        CapacityError
            If pages, or the pages of one row, run out; nothing has changed then.
        PageError
            If a row among them gave its pages back: they may hold another row's tokens now.
        """
        stored = self._stored[: self._num_rows]
        if self._released[: self._num_rows].any():
            gone = self._ids[: self._num_rows][self._released[: self._num_rows]].tolist()
            raise PageError(
                f"rows {gone} gave their pages back and cannot be decoded; keep() the others first"
            )
        growing = np.ones(self._num_rows, dtype=np.bool_) if frozen is None else ~frozen
        self._check_mask(growing)
        at_edge = np.flatnonzero(growing & (stored % self._page_size == 0))
        if at_edge.size:
            self._add_pages(at_edge)
        stored += growing
        self._hold(stored - 1)

    def release(self, row_ids: Sequence[int]) -> list[int]:
        """Give back the pages of those of `row_ids` that are live here, ahead of their leaving.

        The rows keep their places until `keep` drops them, so that what is counted along with them
        stays in step; they cannot `advance`.

        Returns
        -------
        list of int
            Ids that were live here.
        """
        wanted = np.isin(self._ids[: self._num_rows], np.asarray(row_ids, dtype=np.int64))
        wanted &= ~self._released[: self._num_rows]
        return self._give_back(np.flatnonzero(wanted))

    def keep(self, mask: NDArray[np.bool_]) -> list[int]:
        """Close up the rows where `mask` (b,) is true, in their order; the others give back their pages.

        Returns
        -------
        list of int
            Ids of the rows that gave back pages.
        """
        self._check_mask(mask)
        if mask.all():
            return []
        left = self._give_back(np.flatnonzero(~mask & ~self._released[: self._num_rows]))
        kept = np.flatnonzero(mask)
        for column in (self._ids, self._stored, self._released, self._table):
            column[: kept.size] = column[kept]
        self._num_rows = kept.size
        return left

    def _give_back(self, rows: NDArray[np.intp]) -> list[int]:
        row_ids: list[int] = self._ids[rows].tolist()
        for row_id in row_ids:
            self._allocator.release(row_id)
        self._released[rows] = True
        return row_ids

    def _check_mask(self, mask: NDArray[np.bool_]) -> None:
        if mask.shape != (self._num_rows,):
            raise PageError(f"a mask of shape {mask.shape} was given for {self._num_rows} rows")

    def _check_new(self, row_ids: Sequence[int], lengths: NDArray[np.int64]) -> None:
        taken = [row_id for row_id in row_ids if self._allocator.owns(row_id)]
        if taken or len(set(row_ids)) != len(row_ids):
            raise PageError(f"rows {taken or list(row_ids)} are added twice: an id lives once at a time")
        if np.any(lengths < 1):
            raise PageError(f"row {row_ids[int(lengths.argmin())]} is empty: there is nothing to store")
        if self._num_rows + len(row_ids) > len(self._ids):
            raise CapacityError(
                f"{self._num_rows} rows live and {len(row_ids)} come, but the micro-batch holds "
                f"{len(self._ids)}. Lower the batch sizes of the schedule."
            )
        self._check_width(int(lengths.max(initial=0)))
        needed = int((-(-lengths // self._page_size)).sum())
        self._allocator.check_free(needed, f"{len(row_ids)} prompts of {lengths.sum()} tokens")

    def _check_width(self, tokens: int) -> None:
        max_pages = self._table.shape[1]
        if self._allocator.num_needed(tokens) > max_pages:
            raise CapacityError(
                f"a row of {tokens} tokens does not fit in {max_pages} pages of {self._page_size} tokens, "
                "the most that one row may have. Lower runner.max_output_tokens, or leave longer prompts out."
            )

    def _add_pages(self, rows: NDArray[np.intp]) -> None:
        """One more page for each of `rows`, whose pages are full."""
        stored = self._stored[rows]
        self._check_width(int(stored.max()) + 1)
        self._allocator.check_free(rows.size, f"the next tokens of {rows.size} rows")
        self._table[rows, stored // self._page_size] = [
            self._allocator.reserve(row_id, tokens + 1)[0]
            for row_id, tokens in zip(self._ids[rows].tolist(), stored.tolist(), strict=True)
        ]

    def _slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        columns, offsets = np.divmod(positions, self._page_size)
        slots: NDArray[np.int64] = self._table[rows, columns] * np.int64(self._page_size) + offsets
        return slots

    def _hold(self, positions: NDArray[np.int64]) -> None:
        self.positions = self._tensor(positions)
        self.slots = self._tensor(self._slots(np.arange(self._num_rows), positions))
        self.context_lens = self._tensor((positions + 1).astype(np.int32))
        self.page_table = self._tensor(self._table[: self._num_rows])

    def _tensor(self, values: NDArray[np.integer]) -> Tensor:
        """The values on the device; on the CPU they share memory."""
        return torch.from_numpy(values).to(self._device)
