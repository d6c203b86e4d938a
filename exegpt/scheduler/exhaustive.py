"""Exhaustive search: every candidate is evaluated, batch sizes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exegpt.scheduler.result import Best, Rejections, SearchResult
from exegpt.scheduler.space import Space
from exegpt.simulator.steady import Choice, Estimates, IntArray
from exegpt.specs import BoundSpec

Estimate = Callable[[Choice, IntArray, IntArray], Estimates]

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a schedule must meet: latency bounds, bytes per GPU."""

    bound: BoundSpec
    memory_bytes: int

    def met(self, estimates: Estimates) -> dict[str, BoolArray]:
        """Which candidates meet each constraint."""
        return {
            "profile": np.isfinite(estimates.cycle_s) & np.isfinite(estimates.latency_s),
            "memory": self.peak_bytes(estimates) <= self.memory_bytes,
            "latency_s": estimates.latency_s <= self.bound.latency_s,
            "ttft_s": estimates.ttft_s <= self.bound.ttft_s,
            "tpot_s": estimates.tpot_s <= self.bound.tpot_s,
        }

    @staticmethod
    def peak_bytes(estimates: Estimates) -> NDArray[np.float64]:
        """Bytes of the fullest GPU of each candidate."""
        return np.asarray(estimates.memory.total_bytes.max(-1))


def search(
    space: Space,
    choices: Iterable[Choice],
    estimate: Estimate,
    constraints: Constraints,
    *,
    mean_output_tokens: float,
    report: Callable[[int], None] | None = None,
) -> SearchResult:
    """Evaluate every candidate of `choices` and return the one with the highest throughput.

    Ties go to the lower latency, then to the smaller batch. `report` is called with the number of
    candidates evaluated so far.
    """
    best: Best | None = None
    rejections = Rejections()
    size = 0
    for choice in choices:
        batches = space.batch_sizes(choice)
        if not len(batches):
            continue
        for n_d in space.iterations(choice):
            iterations = np.full(len(batches), n_d)
            estimates = estimate(choice, batches, iterations)
            size += len(batches)
            best = take_best(
                best, choice, batches, iterations, estimates, constraints, rejections, mean_output_tokens
            )
            if report is not None:
                report(size)
    return SearchResult(
        best=best,
        throughput_upper_per_s=best.throughput_per_s if best else 0.0,
        num_evaluations=size,
        space_size=size,
        rejections=rejections,
        binding=find_binding(space, best, estimate) if best else (),
    )


def take_best(
    best: Best | None,
    choice: Choice,
    batches: IntArray,
    iterations: IntArray,
    e: Estimates,
    constraints: Constraints,
    rejections: Rejections,
    mean_output_tokens: float,
) -> Best | None:
    """The better of `best` and the best feasible of the candidates; what fails is noted."""
    met = constraints.met(e)
    record_rejections(rejections, met, e, constraints)
    feasible = np.logical_and.reduce(list(met.values()))
    if not feasible.any():
        return best
    throughput = np.where(feasible, e.throughput_per_s, -np.inf)
    top = np.flatnonzero(throughput == throughput.max())
    i = top[np.argmin(e.latency_s[top])]
    found = Best(
        choice=choice,
        encode_batch_size=int(batches[i]),
        decode_iterations=int(iterations[i]),
        throughput_per_s=float(e.throughput_per_s[i]),
        throughput_tokens_per_s=float(e.throughput_per_s[i]) * mean_output_tokens,
        latency_s=float(e.latency_s[i]),
        ttft_s=float(e.ttft_s[i]),
        tpot_s=float(e.tpot_s[i]),
        decode_batch_size=float(e.decode_batch_size[i]),
        memory_bytes=tuple(int(b) for b in e.memory.total_bytes[i]),
    )
    return found if best is None or _order(found) > _order(best) else best


def _order(best: Best) -> tuple[float, float, int]:
    return best.throughput_per_s, -best.latency_s, -best.encode_batch_size


def record_rejections(
    rejections: Rejections, met: dict[str, BoolArray], e: Estimates, constraints: Constraints
) -> None:
    """Count which constraints fail, and note the lowest value of each that meets all the others."""
    values = {
        "memory": constraints.peak_bytes(e),
        "latency_s": e.latency_s,
        "ttft_s": e.ttft_s,
        "tpot_s": e.tpot_s,
    }
    for name, ok in met.items():
        rejections.counts[name] = rejections.counts.get(name, 0) + int(np.count_nonzero(~ok))
        if name not in values:
            continue
        others = np.logical_and.reduce([met[other] for other in met if other != name])
        if others.any():
            lowest = float(values[name][others].min())
            rejections.closest[name] = min(rejections.closest.get(name, np.inf), lowest)


def find_binding(space: Space, best: Best, estimate: Estimate) -> tuple[str, ...]:
    """Search ranges that the best candidate lies at the edge of, in words."""
    binding = []
    choice, batch = best.choice, best.encode_batch_size
    batches = space.batch_sizes(choice)
    if batch == batches[-1]:
        origin = (
            "solver.max_encode_batch_size"
            if space.max_encode_batch_size == batch
            else f"the profile ({space.max_profiled_queries} queries per micro-batch; raise profile.budget_s)"
        )
        binding.append(f"encode_batch_size={batch} is the largest searched, limited by {origin}")
    else:
        step = int(batches[1] - batches[0])
        beyond = estimate(choice, np.asarray([batch + step]), np.asarray([best.decode_iterations]))
        if not np.isfinite(beyond.cycle_s[0]):
            binding.append(
                f"encode_batch_size={batch}: a larger one needs batches or contexts beyond the profile "
                "(raise profile.budget_s)"
            )
    return tuple(binding)
