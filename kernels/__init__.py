"""Attention and K/V kernels of the runtime, each with its plain torch reference beside it.

Tensors choose the kernel by their device. CPU has C++ for decode attention and for appending to
the cache; it is built on first use. Everything else runs in torch.
"""

from .decode_attention import paged_decode_attention
from .kv_append import append_kv
from .packed_attention import encode_attention
from .selection import backend, set_backend

__all__ = ["append_kv", "backend", "encode_attention", "paged_decode_attention", "set_backend"]
