"""The answer to a planning problem, and how it is put into words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from exegpt.schedule import Schedule
from exegpt.scheduler.candidates import Constraints
from exegpt.scheduler.cost import cost_per_hour, token_costs
from exegpt.scheduler.margins import Margins, worst_record
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best, SearchResult
from exegpt.specs import BoundSpec, Policy

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Search results of every policy and baseline under the resolved bound; `best` is the winner's.

    `margins` says what the problem's margins cost; None if it has none.
    """

    problem: Problem
    bound: BoundSpec
    policies: Mapping[Policy, SearchResult]
    baselines: Mapping[Policy, SearchResult]
    wall_s: float
    baselines_wall_s: float = 0.0
    margins: Margins | None = None

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
            self.best.schedule(
                self.problem.model.name, self.problem.lengths.summary(), self.problem.lengths.mean_output
            )
            if self.best
            else None
        )

    def record(self) -> dict[str, Any]:
        """The `solve` record of result.json."""
        results = list(self.policies.values())
        uppers = [r.throughput_upper_per_s for r in results]
        proven = [upper for upper in uppers if upper is not None]
        upper = max(proven) if len(proven) == len(uppers) else None
        record: dict[str, Any] = {
            "status": "ok" if self.best else "infeasible",
            "latency_bound_s": _finite(self.bound.latency_s),
            "ttft_bound_s": _finite(self.bound.ttft_s),
            "tpot_bound_s": _finite(self.bound.tpot_s),
            "memory_limit_bytes": self.problem.cluster.memory_bytes,
            "cost_per_hour": cost_per_hour(self.problem.cluster),
            "method": self.problem.method.value,
            "throughput_upper_per_s": upper,
            "gap": (upper - self.best.throughput_per_s) / upper if self.best and upper else None,
            "num_evaluations": sum(r.num_evaluations for r in results),
            "space_size": sum(r.space_size for r in results),
            "wall_s": self.wall_s,
            "baselines_wall_s": self.baselines_wall_s,
            "policies": {p.value: self._one(r) for p, r in self.policies.items()},
            "baselines": {p.value: self._one(r) for p, r in self.baselines.items()},
            "notes": [*self.problem.lengths.notes, *self.problem.profile.notes, *self._faster_rivals()],
            "binding": list(self.policies[self.winner].binding) if self.winner else [],
        }
        if self.margins is not None:
            record["margins"] = self.margins.record(self.best)
        if self.winner:
            return {**self._one(self.policies[self.winner]), **record}
        return {
            **record,
            "reason": "; ".join(f"{p.value}: {self.reason(r)}" for p, r in self.policies.items()),
        }

    def _one(self, result: SearchResult) -> dict[str, Any]:
        if not result.best:
            return {"infeasible": self.reason(result)}
        further = None if result.further is None else result.further.record()
        return {**self._candidate(result.best), "next_batch": further}

    def _faster_rivals(self) -> list[str]:
        """A note if a baseline, which does not compete, would serve more than what was chosen."""
        rates = {p.value: r.best.throughput_per_s for p, r in self.baselines.items() if r.best}
        own = self.best.throughput_per_s if self.best else 0.0
        faster = sorted((p for p in rates if rates[p] > own), key=lambda p: -rates[p])
        if not faster:
            return []
        named = ", ".join(
            f"{p} {rates[p]:.3g} seq/s" + (f" ({rates[p] / own:.2f}x)" if own else "") for p in faster
        )
        return [
            f"faster under the same bound, but a baseline that does not compete: {named}; "
            "solver.policies=all lets every policy be chosen"
        ]

    def _candidate(self, best: Best) -> dict[str, Any]:
        problem = self.problem
        costs = token_costs(problem.cluster, problem.lengths, best.throughput_per_s)
        return {**candidate_record(best, problem.lengths.mean_output), **costs}

    def reason(self, result: SearchResult) -> str:
        """Why a policy has no schedule, which constraint to relax and the best reachable value."""
        closest, bound = result.closest, self.bound
        limits = Constraints(bound=bound, memory_bytes=self.problem.cluster.memory_bytes).limits()
        if any(value <= limits[name] < math.inf for name, value in closest.items()):
            # What comes closest is found by branch and bound, and this meets everything.
            return (
                "Algorithm 1 finds no schedule, though some meet all constraints; solver=branch_and_bound "
                "finds the best"
            )
        ways = [
            f"relax bound.{name} from {getattr(bound, name):g} s to {_up(closest[name]):g} s"
            for name in ("latency_s", "ttft_s", "tpot_s")
            if closest.get(name, math.inf) > getattr(bound, name)
            and math.isfinite(closest.get(name, math.inf))
        ]
        memory = closest.get("memory", 0.0)
        if math.isfinite(memory) and memory > self.problem.cluster.memory_bytes:
            ways.append(
                f"raise cluster.memory_gib from {self.problem.cluster.memory_bytes / GIB:.2f} to "
                f"{memory / GIB + 0.01:.2f}"
            )
        if ways:
            return " or ".join(ways) + (" (each alone is enough)" if len(ways) > 1 else "")
        return self._combined(result)

    def _combined(self, result: SearchResult) -> str:
        rejected = {name: n for name, n in result.rejected.items() if n}
        if not result.space_size:
            return (
                "no candidate lies in the search ranges (solver.max_encode_batch_size, "
                "solver.num_micro_batches)"
            )
        if result.num_evaluations and rejected.get("profile", 0) == result.num_evaluations:
            return "every candidate needs batches or contexts beyond the profile; raise profile.budget_s"
        parts = ", ".join(f"{name} {n} of {result.num_evaluations}" for name, n in rejected.items())
        return f"no single constraint is to blame; candidates that fail: {parts}. Relax several together"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _up(value: float) -> float:
    """Round up to four digits, so that the value named suffices."""
    digits = 3 - math.floor(math.log10(value))
    scale = 10.0**digits
    return math.ceil(value * scale) / scale


def candidate_record(best: Best, mean_output_tokens: float) -> dict[str, Any]:
    """A candidate under the names of result.json; memory is that of one replica's GPUs."""
    choice = best.choice
    stages = [{"role": s.role, "ranks": list(s.ranks), "layers": list(s.layers)} for s in choice.stages]

    def per_gpu(per_stage: tuple[int, ...]) -> list[int]:
        return [b for s, b in zip(choice.stages, per_stage, strict=True) for _ in s.ranks]

    knobs = asdict(best.knobs())
    worst = {} if best.worst is None else {"worst": worst_record(best.worst)}
    return {
        "policy": choice.policy.value,
        "num_replicas": choice.num_replicas,
        "knobs": {name: value for name, value in knobs.items() if value is not None},
        "stages": stages,
        **best.predicted(mean_output_tokens),
        "memory_bytes": per_gpu(best.memory_bytes),
        "memory_parts_bytes": {name: per_gpu(part) for name, part in best.memory_parts.items()},
        **worst,
    }
