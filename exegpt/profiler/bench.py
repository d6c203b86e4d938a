"""Times the real engine, cell by cell: one working point of encoding or decoding at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from exegpt.profiler.job import MeasureJob
from exegpt.profiler.stopwatch import Stopwatch
from exegpt.runner.engine import NewRow, Plan, StageEngine
from exegpt.runner.kv_cache import KVCache, PageAllocator
from exegpt.runner.models import StageModel, TensorParallel
from exegpt.runner.sampling import SamplingSpec
from exegpt.runner.transport import Transport
from exegpt.runner.weights import RandomWeights
from exegpt.schedule import Stage
from exegpt.specs import Dtype

# Decode iterations per cell that are timed, after one that is not.
DECODE_REPEATS = 3

# Most queries of a cell.
MAX_QUERIES = 256

# Weights of the timed layers together exceed the last-level cache by this factor, so that a layer
# finds its weights as cold as in a whole model.
CACHE_FACTOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one cell: per layer `linear`, `attention` and one `all_reduce`; per stage the rest."""

    linear: float
    attention: float
    all_reduce: float
    head: float
    embed: float
    overhead: float


def last_level_cache_bytes() -> int:
    """Size of the largest CPU cache as the kernel tells; 32 MiB where it does not."""
    from pathlib import Path

    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 2**10, "M": 2**20}.get(text[-1])
        if scale and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * scale)
    return max(sizes, default=32 * 2**20)


class Bench:
    """An engine of a few layers at one tensor-parallel degree, with a stopwatch at its seams.

    Parameters
    ----------
    job : MeasureJob
    transport : Transport
    tp : TensorParallel
        This rank's group; all groups measure at the same time, as they will serve.
    ranks : tuple of int
        The group's ranks.
    device : torch.device
    max_context_tokens : int
        Tokens whose K/V the cells may need at once.
    """

    def __init__(
        self,
        job: MeasureJob,
        transport: Transport,
        tp: TensorParallel,
        ranks: tuple[int, ...],
        device: torch.device,
        max_context_tokens: int,
    ) -> None:
        dtype = getattr(torch, job.key.dtype)
        layer_bytes = job.model.layer_parameters * Dtype(job.key.dtype).num_bytes / tp.size
        wanted = (
            math.ceil(CACHE_FACTOR * last_level_cache_bytes() / layer_bytes) if device.type == "cpu" else 4
        )
        self.num_layers = max(min(wanted, job.model.num_hidden_layers), 1)
        # One query alone stands for a whole context sum, which may be longer than the model's window.
        window = max(job.model.max_position_embeddings, max_context_tokens)
        self.spec = replace(job.model, num_hidden_layers=self.num_layers, max_position_embeddings=window)
        self.watch = Stopwatch(device)
        self.model = StageModel(self.spec, (0, self.num_layers), self._timed(tp), dtype=dtype, device=device)
        self.model.load(RandomWeights(self.spec, 0))
        self.model.seam = self.watch.mark
        num_pages = max_context_tokens // job.page_size
        heads = max(job.model.num_key_value_heads // tp.size, 1)
        self.cache = KVCache(
            self.num_layers, num_pages, job.page_size, heads, job.model.head_dim, dtype, device
        )
        for tensor in (*self.cache.k, *self.cache.v):
            tensor.normal_()
        self.allocator = PageAllocator(num_pages, job.page_size)
        self.engine = StageEngine(
            self.model,
            self.cache,
            self.allocator,
            stages=[Stage(role="both", ranks=ranks, layers=(0, self.num_layers))],
            stage_index=0,
            transport=transport,
            num_micro_batches=1,
            max_rows=MAX_QUERIES,
            sampling=SamplingSpec(),
            eos_token_ids=frozenset(),
        )

    def _timed(self, tp: TensorParallel) -> TensorParallel:
        if tp.size == 1:
            return tp

        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            self.watch.mark("linear")
            result = tp.all_reduce(tensor)
            self.watch.mark("all_reduce")
            return result

        return replace(tp, all_reduce=all_reduce)

    def keep_one_layer(self) -> None:
        """Go on with a single layer: long prompts need no cold weights, and cost as many times less."""
        self.model.layers = self.model.layers[:1]
        self.cache.k, self.cache.v = self.cache.k[:1], self.cache.v[:1]
        self.num_layers = 1

    def decode(self, queries: int, context_tokens: int) -> Sample:
        """Median sample of decode iterations with contexts that sum to `context_tokens`."""
        rows = self.engine.micro_batches[0]
        # The timed iterations lengthen each context by one token.
        each = max(context_tokens // queries - 1 - DECODE_REPEATS // 2, 1)
        ids = range(queries)
        rows.add([NewRow(id=i, input_tokens=each, max_output_tokens=2**30, ignore_eos=True) for i in ids])
        plan = Plan(cycle=0, release=[], encode=[[]], decode_iterations=1, keep_finished=False)
        samples = [self._timed_run(lambda: self.engine.execute(plan)) for _ in range(1 + DECODE_REPEATS)]
        self._clear()
        return _median(samples[1:])

    def encode(self, queries: int, length: int, repeats: int) -> Sample:
        """Median sample of encoding `queries` prompts of about `length` tokens."""
        # Lengths differ by a token or two: equal ones would be computed as one padded batch.
        lengths = [max(length + (i % 3) - 1, 1) if queries > 1 else length for i in range(queries)]
        tokens = [np.arange(n) % self.spec.vocab_size for n in lengths]
        samples = []
        for _ in range(repeats):
            rows = [
                NewRow(id=i, input_tokens=n, max_output_tokens=2, ignore_eos=True, token_ids=t.tolist())
                for i, (n, t) in enumerate(zip(lengths, tokens, strict=True))
            ]
            plan = Plan(cycle=0, release=[], encode=[rows], decode_iterations=0, keep_finished=False)
            samples.append(self._timed_run(lambda plan=plan: self.engine.execute(plan)))  # type: ignore[misc]
            self._clear()
        return _median(samples)

    def _timed_run(self, work: Callable[[], None]) -> Sample:
        started = time.perf_counter()
        self.watch.start()
        work()
        parts = self.watch.read()
        total = time.perf_counter() - started
        layers = self.num_layers
        attention = parts.get("encode_attention", 0.0) + parts.get("decode_attention", 0.0)
        known = parts.get("linear", 0.0) + attention + parts.get("all_reduce", 0.0)
        known += parts.get("head", 0.0) + parts.get("embed", 0.0)
        return Sample(
            linear=parts.get("linear", 0.0) / layers,
            attention=attention / layers,
            all_reduce=parts.get("all_reduce", 0.0) / (2 * layers),
            head=parts.get("head", 0.0),
            embed=parts.get("embed", 0.0),
            overhead=max(total - known, 0.0),
        )

    def _clear(self) -> None:
        rows = self.engine.micro_batches[0]
        rows.sampled.clear()
        rows.received.clear()
        rows.keep(np.zeros(len(rows.rows), dtype=bool))
        self.engine.events.clear()


def _median(samples: list[Sample]) -> Sample:
    names = Sample.__dataclass_fields__
    return Sample(**{name: float(np.median([getattr(s, name) for s in samples])) for name in names})
