"""Measures a model's costs on the ranks that will serve it, all of them busy at once.

The real engine runs a few layers with a stopwatch at its seams, so what is timed is what will run:
kernels, bookkeeping and sampling included. Sizes rise until the time budget is used up; the table
says how far they came, and nothing beyond is guessed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from exegpt.errors import ExeGPTError
from exegpt.profiler.bench import MAX_QUERIES, Bench, Sample
from exegpt.profiler.grid import Grid, make_grid
from exegpt.profiler.job import MeasureJob, read_measure_job
from exegpt.profiler.table import LayerCosts, ProfileTable, write_profile
from exegpt.runner.models import TensorParallel
from exegpt.runner.progress import step_progress
from exegpt.runner.transport import DistributedTransport, start_transport
from exegpt.runner.worker import report_error
from exegpt.specs import Dtype

DECODE_QUERIES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, MAX_QUERIES)
ATTENTION_QUERIES = frozenset((1, 8, 32, 64, 128, 256))
CONTEXT_TOKENS = (256, 1024, 4096, 16384, 65536, 131072)
ENCODE_QUERIES = (1, 4)
ENCODE_LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
# Larger batches of prompts, for what depends on tokens or queries alone: (queries, length).
BULK_CELLS = ((16, 32), (64, 32), (256, 16), (16, 512), (32, 512), (64, 512))
ONE_LAYER_FROM_TOKENS = 2048
SEND_BYTES = (2**10, 2**14, 2**17, 2**20, 2**23, 2**26, 2**28)

# Shares of the budget for decoding and encoding; messages get the rest.
DECODE_SHARE, ENCODE_SHARE = 0.45, 0.45


@dataclass(slots=True)
class _Cells:
    """Samples by working point."""

    decode: dict[tuple[int, int], Sample] = field(default_factory=dict)
    encode: dict[tuple[int, int], Sample] = field(default_factory=dict)


class _Measurement:
    def __init__(
        self, job: MeasureJob, transport: DistributedTransport, report: Callable[[int, int], None]
    ) -> None:
        self.job = job
        self.transport = transport
        self.report = report
        self.done = 0
        degrees = job.model.tp_sizes(job.gpus_per_node)
        self.degrees = [t for t in degrees if job.gpus_per_node % t == 0]
        self.total = len(self.degrees) * (len(DECODE_QUERIES) + len(ENCODE_LENGTHS) + len(BULK_CELLS)) + 1

    def step(self) -> None:
        self.done += 1
        self.report(self.done, self.total)

    def agreed(self, wish: bool) -> bool:
        """Rank 0's wish on every rank: cells hold collectives, so all ranks must do the same ones."""
        return bool(self.transport.gather_objects(wish)[0])

    def mean(self, sample: Sample) -> Sample:
        """Mean over ranks: each measured its own share of the same machine."""
        everyone = self.transport.gather_objects(sample)
        names = Sample.__dataclass_fields__
        return Sample(**{name: float(np.mean([getattr(s, name) for s in everyone])) for name in names})

    def groups(self, tp_size: int) -> tuple[TensorParallel, tuple[int, ...]]:
        world = self.transport.world_size
        mine: tuple[TensorParallel, tuple[int, ...]] | None = None
        for first in range(0, world, tp_size):
            ranks = tuple(range(first, first + tp_size))
            tp = self.transport.tensor_parallel(ranks)
            if self.transport.rank in ranks:
                mine = tp, ranks
        assert mine is not None
        return mine

    def max_context_tokens(self, tp_size: int, num_layers: int) -> int:
        """Largest context sum: K/V of the timed layers in a quarter of the memory."""
        dtype = Dtype(self.job.key.dtype)
        per_token = self.job.model.kv_bytes_per_token(dtype, num_layers, tp_size)
        return min(max(CONTEXT_TOKENS), int(self.job.memory_bytes / 4 / per_token))

    def run(self) -> ProfileTable:
        started = time.perf_counter()
        layers = {tp_size: self.degree(tp_size) for tp_size in self.degrees}
        send = self.sends(max(costs.linear.limit() for costs in layers.values()))
        self.step()
        return ProfileTable(
            key=self.job.key,
            layers=layers,
            send=send,
            measured_s=time.perf_counter() - started,
            notes=_notes([g for c in layers.values() for g in _grids(c)]),
        )

    def degree(self, tp_size: int) -> LayerCosts:
        tp, ranks = self.groups(tp_size)
        budget_s = self.job.budget_s / len(self.degrees)
        # Room for every context of the grid, with a page more per query.
        context = self.max_context_tokens(tp_size, self.job.model.num_hidden_layers)
        pages = context + max(DECODE_QUERIES) * 2 * self.job.page_size
        bench = Bench(self.job, self.transport, tp, ranks, self.transport.device, pages)
        cells = _Cells()
        self.decode_cells(bench, cells, DECODE_SHARE * budget_s, context)
        self.encode_cells(bench, cells, ENCODE_SHARE * budget_s)
        return layer_costs(cells, tp_size, self.job.model.hidden_size * Dtype(self.job.key.dtype).num_bytes)

    def decode_cells(self, bench: Bench, cells: _Cells, budget_s: float, max_context: int) -> None:
        bench.decode(1, CONTEXT_TOKENS[0])
        started = time.perf_counter()
        contexts = [c for c in CONTEXT_TOKENS if c < max_context] + [max_context]
        last_s = 0.0
        for queries in DECODE_QUERIES:
            # A batch may take twice as long as the one before; the first three are always measured.
            wish = time.perf_counter() - started + 2 * last_s < budget_s or queries <= 4
            if not self.agreed(wish):
                self.done += 1
                continue
            begun = time.perf_counter()
            chosen = contexts if queries in ATTENTION_QUERIES else contexts[1:2]
            for context in chosen:
                if context >= 2 * queries:
                    cells.decode[queries, context] = self.mean(bench.decode(queries, context))
            if queries in ATTENTION_QUERIES:
                last_s = time.perf_counter() - begun
            self.step()

    def encode_cells(self, bench: Bench, cells: _Cells, budget_s: float) -> None:
        started = time.perf_counter()
        per_token_s = 0.0
        window = self.job.model.max_position_embeddings
        points = [[(q, n) for q in ENCODE_QUERIES] for n in ENCODE_LENGTHS if n <= window]
        points += [[cell] for cell in BULK_CELLS if cell[1] <= window]
        points.sort(key=lambda row: max(q * n for q, n in row))
        for row in points:
            tokens = max(q * n for q, n in row)
            if tokens > ONE_LAYER_FROM_TOKENS and bench.num_layers > 1:
                bench.keep_one_layer()
                per_token_s = 0.0
            wish = time.perf_counter() - started + 1.5 * per_token_s * sum(q * n for q, n in row) < budget_s
            if not self.agreed(wish or tokens <= 256):
                self.done += 1
                continue
            begun = time.perf_counter()
            for queries, length in row:
                repeats = 3 if queries * length <= 512 else 1
                if bench.allocator.num_free * self.job.page_size >= queries * (length + self.job.page_size):
                    cells.encode[queries, length] = self.mean(bench.encode(queries, length, repeats))
            per_token_s = (time.perf_counter() - begun) / sum(q * n for q, n in row)
            self.step()

    def sends(self, max_tokens: float) -> Grid:
        """Half a round trip between neighbours, by bytes; a lone rank sends nothing."""
        most = max_tokens * self.job.model.hidden_size * Dtype(self.job.key.dtype).num_bytes
        sizes = [b for b in SEND_BYTES if b < most] + [int(most)]
        rank, world = self.transport.rank, self.transport.world_size
        peer = rank ^ 1
        times = []
        for size in sizes:
            if peer < world:
                times.append(self._round_trip(size, peer, first=rank < peer) / 2)
            else:
                times.append(0.0)
        everyone = np.asarray(self.transport.gather_objects(times))
        return make_grid("send", ("bytes",), (sizes,), everyone.max(axis=0))

    def _round_trip(self, size: int, peer: int, *, first: bool) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=self.transport.device)
        samples = []
        for _ in range(3):
            started = time.perf_counter()
            if first:
                self.transport.send(payload, peer)
            self.transport.receive([size], torch.uint8, peer)
            if not first:
                self.transport.send(payload, peer)
            samples.append(time.perf_counter() - started)
        return float(np.median(samples))


def layer_costs(cells: _Cells, tp_size: int, row_bytes: int) -> LayerCosts:
    """Grids of one degree from its samples."""
    prefix = f"tp{tp_size}."
    by_tokens = _by(cells, lambda q, n, phase: q * n if phase == "encode" else q)
    by_queries = _by(cells, lambda q, n, phase: q)
    encode_only = {q: [s for (p, _), s in cells.encode.items() if p == q] for q, _ in cells.encode}
    decode_only = {q: [s for (p, _), s in cells.decode.items() if p == q] for q, _ in cells.decode}
    all_reduce = None
    if tp_size > 1:
        sizes = {tokens * row_bytes: samples for tokens, samples in by_tokens.items()}
        all_reduce = _line(f"{prefix}all_reduce", "bytes", sizes, "all_reduce")
    return LayerCosts(
        linear=_line(f"{prefix}linear", "tokens", by_tokens, "linear"),
        encode_attention=_encode_attention(cells, prefix),
        decode_attention=_decode_attention(cells, prefix),
        head=_line(f"{prefix}head", "queries", by_queries, "head"),
        embed=_line(f"{prefix}embed", "tokens", by_tokens, "embed"),
        encode_overhead=_line(f"{prefix}encode_overhead", "queries", encode_only, "overhead"),
        decode_overhead=_line(f"{prefix}decode_overhead", "queries", decode_only, "overhead"),
        all_reduce=all_reduce,
    )


def _by(cells: _Cells, key: Callable[[int, int, str], int]) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for phase, samples in (("decode", cells.decode), ("encode", cells.encode)):
        for (q, n), sample in samples.items():
            found.setdefault(key(q, n, phase), []).append(sample)
    return found


def _line(name: str, axis: str, samples: dict[int, list[Sample]], part: str) -> Grid:
    points = sorted(samples)
    values = [float(np.median([getattr(s, part) for s in samples[p]])) for p in points]
    return make_grid(name, (axis,), (points,), values)


def _encode_attention(cells: _Cells, prefix: str) -> Grid:
    lengths = sorted({n for q, n in cells.encode if all((p, n) in cells.encode for p in ENCODE_QUERIES)})
    values = [[cells.encode[q, n].attention for n in lengths] for q in ENCODE_QUERIES]
    return make_grid(
        f"{prefix}encode_attention", ("queries", "length_tokens"), (ENCODE_QUERIES, lengths), values
    )


def _decode_attention(cells: _Cells, prefix: str) -> Grid:
    contexts = sorted({n for q, n in cells.decode if q == 1})
    queries = sorted({q for q, _ in cells.decode if q in ATTENTION_QUERIES})
    values = np.full((len(queries), len(contexts)), np.nan)
    for i, q in enumerate(queries):
        for j, n in enumerate(contexts):
            if (q, n) in cells.decode:
                values[i, j] = cells.decode[q, n].attention
        # Fewer than two tokens per query do not occur; the smallest context that does stands for them.
        first = int(np.flatnonzero(~np.isnan(values[i]))[0])
        values[i, :first] = values[i, first]
    return make_grid(f"{prefix}decode_attention", ("queries", "context_tokens"), (queries, contexts), values)


def _grids(costs: LayerCosts) -> list[Grid]:
    found = (getattr(costs, name) for name in LayerCosts.__dataclass_fields__)
    return [grid for grid in found if grid is not None]


def _notes(grids: Sequence[Grid]) -> tuple[str, ...]:
    """Tables that noise had bent: where making them isotone moved a time by more than a quarter."""
    bent = [
        f"{g.name} by up to {g.repaired:.0%}" for g in grids if g.repaired > 0.25 and g.values_s.max() > 1e-4
    ]
    return (f"profile made isotone: {', '.join(bent)}",) if bent else ()


def measure_on(job: MeasureJob, transport: DistributedTransport) -> None:
    """Measure on a group of ranks that exists; rank 0 writes the table.

    Cells that hold collectives run on all ranks in the same order.
    """
    torch.set_num_threads(job.num_threads)
    with step_progress("profiling") if transport.rank == 0 else _silent() as report:
        table = _Measurement(job, transport, report).run()
    if transport.rank == 0:
        write_profile(table, job.path)
    transport.barrier()


class _silent:
    def __enter__(self) -> Callable[[int, int], None]:
        return lambda done, total: None

    def __exit__(self, *error: object) -> None:
        return None


def main(argv: list[str]) -> None:
    """Entry of `deepspeed --module exegpt.profiler.measure JOB`."""
    path = Path(argv[1])
    transport, environment = start_transport()
    try:
        # Rank 0's job: on another node the file need not be there.
        job = transport.gather_objects(read_measure_job(path) if environment.rank == 0 else None)[0]
        measure_on(job, transport)
        transport.close()
    except ExeGPTError as error:
        report_error(error, path.parent, environment.rank)
        raise SystemExit(2) from error
    except BaseException as error:
        report_error(error, path.parent, environment.rank)
        raise


if __name__ == "__main__":
    main(sys.argv)
