"""The table of runs whose tokens must be transformers', and the jobs made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from dist_models import SHORT_IDS, Oracle, spoiled_requests

from exegpt.runner.job import RunJob
from exegpt.schedule import Knobs, Schedule, Stage
from exegpt.settings import SamplingSettings
from exegpt.specs import Dtype, Policy
from exegpt.workload.requests import Request, poisson_arrivals

SEED = 17
DRAWN = SamplingSettings(temperature=0.9, top_p=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run.

    Attributes
    ----------
    model : str
        Name in `dist_models.SHAPES`.
    tp_sizes : tuple of int
        Tensor-parallel degree of every stage; their sum is the world size.
    batch, iterations, micro_batches : int
        B_E, N_D and m.
    pages, page_size : int
        Of the K/V cache.
    preempts : bool
        Whether the pool is so small that queries are put back; only the short requests are sent then.
    drawn : bool
        Sample with a temperature in place of the most probable token.
    arrival_rate_per_s : float
        Of a Poisson process; 0 sends all requests at once.
    backwards : bool
        Send the last request first.
    spoiled : bool
        Send `spoiled_requests` too.
    """

    name: str
    model: str
    tp_sizes: tuple[int, ...]
    policy: Policy
    batch: int
    micro_batches: int
    iterations: int = 1
    pages: int = 200
    page_size: int = 16
    preempts: bool = False
    drawn: bool = False
    arrival_rate_per_s: float = 0.0
    backwards: bool = False
    spoiled: bool = False

    @property
    def world_size(self) -> int:
        return sum(self.tp_sizes)

    def requests(self, oracle: Oracle) -> tuple[Request, ...]:
        """The oracle's requests as this run sends them."""
        chosen = [r for r in oracle.requests if not self.preempts or r.id in SHORT_IDS]
        if self.arrival_rate_per_s:
            times = poisson_arrivals(self.arrival_rate_per_s, len(chosen), np.random.default_rng(SEED))
            chosen = [replace(r, arrival_s=float(t)) for r, t in zip(chosen, times, strict=True)]
        if self.backwards:
            # The queue is ordered by arrival.
            chosen = [replace(r, arrival_s=-float(r.id)) for r in chosen]
        if self.spoiled:
            # Between the good ones.
            for place, (request, _) in enumerate(spoiled_requests(oracle.spec.vocab_size)):
                chosen.insert(2 * place, request)
        return tuple(chosen)


def _case(
    name: str,
    model: str,
    tp_sizes: tuple[int, ...],
    policy: str,
    batch: int,
    micro_batches: int,
    **other: object,
) -> Case:
    return Case(
        name=name,
        model=model,
        tp_sizes=tp_sizes,
        policy=Policy(policy),
        batch=batch,
        micro_batches=micro_batches,
        **other,  # type: ignore[arg-type]
    )


CASES = (
    # One rank.
    _case("one-smollm2-rra", "smollm2", (1,), "RRA", 4, 1, iterations=5),
    _case("one-smollm2-static", "smollm2", (1,), "STATIC", 4, 2),
    _case("one-opt-rra", "opt", (1,), "RRA", 3, 2, iterations=1, page_size=5, pages=400),
    _case("one-opt-static", "opt", (1,), "STATIC", 14, 4),
    _case("one-llama-rra-backwards", "llama", (1,), "RRA", 5, 3, iterations=7, backwards=True),
    _case("one-llama-rra-poisson", "llama", (1,), "RRA", 4, 2, iterations=3, arrival_rate_per_s=100.0),
    _case(
        "one-llama-preempt", "llama", (1,), "RRA", 4, 1, iterations=3, page_size=4, pages=20, preempts=True
    ),
    _case("one-opt-preempt-page-of-1", "opt", (1,), "RRA", 9, 3, page_size=1, pages=75, preempts=True),
    _case("one-llama-static-few-pages", "llama", (1,), "STATIC", 8, 2, page_size=7, pages=45),
    _case("one-opt-spoiled", "opt", (1,), "RRA", 4, 2, iterations=3, pages=22, spoiled=True),
    _case("one-smollm2-drawn", "smollm2", (1,), "RRA", 4, 1, iterations=5, drawn=True),
    _case("one-llama-drawn", "llama", (1,), "RRA", 4, 1, iterations=5, drawn=True),
    _case("one-llama-drawn-static", "llama", (1,), "STATIC", 5, 3, drawn=True),
    _case(
        "one-llama-drawn-preempt",
        "llama",
        (1,),
        "RRA",
        4,
        2,
        iterations=2,
        page_size=4,
        pages=20,
        preempts=True,
        drawn=True,
    ),
    # Two tensor-parallel ranks.
    _case("tp2-llama-rra", "llama", (2,), "RRA", 4, 2, iterations=5),
    _case("tp2-llama-static", "llama", (2,), "STATIC", 6, 1),
    _case("tp2-opt-rra-poisson", "opt", (2,), "RRA", 3, 3, iterations=2, arrival_rate_per_s=60.0),
    _case("tp2-opt-preempt", "opt", (2,), "RRA", 4, 2, iterations=3, page_size=4, pages=20, preempts=True),
    _case("tp2-llama-drawn", "llama", (2,), "RRA", 4, 4, iterations=4, drawn=True),
    # Two stages.
    _case("pp2-smollm2-rra", "smollm2", (1, 1), "RRA", 4, 2, iterations=5),
    _case("pp2-smollm2-static", "smollm2", (1, 1), "STATIC", 6, 3),
    _case("pp2-opt-rra", "opt", (1, 1), "RRA", 5, 3, iterations=2, page_size=8),
    _case("pp2-opt-static", "opt", (1, 1), "STATIC", 14, 4),
    _case("pp2-llama-one-micro-batch", "llama", (1, 1), "RRA", 3, 1, iterations=4),
    # Micro-batches fill and empty at different times over many cycles: the order of the token messages.
    _case("pp2-llama-many-cycles", "llama", (1, 1), "RRA", 1, 4, iterations=1),
    _case("pp2-smollm2-many-cycles", "smollm2", (1, 1), "RRA", 3, 4, iterations=1, backwards=True),
    _case("pp2-llama-poisson", "llama", (1, 1), "RRA", 4, 4, iterations=3, arrival_rate_per_s=60.0),
    _case("pp2-llama-static-poisson", "llama", (1, 1), "STATIC", 4, 2, arrival_rate_per_s=60.0),
    _case(
        "pp2-llama-preempt", "llama", (1, 1), "RRA", 4, 2, iterations=3, page_size=4, pages=20, preempts=True
    ),
    _case("pp2-opt-preempt-page-of-1", "opt", (1, 1), "RRA", 9, 4, page_size=1, pages=75, preempts=True),
    _case(
        "pp2-llama-preempt-one-batch",
        "llama",
        (1, 1),
        "RRA",
        9,
        1,
        iterations=1,
        page_size=2,
        pages=40,
        preempts=True,
    ),
    _case("pp2-llama-spoiled", "llama", (1, 1), "STATIC", 4, 2, pages=22, spoiled=True),
    _case("pp2-smollm2-drawn", "smollm2", (1, 1), "RRA", 5, 3, iterations=4, drawn=True),
    _case("pp2-llama-drawn-static", "llama", (1, 1), "STATIC", 7, 2, drawn=True),
    _case(
        "pp2-llama-drawn-preempt",
        "llama",
        (1, 1),
        "RRA",
        5,
        4,
        iterations=2,
        page_size=4,
        pages=20,
        preempts=True,
        drawn=True,
    ),
    # Three ranks: SmolLM2's only degree above 1, three stages, and stages of unequal degree.
    _case("tp3-smollm2-rra", "smollm2", (3,), "RRA", 5, 2, iterations=6),
    _case("pp3-opt-rra", "opt", (1, 1, 1), "RRA", 4, 4, iterations=2),
    _case("pp3-llama-static", "llama", (1, 1, 1), "STATIC", 6, 3),
    _case("partial-llama-wide-first", "llama", (2, 1), "RRA", 4, 3, iterations=3),
    _case("partial-llama-wide-last", "llama", (1, 2), "RRA", 4, 3, iterations=3, page_size=6, pages=500),
    _case("partial-llama-drawn", "llama", (1, 2), "STATIC", 5, 2, drawn=True),
    # Two stages of two tensor-parallel ranks.
    _case("tp2pp2-llama-rra", "llama", (2, 2), "RRA", 4, 2, iterations=5),
    _case("tp2pp2-opt-static", "opt", (2, 2), "STATIC", 7, 3),
    _case("tp2pp2-opt-many-cycles", "opt", (2, 2), "RRA", 2, 4, iterations=1),
    _case(
        "tp2pp2-llama-preempt",
        "llama",
        (2, 2),
        "RRA",
        4,
        2,
        iterations=3,
        page_size=4,
        pages=20,
        preempts=True,
    ),
    _case("tp2pp2-llama-spoiled", "llama", (2, 2), "RRA", 4, 3, iterations=3, pages=22, spoiled=True),
    _case("tp2pp2-llama-drawn", "llama", (2, 2), "RRA", 4, 3, iterations=4, drawn=True),
)


def make_stages(tp_sizes: tuple[int, ...], num_layers: int) -> tuple[Stage, ...]:
    """Stages of these degrees; the layers that do not divide go to the first ones."""
    stages, rank, layer = [], 0, 0
    for index, size in enumerate(tp_sizes):
        end = layer + num_layers // len(tp_sizes) + (index < num_layers % len(tp_sizes))
        stages.append(Stage(role="both", ranks=tuple(range(rank, rank + size)), layers=(layer, end)))
        rank, layer = rank + size, end
    return tuple(stages)


def make_job(case: Case, oracle: Oracle, cache_dir: Path, output_dir: Path) -> RunJob:
    """What the ranks of a run need."""
    requests = case.requests(oracle)
    schedule = Schedule(
        model=oracle.spec.name,
        policy=case.policy,
        knobs=Knobs(
            encode_batch_size=case.batch,
            decode_batch_size=case.batch,
            decode_iterations=case.iterations,
            num_micro_batches=case.micro_batches,
            tp_size=max(case.tp_sizes),
            num_tp_gpus=sum(size for size in case.tp_sizes if size == max(case.tp_sizes)),
        ),
        stages=make_stages(case.tp_sizes, oracle.spec.num_hidden_layers),
    )
    schedule.check(oracle.spec, num_ranks=case.world_size)
    output_dir.mkdir(parents=True)
    return RunJob(
        model=oracle.spec,
        schedule=schedule,
        weights=oracle.path,
        cache_dir=cache_dir,
        seed=SEED,
        dtype=Dtype.float32,
        sampling=DRAWN if case.drawn else SamplingSettings(),
        num_pages=case.pages,
        page_size=case.page_size,
        max_rows=len(requests) + case.micro_batches,
        num_threads=1,
        eos_token_ids=oracle.eos_token_ids,
        requests=requests,
        output_dir=output_dir,
    )
