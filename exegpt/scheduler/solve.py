"""From model, profile, lengths and bound to a schedule, with baselines for comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from exegpt.errors import CapacityError
from exegpt.profiler.table import ProfileTable
from exegpt.schedule import Schedule
from exegpt.scheduler.branch_and_bound import branch_and_bound
from exegpt.scheduler.exhaustive import Constraints, search
from exegpt.scheduler.result import Best, SearchResult
from exegpt.scheduler.space import Space, make_space
from exegpt.simulator.steady import SteadyState
from exegpt.specs import BoundSpec, ClusterSpec, Counting, ModelSpec, Policy
from exegpt.workload.lengths import RequestLengths

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a solution depends on.

    `exhaustive` evaluates every candidate instead of branching and bounding; the answer is the same.
    `bound_quantile` takes the latency bound from the static baseline: that quantile of its
    latencies over the batch sizes that fit.
    """

    model: ModelSpec
    profile: ProfileTable
    cluster: ClusterSpec
    lengths: RequestLengths
    bound: BoundSpec
    bound_quantile: float | None = None
    policies: Sequence[Policy] = (Policy.RRA,)
    counting: Counting = Counting.exact
    exhaustive: bool = False
    page_size: int = 16
    max_encode_batch_size: int | None = None
    max_decode_iterations: int | None = None
    num_micro_batches: Sequence[int] | None = None
    tp_sizes: Sequence[int] | None = None

    def steady(self) -> SteadyState:
        """The closed forms for this problem."""
        return SteadyState(
            self.model,
            self.profile,
            self.lengths,
            counting=self.counting,
            length_percentile=self.bound.length_percentile,
            page_size=self.page_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Search results of every policy and baseline under the resolved bound; `best` is the winner's."""

    problem: Problem
    bound: BoundSpec
    policies: Mapping[Policy, SearchResult]
    baselines: Mapping[Policy, SearchResult]
    wall_s: float

    @property
    def winner(self) -> Policy | None:
        """Policy with the highest throughput; None if nothing is feasible."""
        found = {p: r.best.throughput_per_s for p, r in self.policies.items() if r.best}
        return max(found, key=lambda p: found[p]) if found else None

    @property
    def best(self) -> Best | None:
        """The winning candidate."""
        return self.policies[self.winner].best if self.winner else None

    def schedule(self) -> Schedule | None:
        """The winning candidate as a schedule; None if nothing is feasible."""
        return (
            self.best.schedule(self.problem.model.name, self.problem.lengths.summary()) if self.best else None
        )

    def record(self) -> dict[str, Any]:
        """The `solve` record of result.json."""
        results = list(self.policies.values())
        upper = max(r.throughput_upper_per_s for r in results)
        record: dict[str, Any] = {
            "status": "ok" if self.best else "infeasible",
            "latency_bound_s": _finite(self.bound.latency_s),
            "ttft_bound_s": _finite(self.bound.ttft_s),
            "tpot_bound_s": _finite(self.bound.tpot_s),
            "memory_limit_bytes": self.problem.cluster.memory_bytes,
            "throughput_upper_per_s": upper,
            "gap": (upper - self.best.throughput_per_s) / upper if self.best else None,
            "num_evaluations": sum(r.num_evaluations for r in results),
            "space_size": sum(r.space_size for r in results),
            "wall_s": self.wall_s,
            "policies": {p.value: self._one(r) for p, r in self.policies.items()},
            "baselines": {p.value: self._one(r) for p, r in self.baselines.items()},
            "notes": [*self.problem.lengths.notes, *self.problem.profile.notes],
            "binding": list(self.policies[self.winner].binding) if self.winner else [],
        }
        if self.best:
            return {**candidate_record(self.best), **record}
        return {
            **record,
            "reason": "; ".join(f"{p.value}: {self.reason(r)}" for p, r in self.policies.items()),
        }

    def _one(self, result: SearchResult) -> dict[str, Any]:
        return candidate_record(result.best) if result.best else {"infeasible": self.reason(result)}

    def reason(self, result: SearchResult) -> str:
        """Why a policy has no schedule, which constraint to relax and the best reachable value."""
        closest, bound = result.rejections.closest, self.bound
        ways = [
            f"relax bound.{name} from {getattr(bound, name):g} s to {_up(closest[name]):g} s"
            for name in ("latency_s", "ttft_s", "tpot_s")
            if closest.get(name, math.inf) > getattr(bound, name)
            and math.isfinite(closest.get(name, math.inf))
        ]
        memory = closest.get("memory", 0.0)
        if memory > self.problem.cluster.memory_bytes:
            ways.append(
                f"raise cluster.memory_gib from {self.problem.cluster.memory_bytes / GIB:.2f} to "
                f"{memory / GIB + 0.01:.2f}"
            )
        if ways:
            return " or ".join(ways) + " (each alone is enough)"
        return self._combined(result)

    def _combined(self, result: SearchResult) -> str:
        rejected = {name: n for name, n in result.rejections.counts.items() if n}
        if not result.space_size:
            return (
                "no candidate lies in the search ranges (solver.max_encode_batch_size, "
                "solver.num_micro_batches)"
            )
        if rejected.get("profile", 0) == result.space_size:
            return "every candidate needs batches or contexts beyond the profile; raise profile.budget_s"
        parts = ", ".join(f"{name} {n} of {result.space_size}" for name, n in rejected.items())
        return f"no single constraint is to blame; candidates that fail: {parts}. Relax several together"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _up(value: float) -> float:
    """Round up to four digits, so that the value named suffices."""
    digits = 3 - math.floor(math.log10(value))
    scale = 10.0**digits
    return math.ceil(value * scale) / scale


def candidate_record(best: Best) -> dict[str, Any]:
    """A candidate under the names of result.json."""
    stages = [{"role": s.role, "ranks": list(s.ranks), "layers": list(s.layers)} for s in best.choice.stages]
    per_gpu = [b for s, b in zip(best.choice.stages, best.memory_bytes, strict=True) for _ in s.ranks]
    knobs = best.knobs()
    return {
        "policy": best.choice.policy.value,
        "knobs": {name: getattr(knobs, name) for name in type(knobs).__dataclass_fields__},
        "stages": stages,
        **best.predicted(),
        "memory_bytes": per_gpu,
    }


def solve(problem: Problem, *, report: Callable[[int, int], None] | None = None) -> Solution:
    """Search every policy of the problem and the static baseline.

    Parameters
    ----------
    problem : Problem
    report : callable, optional
        Called with (candidates evaluated, candidates in all).

    Raises
    ------
    CapacityError
        If the cluster has more stages than the model has layers at every degree.
    """
    started = time.perf_counter()
    steady = problem.steady()
    baselines = [p for p in (Policy.STATIC,) if p not in problem.policies]
    space = make_space(
        problem.model,
        problem.profile,
        problem.cluster,
        policies=[*problem.policies, *baselines],
        longest_decode=steady.completion.max_iterations,
        max_encode_batch_size=problem.max_encode_batch_size,
        max_decode_iterations=problem.max_decode_iterations,
        num_micro_batches=problem.num_micro_batches,
        tp_sizes=problem.tp_sizes,
    )
    bound = _resolve_bound(problem, space, steady)
    constraints = Constraints(bound=bound, memory_bytes=problem.cluster.memory_bytes)
    done = 0
    results = {}
    for policy in (*problem.policies, *baselines):
        if policy is Policy.STATIC or problem.exhaustive:
            # STATIC has one knob beside the enumerated ones; there is nothing to branch over.
            results[policy] = search(
                space,
                space.of(policy),
                steady.estimate,
                constraints,
                mean_output_tokens=problem.lengths.mean_output,
                report=partial(_report_from, report, done, space.size) if report else None,
            )
        else:
            results[policy] = branch_and_bound(
                space,
                space.of(policy),
                steady.estimate,
                steady.throughput_upper_and_latency_lower,
                constraints,
                mean_output_tokens=problem.lengths.mean_output,
            )
        done += results[policy].space_size
        if report:
            report(done, space.size)
    return Solution(
        problem=problem,
        bound=bound,
        policies={p: results[p] for p in problem.policies},
        baselines={p: results[p] for p in baselines},
        wall_s=time.perf_counter() - started,
    )


def _report_from(report: Callable[[int, int], None], base: int, total: int, done: int) -> None:
    report(base + done, total)


def _resolve_bound(problem: Problem, space: Space, steady: SteadyState) -> BoundSpec:
    """Latency bound from the static baseline's latencies over its batch sizes (paper, section 7.1)."""
    if problem.bound_quantile is None:
        return problem.bound
    fastest: dict[int, tuple[float, float]] = {}
    for choice in space.of(Policy.STATIC):
        batches = space.batch_sizes(choice)
        e = steady.estimate(choice, batches, np.ones_like(batches))
        fits = (e.memory.total_bytes.max(-1) <= problem.cluster.memory_bytes) & np.isfinite(e.latency_s)
        for i in np.flatnonzero(fits):
            # The baseline runs each batch at the micro-batches and placement that are fastest for it.
            entry = float(e.throughput_per_s[i]), float(e.latency_s[i])
            fastest[int(batches[i])] = max(fastest.get(int(batches[i]), (0.0, math.inf)), entry)
    if not fastest:
        raise CapacityError(
            "bound: tight, medium and loose are quantiles of the static baseline's latencies, but the "
            "baseline fits "
            "nowhere (memory or profile). Give bound.latency_s in seconds instead."
        )
    latency = float(np.quantile([latency for _, latency in fastest.values()], problem.bound_quantile))
    return replace(problem.bound, latency_s=min(latency, problem.bound.latency_s))
