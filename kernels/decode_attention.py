"""Decode attention: one new token per row attends to its cached tokens.

On CPU it is `decode_attention.cpp`; `reference` beside it says in torch what that computes, and
serves every device and element type that has no kernel of its own.
"""

import torch

from .selection import announce_reference, library

# The C++ kernel handles eight elements at once.
_HEAD_DIM_STEP = 8
_COMPILED_DTYPES = (torch.float32, torch.bfloat16)


def paged_decode_attention(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one new token per row over that row's cached tokens.

    Parameters
    ----------
    query : tensor, shape (b, num_heads, head_dim)
        Of the dtype of the pages. Head h reads K/V head h // (num_heads // num_kv_heads).
    k_pages, v_pages : tensor, shape (num_pages, num_kv_heads, page_size, head_dim)
        The cache, contiguous. What lies behind a row's context is never used, be it NaN.
    page_table : int32 tensor, shape (b, max_pages)
        Pages of each row in order. Entries behind a row's context may be anything.
    context_lens : int32 tensor, shape (b,)
        Cached tokens of each row in tokens, the new one included: 1..max_pages * page_size.
    scale : float
        Factor on the scores, usually head_dim ** -0.5.

    Returns
    -------
    tensor, shape (b, num_heads, head_dim)
        Of the query's dtype. Sums are kept in float32.

    Raises
    ------
    ValueError
        If shapes, dtypes or devices do not fit each other.
    IndexError
        On CPU, if a context or a page lies outside the cache. An accelerator would have to be
        waited for to know.
    """
    _check(query, k_pages, v_pages, page_table, context_lens)
    compiled = library() if query.device.type == "cpu" else None
    if compiled is None:
        return reference(query, k_pages, v_pages, page_table, context_lens, scale)
    if query.dtype not in _COMPILED_DTYPES:
        announce_reference("Decode attention", f"its C++ has float32 and bfloat16, not {query.dtype}.")
        return reference(query, k_pages, v_pages, page_table, context_lens, scale)
    if query.shape[2] % _HEAD_DIM_STEP:
        announce_reference(
            "Decode attention", f"its C++ has no head_dim {query.shape[2]}, only multiples of 8."
        )
        return reference(query, k_pages, v_pages, page_table, context_lens, scale)

    query, page_table = query.contiguous(), page_table.contiguous()
    context_lens = context_lens.contiguous()
    output = torch.empty_like(query)
    num_rows, num_heads, head_dim = query.shape
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    misfit = compiled.exegpt_decode_attention(
        query.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        page_table.data_ptr(),
        context_lens.data_ptr(),
        output.data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        num_pages,
        page_table.shape[1],
        query.dtype == torch.bfloat16,
        scale,
    )
    if misfit:
        raise _outside(misfit - 1, k_pages, page_table, context_lens)
    return output


def reference(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same in plain torch: gather the pages, mask, softmax. See `paged_decode_attention`."""
    num_rows, num_heads, head_dim = query.shape
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    on_cpu = query.device.type == "cpu"
    table = page_table
    if on_cpu and num_rows:
        longest = int(context_lens.max())
        table = page_table[:, : -(-max(longest, 1) // page_size)]
    num_tokens = table.shape[1] * page_size
    held = torch.arange(num_tokens, device=query.device) < context_lens[:, None]
    needed = held[:, ::page_size]
    if on_cpu:
        wrong = (needed & ((table < 0) | (table >= num_pages))).any(1)
        wrong |= (context_lens < 1) | (context_lens > num_tokens)
        if wrong.any():
            raise _outside(int(wrong.int().argmax()), k_pages, page_table, context_lens)
    pages = table.masked_fill(~needed, 0).long()

    def gather(cache: torch.Tensor) -> torch.Tensor:
        shape = (num_rows, num_kv_heads, num_tokens, head_dim)
        return cache[pages].transpose(1, 2).reshape(shape).float()

    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
    scores = grouped * scale @ gather(k_pages).transpose(-1, -2)
    weights = scores.masked_fill(~held[:, None, None], float("-inf")).softmax(-1)
    # Zero weight does not silence a NaN, so values that are not the row's are zeroed themselves.
    values = gather(v_pages).masked_fill(~held[:, None, :, None], 0.0)
    return (weights @ values).view(num_rows, num_heads, head_dim).to(query.dtype)


def _check(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """One condition each call on the hot path; what exactly is wrong is told afterwards."""
    fits = (
        query.dim() == 3
        and k_pages.dim() == 4
        and page_table.dim() == 2
        and k_pages.shape == v_pages.shape
        and query.shape[2] == k_pages.shape[3]
        and query.shape[1] % k_pages.shape[1] == 0
        and (query.shape[0],) == context_lens.shape == page_table.shape[:1]
        and query.dtype == k_pages.dtype == v_pages.dtype
        and page_table.dtype == context_lens.dtype == torch.int32
        and query.device == k_pages.device == v_pages.device == page_table.device == context_lens.device
        and k_pages.is_contiguous()
        and v_pages.is_contiguous()
    )
    if fits:
        return
    given = {
        "query": query,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": page_table,
        "context_lens": context_lens,
    }
    described = ", ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        f"{'' if tensor.is_contiguous() else ' (not contiguous)'}"
        for name, tensor in given.items()
    )
    raise ValueError(
        f"decode attention was given {described}. It takes query (b, num_heads, head_dim); k_pages and "
        "v_pages (num_pages, num_kv_heads, page_size, head_dim) of its dtype, contiguous; page_table "
        "(b, max_pages) and context_lens (b,) in int32; all on one device, num_heads a multiple of "
        "num_kv_heads."
    )


def _outside(
    row: int, k_pages: torch.Tensor, page_table: torch.Tensor, context_lens: torch.Tensor
) -> IndexError:
    return IndexError(
        f"decode attention: row {row} has a context of {int(context_lens[row])} tokens in pages "
        f"{page_table[row].tolist()}. Allowed are 1..{page_table.shape[1] * k_pages.shape[2]} tokens in "
        f"pages 0..{k_pages.shape[0] - 1}."
    )
