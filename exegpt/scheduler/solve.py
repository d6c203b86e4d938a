"""From a planning problem to its solution: the best schedule of every policy, with baselines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from exegpt.errors import CapacityError
from exegpt.scheduler import exhaustive, monotone
from exegpt.scheduler.aside import Aside
from exegpt.scheduler.branch_and_bound import Found, branch_and_bound
from exegpt.scheduler.candidates import Constraints
from exegpt.scheduler.limits import NextBatch, binding_ranges, next_batch, roomier_per_s
from exegpt.scheduler.margins import Margins
from exegpt.scheduler.problem import BASELINES, Problem
from exegpt.scheduler.result import Best, SearchResult
from exegpt.scheduler.robust import RobustState
from exegpt.scheduler.solution import Solution
from exegpt.scheduler.space import ENUMERATORS, PolicySpace
from exegpt.simulator.choice import constraint_values
from exegpt.simulator.steady import SteadyState
from exegpt.specs import BoundSpec, Policy, SolverName

__all__ = ["BASELINES", "Problem", "Solution", "resolve_bound", "solve"]

Report = Callable[[int, int], None]


def solve(problem: Problem, *, report: Report | None = None, beside: bool = False) -> Solution:
    """Search every policy of the problem, and every baseline.

    Parameters
    ----------
    problem : Problem
    report : callable, optional
        Called with (candidates done with, candidates in all).
    beside : bool
        Whether baselines are searched in a process beside the policies'.

    Raises
    ------
    ConfigError
        If a range asked for is impossible.
    CapacityError
        If the weights fit nowhere, or the cluster has more stages than the model has layers.
    """
    started = time.perf_counter()
    steady = problem.steady()
    baselines = [p for p in problem.baselines if p not in problem.policies and p in ENUMERATORS]
    quantile = [] if problem.bound_quantile is None else [Policy.STATIC]
    wanted = list(dict.fromkeys([*problem.policies, *baselines, *quantile]))
    spaces = problem.spaces(steady, wanted)
    bound = _resolve_bound(problem, spaces, steady)
    constraints = Constraints(bound=bound, memory_bytes=problem.cluster.memory_bytes)
    forms = problem.robust(steady)
    search = _Searcher(problem, forms, constraints, report, sum(space.size for space in spaces.values()))
    own = {p: spaces[p] for p in problem.policies}
    others = {p: spaces[p] for p in baselines}
    # The yardstick is not to fall short because the search does.
    proven = SolverName.branch_and_bound if problem.method is SolverName.paper else problem.method
    # Searched without a report: a process beside this one cannot advance its progress bar.
    searched_beside = (
        Aside(partial(_timed, replace(search, report=None), others, proven)) if beside and others else None
    )
    policies = search.run(own, problem.method)
    searched = time.perf_counter()
    margins = _margins(problem, own, policies, steady, constraints) if problem.has_margins else None
    if searched_beside:
        found, baselines_s = searched_beside.result()
        search.advance(sum(space.size for space in others.values()))
    else:
        found, baselines_s = _timed(search, others, proven)
    return Solution(
        problem=problem,
        bound=bound,
        policies=policies,
        wall_s=searched - started,
        baselines=found,
        baselines_wall_s=baselines_s,
        margins=margins,
    )


def _timed(
    search: _Searcher, spaces: Mapping[Policy, PolicySpace], method: SolverName
) -> tuple[dict[Policy, SearchResult], float]:
    """What a search finds, and the seconds it takes."""
    started = time.perf_counter()
    return search.run(spaces, method), time.perf_counter() - started


def _margins(
    problem: Problem,
    spaces: Mapping[Policy, PolicySpace],
    found: Mapping[Policy, SearchResult],
    steady: SteadyState,
    constraints: Constraints,
) -> Margins:
    """What the margins cost: the policies are searched once more without them, for more than they left.

    What meets the constraints with margins meets them without, so something is found again.
    """
    started = time.perf_counter()
    left = max((r.best.throughput_per_s for r in found.values() if r.best), default=0.0)
    free = _Searcher(problem, steady, replace(constraints, throughput_per_s=left), None, 0)
    best = [r.best.throughput_per_s for r in free.branch(list(spaces.values()), "throughput") if r.best]
    return Margins(
        confidence=problem.confidence,
        drift_margin=problem.drift_margin,
        throughput_without_per_s=max(best, default=None),
        wall_s=time.perf_counter() - started,
    )


@dataclass(slots=True)
class _Searcher:
    """Searches spaces under the same constraints, and reports how far it is."""

    problem: Problem
    steady: SteadyState | RobustState
    constraints: Constraints
    report: Report | None
    total: int
    done: int = 0

    def run(self, spaces: Mapping[Policy, PolicySpace], method: SolverName) -> dict[Policy, SearchResult]:
        """The best of each policy."""
        match method:
            case SolverName.branch_and_bound:
                found = self._branch_and_bound(spaces)
            case SolverName.exhaustive:
                found = self._exhaustive(spaces)
            case SolverName.paper:
                found = self._monotone(spaces)
        return {policy: self._result(spaces[policy], found[policy], method) for policy in spaces}

    def _branch_and_bound(self, spaces: Mapping[Policy, PolicySpace]) -> dict[Policy, Found]:
        found = self.branch(list(spaces.values()), "throughput")
        self.advance(sum(space.size for space in spaces.values()))
        return dict(zip(spaces, found, strict=True))

    def branch(self, spaces: Sequence[PolicySpace], objective: str) -> list[Found]:
        """The candidate of each space that is best by `objective`, by branch and bound."""
        return branch_and_bound(
            spaces,
            self.steady.estimate,
            self.steady.bounds,
            self.steady.refine,
            self.constraints,
            objective=objective,
        )

    def _exhaustive(self, spaces: Mapping[Policy, PolicySpace]) -> dict[Policy, Found]:
        found = {}
        for policy, space in spaces.items():
            before = self.done

            def report(count: int, before: int = before) -> None:
                self.advance(before + count - self.done)

            found[policy] = exhaustive.search(space, self.steady.estimate, self.constraints, report=report)
        return found

    def _monotone(self, spaces: Mapping[Policy, PolicySpace]) -> dict[Policy, Found]:
        found = {}
        for policy, space in spaces.items():
            found[policy] = monotone.search(
                space,
                self.steady.estimate,
                self.constraints,
                latency_tolerance=self.problem.latency_tolerance,
                throughput_tolerance=self.problem.throughput_tolerance,
            )
            self.advance(space.size)
        return found

    def advance(self, count: int) -> None:
        """Report that so many more candidates are done with."""
        self.done += count
        if self.report is not None:
            self.report(self.done, self.total)

    def _result(self, space: PolicySpace, found: Found, method: SolverName) -> SearchResult:
        closest = dict(found.tally.closest)
        if found.best is None and method is not SolverName.exhaustive and space.size:
            closest |= self._closest(space)
        upper = found.best.throughput_per_s if found.best else 0.0
        further, binding = self._edges(space, found.best) if found.best else (None, ())
        return SearchResult(
            best=found.best,
            throughput_upper_per_s=None if method is SolverName.paper else upper,
            num_evaluations=found.num_evaluations,
            space_size=space.size,
            rejected=found.tally.counts,
            closest=closest,
            binding=binding,
            further=further,
        )

    def _edges(self, space: PolicySpace, best: Best) -> tuple[NextBatch, tuple[str, ...]]:
        """What the next larger batch runs into, and ranges that the best candidate lies at the edge of."""
        estimate, constraints = self.steady.estimate, self.constraints
        further = next_batch(space, best, estimate, constraints)
        if not further.breaks:
            further = replace(further, roomier_per_s=roomier_per_s(self.problem, best))
        return further, binding_ranges(self.problem, space, best, further, estimate, constraints)

    def _closest(self, space: PolicySpace) -> dict[str, float]:
        """The lowest value of each constraint that meets all others: what a bound has to become."""
        closest = {}
        for name, limit in self.constraints.limits().items():
            if math.isfinite(limit):
                best = self.branch([space], name)[0].best
                closest[name] = math.inf if best is None else -best.score
        return closest


def resolve_bound(problem: Problem) -> BoundSpec:
    """The problem's bound in seconds, also where it is a quantile of the static baseline's latencies.

    Raises
    ------
    CapacityError
        If that baseline fits nowhere.
    """
    steady = problem.steady()
    static = [] if problem.bound_quantile is None else [Policy.STATIC]
    return _resolve_bound(problem, problem.spaces(steady, static) if static else {}, steady)


def _resolve_bound(problem: Problem, spaces: Mapping[Policy, PolicySpace], steady: SteadyState) -> BoundSpec:
    """Latency bound from the static baseline's latencies over its batch sizes (paper, section 7.1)."""
    if problem.bound_quantile is None:
        return problem.bound
    latencies = static_latencies(spaces[Policy.STATIC], steady, problem.cluster.memory_bytes)
    if not latencies:
        raise CapacityError(
            "bound: tight, medium and loose are quantiles of the static baseline's latencies, but the "
            "baseline fits nowhere (memory or profile). Give bound.latency_s in seconds instead."
        )
    latency = float(np.quantile(list(latencies.values()), problem.bound_quantile))
    return replace(problem.bound, latency_s=min(latency, problem.bound.latency_s))


def static_latencies(space: PolicySpace, steady: SteadyState, memory_bytes: int) -> dict[int, float]:
    """Latency of STATIC by batch size, over those that fit; each as fast as it can be run."""
    fastest: dict[int, tuple[float, float]] = {}
    for index, choice in enumerate(space.choices):
        batches = _that_fit(space, index, steady, memory_bytes)
        if not len(batches):
            continue
        e = steady.estimate(choice, batches, np.ones_like(batches))
        fits = (constraint_values(e)["memory"] <= memory_bytes) & np.isfinite(e.latency_s)
        for i in np.flatnonzero(fits):
            # The baseline runs each batch at the micro-batches and placement that are fastest for it.
            entry = float(e.throughput_per_s[i]), float(e.latency_s[i])
            fastest[int(batches[i])] = max(fastest.get(int(batches[i]), (0.0, math.inf)), entry)
    return {batch: latency for batch, (_, latency) in fastest.items()}


def _that_fit(space: PolicySpace, index: int, steady: SteadyState, memory_bytes: int) -> np.ndarray:
    """Batches of a choice up to the first that cannot fit; memory grows with the batch."""
    batches = space.batches(index)
    if not len(batches):
        return batches
    ends = np.stack([batches, batches], axis=1)
    ones = np.ones_like(ends)
    bounds = steady.bounds(space.choices, np.full(len(batches), index), ends, ones)
    return np.asarray(batches[bounds.memory_lower_bytes <= memory_bytes])
