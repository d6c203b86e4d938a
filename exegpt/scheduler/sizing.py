"""The fewest GPUs that serve an arrival rate within the bounds.

Sizes are searched in rising order: one GPU of a node, two, and so on up to a node, then whole nodes. More
GPUs need not serve more (three may form worse groups than two), so none is skipped. Each search ends with the
greatest throughput that a size holds and an upper bound on it; the first size whose throughput is at least
the rate is the answer, and it is minimal since the upper bound of every smaller one is below the rate.

All replicas of a schedule are alike. Where groups of different sizes do with fewer GPUs, `groups` says so.

The rate that a schedule holds is its throughput: with arrivals at a lower rate the queue in front of it is
stable, at a greater one it grows without end. Latency bounds count from the start of a query's encoding, so
waiting for it comes on top; it is short where there is headroom.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exegpt.errors import CapacityError
from exegpt.scheduler.cost import cost_per_hour
from exegpt.scheduler.mixture import fewest_by_groups
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.scheduler.solution import Solution
from exegpt.scheduler.solve import solve
from exegpt.scheduler.space import possible_degrees, possible_replicas
from exegpt.specs import ClusterSpec


def sizes(cluster: ClusterSpec) -> tuple[ClusterSpec, ...]:
    """Clusters of the same GPUs that are no greater: parts of a node, then whole nodes; by rising size."""
    parts = [replace(cluster, num_nodes=1, gpus_per_node=n) for n in range(1, cluster.gpus_per_node + 1)]
    return (*parts, *(replace(cluster, num_nodes=n) for n in range(2, cluster.num_nodes + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAnswer:
    """What one size holds.

    Attributes
    ----------
    problem : Problem
        With the cluster and profile of this size.
    solution : Solution or None
        None if nothing of the search ranges fits; `reason` says why.
    """

    problem: Problem
    solution: Solution | None
    reason: str | None = None

    @property
    def best(self) -> Best | None:
        """The schedule with the greatest throughput."""
        return self.solution.best if self.solution else None

    @property
    def rate_per_s(self) -> float:
        """Greatest rate that is held."""
        return self.best.throughput_per_s if self.best else 0.0

    @property
    def rate_upper_per_s(self) -> float:
        """No schedule of this size holds more; infinite where the search proves nothing."""
        if self.solution is None:
            return 0.0
        uppers = [result.throughput_upper_per_s for result in self.solution.policies.values()]
        return max(math.inf if upper is None else upper for upper in uppers)

    def record(self) -> dict[str, Any]:
        """Under the names of result.json."""
        cluster = self.problem.cluster
        head = {
            "num_gpus": cluster.num_gpus,
            "num_nodes": cluster.num_nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "cost_per_hour": cost_per_hour(cluster),
        }
        if self.solution is None or self.best is None:
            reason = self.reason if self.solution is None else self.solution.record()["reason"]
            return {**head, "infeasible": reason}
        found = self.solution.record()
        kept = ("policy", "num_replicas", "knobs", "throughput_per_s", "latency_s", "throughput_upper_per_s")
        return {**head, **{name: found[name] for name in kept}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The sizes of `cluster` searched, by rising number of GPUs; the last holds the rate, or none does."""

    cluster: ClusterSpec
    rate_per_s: float
    answers: Sequence[SizeAnswer]
    wall_s: float

    @property
    def chosen(self) -> SizeAnswer | None:
        """The smallest size that holds the rate."""
        last = self.answers[-1]
        return last if last.rate_per_s >= self.rate_per_s else None

    @property
    def greatest(self) -> SizeAnswer:
        """The size that holds the greatest rate; of several the smallest."""
        return max(self.answers, key=lambda answer: answer.rate_per_s)

    @property
    def groups(self) -> tuple[int, ...] | None:
        """GPUs of independent groups that hold the rate with fewer GPUs together; None if none do."""
        found = fewest_by_groups(
            {answer.problem.cluster.num_gpus: answer.rate_per_s for answer in self.answers},
            self.cluster.gpus_per_node,
            self.cluster.num_nodes,
            self.rate_per_s,
        )
        if found is None or (self.chosen and sum(found) >= self.chosen.problem.cluster.num_gpus):
            return None
        return found

    def reason(self) -> str:
        """Why no size holds the rate, and what would."""
        top = self.greatest
        if top.best is None:
            record = self.answers[-1].record()
            return f"no size of the cluster has a schedule: {record['infeasible']}"
        copies = math.ceil(self.rate_per_s / top.rate_per_s)
        return (
            f"the greatest rate held within the bounds is {top.rate_per_s:.4g} requests/s, with "
            f"{top.problem.cluster.num_gpus} GPUs: lower solver.rate_per_s from {self.rate_per_s:g} to "
            f"{_down(top.rate_per_s):g}, raise cluster.num_nodes, or run {copies} such clusters side by side"
        )

    def record(self) -> dict[str, Any]:
        """`solve.sizing` of result.json."""
        found: dict[str, Any] = {
            "rate_per_s": self.rate_per_s,
            "greatest_rate_per_s": self.greatest.rate_per_s,
            "groups": None if self.groups is None else list(self.groups),
            "wall_s": self.wall_s,
            "sizes": [answer.record() for answer in self.answers],
        }
        if self.chosen is None:
            return found
        cluster = self.chosen.problem.cluster
        return {
            "num_gpus": cluster.num_gpus,
            "num_nodes": cluster.num_nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "headroom": self.chosen.rate_per_s / self.rate_per_s - 1,
            "cost_per_hour": cost_per_hour(cluster),
            **self._costs_at_rate(cluster),
            **found,
        }

    def _costs_at_rate(self, cluster: ClusterSpec) -> Mapping[str, float]:
        hour = cost_per_hour(cluster)
        if hour is None:
            return {}
        tokens = 3600 * self.rate_per_s * self.answers[-1].problem.lengths.mean_output
        return {"cost_per_million_output_tokens": 1e6 * hour / tokens}


def find_sizing(
    problem_of: Callable[[ClusterSpec], Problem],
    cluster: ClusterSpec,
    rate_per_s: float,
    *,
    report: Callable[[int, int], None] | None = None,
) -> Sizing:
    """The fewest GPUs of a cluster that hold a rate, with proof.

    Parameters
    ----------
    problem_of : callable
        The planning problem on a cluster of another size, whose profile fits that size. Its bound is in
        seconds, the same for all sizes, and ranges that it asks for are possible on `cluster`.
    cluster : ClusterSpec
        The greatest size.
    rate_per_s : float
        Requests per second, above 0.
    report : callable, optional
        Called with (sizes done with, sizes in all).
    """
    started = time.perf_counter()
    candidates = sizes(cluster)
    answers: list[SizeAnswer] = []
    for done, size in enumerate(candidates):
        if report is not None:
            report(done, len(candidates))
        answers.append(_solved(problem_of(size)))
        if answers[-1].rate_per_s >= rate_per_s:
            break
        # The searches are exact: nothing else could prove a smaller size too small.
        assert answers[-1].rate_upper_per_s < rate_per_s
    if report is not None:
        report(len(candidates), len(candidates))
    return Sizing(
        cluster=cluster, rate_per_s=rate_per_s, answers=answers, wall_s=time.perf_counter() - started
    )


def _solved(problem: Problem) -> SizeAnswer:
    ranges = _possible_ranges(problem)
    for name, values in ranges.items():
        if not values:
            asked = list(getattr(problem, name))
            gpus = problem.cluster.num_gpus
            reason = f"solver.{name}={asked}: none of them is possible on {gpus} GPUs"
            return SizeAnswer(problem=problem, solution=None, reason=reason)
    problem = replace(problem, **ranges)
    try:
        return SizeAnswer(problem=problem, solution=solve(replace(problem, baselines=())))
    except CapacityError as error:
        return SizeAnswer(problem=problem, solution=None, reason=str(error))


def _possible_ranges(problem: Problem) -> dict[str, Any]:
    """What is left of the degrees and replicas asked for on a smaller cluster."""
    ranges: dict[str, Any] = {}
    if problem.tp_sizes is not None:
        degrees = possible_degrees(problem.model, problem.profile, problem.cluster)
        ranges["tp_sizes"] = tuple(t for t in problem.tp_sizes if t in degrees)
    if problem.num_replicas is not None:
        counts = possible_replicas(problem.cluster)
        ranges["num_replicas"] = tuple(n for n in problem.num_replicas if n in counts)
    return ranges


def _down(value: float) -> float:
    """Round down to four digits, so that the value named is held."""
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return math.floor(value * scale) / scale
