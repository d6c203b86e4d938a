"""Appending new K/V rows to the paged cache.

On CPU it is `kv_append.cpp`; `reference` beside it says the same in torch and serves the other
devices.
"""

import torch

from .selection import library


def append_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write new K/V rows into their slots of the cache, in place.

    Parameters
    ----------
    key, value : tensor, shape (n, num_kv_heads, head_dim)
        Rows may be strided, as slices of one projection are.
    k_pages, v_pages : tensor, shape (num_pages, num_kv_heads, page_size, head_dim)
        The cache, contiguous, of the rows' dtype. Written.
    slots : int64 tensor, shape (n,)
        page * page_size + offset of each row. All different, or the winner is undefined.

    Raises
    ------
    ValueError
        If shapes, dtypes or devices do not fit each other.
    IndexError
        If a slot lies outside the cache; on CPU nothing has been written then.
    """
    _check(key, value, k_pages, v_pages, slots)
    compiled = library() if key.device.type == "cpu" else None
    if compiled is None:
        reference(key, value, k_pages, v_pages, slots)
        return
    key, value, slots = _dense_rows(key), _dense_rows(value), slots.contiguous()
    num_rows, num_kv_heads, head_dim = key.shape
    num_pages, _, page_size, _ = k_pages.shape
    size = key.element_size()
    misfit = compiled.exegpt_append_kv(
        key.data_ptr(),
        value.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        slots.data_ptr(),
        num_rows,
        key.stride(0) * size,
        value.stride(0) * size,
        num_pages,
        num_kv_heads,
        page_size,
        head_dim * size,
    )
    if misfit:
        raise _outside(misfit - 1, k_pages, slots)


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """The same in plain torch. See `append_kv`."""
    page_size = k_pages.shape[2]
    if key.device.type == "cpu":
        wrong = (slots < 0) | (slots >= k_pages.shape[0] * page_size)
        if wrong.any():
            raise _outside(int(wrong.int().argmax()), k_pages, slots)
    pages, offsets = slots // page_size, slots % page_size
    k_pages[pages, :, offsets] = key
    v_pages[pages, :, offsets] = value


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows that are contiguous in themselves, whatever lies between them."""
    dense = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if dense else rows.contiguous()


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    fits = (
        key.dim() == 3
        and k_pages.dim() == 4
        and key.shape == value.shape
        and k_pages.shape == v_pages.shape
        and key.shape[1] == k_pages.shape[1]
        and key.shape[2] == k_pages.shape[3]
        and slots.shape == key.shape[:1]
        and slots.dtype == torch.int64
        and key.dtype == value.dtype == k_pages.dtype == v_pages.dtype
        and key.device == value.device == k_pages.device == v_pages.device == slots.device
        and k_pages.is_contiguous()
        and v_pages.is_contiguous()
    )
    if fits:
        return
    given = {"key": key, "value": value, "k_pages": k_pages, "v_pages": v_pages, "slots": slots}
    described = ", ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" for name, tensor in given.items()
    )
    raise ValueError(
        f"append_kv was given {described}. It takes key and value (n, num_kv_heads, head_dim); k_pages and "
        "v_pages (num_pages, num_kv_heads, page_size, head_dim) of their dtype, contiguous; slots (n,) in "
        "int64; all on one device."
    )


def _outside(row: int, k_pages: torch.Tensor, slots: torch.Tensor) -> IndexError:
    return IndexError(
        f"append_kv: row {row} goes to slot {int(slots[row])}, but the cache has slots "
        f"0..{k_pages.shape[0] * k_pages.shape[2] - 1}."
    )
