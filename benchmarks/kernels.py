"""Decode attention of a whole model, C++ against the torch reference, beside what memory can give.

Every layer has its own cache, so that a pass reads from memory and not from the last-level cache.
C++, reference and a plain read of memory take turns within a round, because the speed of a shared
machine drifts; figures are medians over the rounds.

    python benchmarks/kernels.py --threads 1
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from exegpt.kernels import paged_decode_attention, set_backend

READ_BYTES = 256 * 2**20  # well beyond any last-level cache


@dataclass(frozen=True, slots=True)
class Layer:
    """The inputs of one layer's decode attention."""

    query: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor


def main() -> None:
    """Parse the shape, measure both dtypes, print a table."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"{args.rows} rows, context {args.context}, {args.heads} heads, {args.kv_heads} K/V heads of "
        f"{args.head_dim}, pages of {args.page_size}, {args.layers} layers, {args.threads} thread(s), "
        f"medians of {args.rounds} rounds"
    )
    print(
        f"{'dtype':>9} {'backend':>8} {'ms/pass':>9} {'us/layer':>9} {'MB':>7} {'GB/s':>6} "
        f"{'GFLOP/s':>8} {'of read':>8}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        measure(args, dtype)


def parse_args() -> argparse.Namespace:
    """The shape of the pass; the defaults are SmolLM2-135M's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"threads": 1, "rows": 64, "context": 192, "heads": 9, "kv-heads": 3, "head-dim": 64}
    sizes |= {"page-size": 16, "layers": 30, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return parser.parse_args()


def measure(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print one line a backend, and one for the plain read."""
    generator = torch.Generator().manual_seed(0)
    layers = [make_layer(args, dtype, generator) for _ in range(args.layers)]
    buffer = torch.ones(READ_BYTES // 4)
    scale = args.head_dim**-0.5

    def attend() -> None:
        for layer in layers:
            paged_decode_attention(
                layer.query, layer.k_pages, layer.v_pages, layer.page_table, layer.context_lens, scale
            )

    wall_s: dict[str, list[float]] = {"c++": [], "torch": [], "read": []}
    for round_ in range(args.rounds + 1):
        for name, samples in wall_s.items():
            if name != "read":
                set_backend(name)
            elapsed_s = timed(buffer.sum if name == "read" else attend)
            if round_ > 0:  # the first round warms up
                samples.append(elapsed_s)
    set_backend(None)

    num_tokens = args.layers * args.rows * args.context
    kv_bytes = 2 * num_tokens * args.kv_heads * args.head_dim * dtype.itemsize
    flops = 4 * num_tokens * args.heads * args.head_dim
    ceiling_bytes_per_s = READ_BYTES / statistics.median(wall_s["read"])
    for name in ("c++", "torch"):
        median_s = statistics.median(wall_s[name])
        print(
            f"{str(dtype).removeprefix('torch.'):>9} {name:>8} {median_s * 1e3:9.2f} "
            f"{median_s / args.layers * 1e6:9.0f} {kv_bytes / 1e6:7.1f} {kv_bytes / median_s / 1e9:6.2f} "
            f"{flops / median_s / 1e9:8.2f} {kv_bytes / median_s / ceiling_bytes_per_s:8.0%}"
        )
    ratio = statistics.median(slow / fast for fast, slow in zip(wall_s["c++"], wall_s["torch"], strict=True))
    print(f"{'':>9} plain read of memory {ceiling_bytes_per_s / 1e9:.2f} GB/s; torch takes {ratio:.1f} x C++")


def make_layer(args: argparse.Namespace, dtype: torch.dtype, generator: torch.Generator) -> Layer:
    """A cache whose rows' pages are scattered, as they are after some minutes of serving."""
    pages_per_row = -(-args.context // args.page_size)
    num_pages = args.rows * pages_per_row
    shape = (num_pages, args.kv_heads, args.page_size, args.head_dim)
    return Layer(
        query=torch.randn(args.rows, args.heads, args.head_dim, generator=generator).to(dtype),
        k_pages=torch.randn(shape, generator=generator).to(dtype),
        v_pages=torch.randn(shape, generator=generator).to(dtype),
        page_table=torch.randperm(num_pages, generator=generator).int().view(args.rows, pages_per_row),
        context_lens=torch.full((args.rows,), args.context, dtype=torch.int32),
    )


def timed(function: Callable[[], object]) -> float:
    """Seconds one call takes."""
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    with torch.inference_mode():
        main()
