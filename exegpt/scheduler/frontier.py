"""The frontier of throughput and latency: for many bounds at once, the schedule that is best under each.

Bounds are searched one after the other, each where the frontier is least known so far (`scheduler.staircase`
says what an answer settles), from the least latency that any schedule has to no bound at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exegpt.scheduler.branch_and_bound import branch_and_bound
from exegpt.scheduler.candidates import Constraints
from exegpt.scheduler.cost import token_costs
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.scheduler.solution import candidate_record
from exegpt.scheduler.staircase import Curve, Point, Refinement, Search, best_of, least_bound_s
from exegpt.specs import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What is known of the frontier.

    Attributes
    ----------
    points : tuple of Point
        Latency and throughput both rise.
    curves : mapping of Policy to tuple of Best
        Each policy's own answers under the bounds that were searched.
    gap : float
        Under no latency bound is more than this share of throughput lost by taking the best point that
        meets it. Zero: every step of the staircase is known.
    num_bounds : int
        Bounds under which every policy's answer is known.
    num_evaluations : int
    wall_s : float
    """

    points: tuple[Point, ...]
    curves: Mapping[Policy, tuple[Best, ...]]
    gap: float
    num_bounds: int
    num_evaluations: int
    wall_s: float

    def record(self, problem: Problem) -> dict[str, Any]:
        """`solve.frontier`, a list of points, and `solve.frontier_search` of result.json."""
        return {
            "frontier": [
                {
                    "latency_bound_s": point.bound_s if math.isfinite(point.bound_s) else None,
                    **_point_record(point.best, problem),
                }
                for point in self.points
            ],
            "frontier_search": {
                "gap": self.gap,
                "num_bounds": self.num_bounds,
                "num_evaluations": self.num_evaluations,
                "wall_s": self.wall_s,
                "policies": {
                    policy.value: [_point_record(best, problem) for best in curve]
                    for policy, curve in self.curves.items()
                },
            },
        }


def _point_record(best: Best, problem: Problem) -> dict[str, Any]:
    record = candidate_record(best, problem.lengths.mean_output)
    left_out = ("stages", "memory_bytes", "memory_parts_bytes")
    kept = {name: value for name, value in record.items() if name not in left_out}
    costs = token_costs(problem.cluster, problem.lengths, best.throughput_per_s)
    return {"least_bound_s": least_bound_s(best), **kept, **costs}


def find_frontier(
    problem: Problem,
    num_bounds: int,
    *,
    also_s: float = math.inf,
    report: Callable[[int, int], None] | None = None,
) -> Frontier:
    """The frontier of a problem's policies together.

    Parameters
    ----------
    problem : Problem
        Its latency bound is left out; the other bounds, memory and margins hold at every point.
    num_bounds : int
        Most bounds to search; at least 2, which are the least latency and no bound at all.
    also_s : float
        A latency bound that is to be among those, where anything is feasible under it.
    report : callable, optional
        Called with (bounds done with, bounds in all).

    Raises
    ------
    CapacityError
        If the weights fit nowhere.
    """
    started = time.perf_counter()
    if report is not None:
        report(0, num_bounds)
    search = _Searches(problem)
    curves = {policy: Curve(search.of(policy)) for policy in problem.policies}
    refinement = Refinement(lambda bound_s: best_of(curve.at(bound_s) for curve in curves.values()))
    fastest = [least_bound_s(curve.fastest) for curve in curves.values() if curve.fastest]
    bounds = [min(fastest), math.inf] if fastest else []
    if fastest and bounds[0] < also_s < math.inf:
        bounds.append(also_s)
    while bounds and refinement.num_bounds < num_bounds:
        refinement.add(bounds.pop(0))
        if report is not None:
            report(refinement.num_bounds, num_bounds)
        if not bounds and (open_s := refinement.next_bound_s()) is not None:
            bounds.append(open_s)
    if report is not None:
        report(num_bounds, num_bounds)
    return Frontier(
        points=refinement.points(),
        curves={policy: curve.answers() for policy, curve in curves.items()},
        gap=refinement.gap(),
        num_bounds=refinement.num_bounds,
        num_evaluations=search.num_evaluations,
        wall_s=time.perf_counter() - started,
    )


class _Searches:
    """Searches of each policy's space; closed forms and spaces are built once."""

    def __init__(self, problem: Problem) -> None:
        steady = problem.steady()
        self._problem = problem
        self._forms = problem.robust(steady)
        self._spaces = problem.spaces(steady, problem.policies)
        self.num_evaluations = 0

    def of(self, policy: Policy) -> Search:
        """The search of one policy."""
        problem, forms = self._problem, self._forms

        def search(bound_s: float, objective: str) -> Best | None:
            bound = replace(problem.bound, latency_s=bound_s)
            constraints = Constraints(bound=bound, memory_bytes=problem.cluster.memory_bytes)
            (found,) = branch_and_bound(
                [self._spaces[policy]],
                forms.estimate,
                forms.bounds,
                forms.refine,
                constraints,
                objective=objective,
            )
            self.num_evaluations += found.num_evaluations
            return found.best

        return search
