"""What a candidate must meet, how candidates compare, and what is remembered of those that fall out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from exegpt.profiler.grid import FloatArray
from exegpt.scheduler.result import Best
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray, constraint_values
from exegpt.specs import BoundSpec

BoolArray = NDArray[np.bool_]

# (choice, batches (n,), extents (n,)) -> estimates
Evaluate = Callable[[Choice, IntArray, IntArray], Estimates]

# Values just over a limit through rounding must not prune what evaluation would accept.
SLACK = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a schedule must meet: latency bounds, bytes per GPU, a least throughput (a given load)."""

    bound: BoundSpec
    memory_bytes: float
    throughput_per_s: float = 0.0

    def limits(self) -> dict[str, float]:
        """Greatest value allowed, by constraint."""
        bound = self.bound
        return {
            "memory": self.memory_bytes,
            "latency_s": bound.latency_s,
            "ttft_s": bound.ttft_s,
            "tpot_s": bound.tpot_s,
        }

    def met(self, e: Estimates) -> dict[str, BoolArray]:
        """Which candidates meet each constraint."""
        values, limits = constraint_values(e), self.limits()
        met = {"profile": np.isfinite(e.cycle_s) & np.isfinite(e.latency_s)}
        met |= {name: np.asarray(values[name] <= limits[name]) for name in limits}
        if self.throughput_per_s > 0:
            met["throughput"] = e.throughput_per_s >= self.throughput_per_s
        return met

    def box_scores(self, bounds: Bounds, objective: str) -> tuple[FloatArray, BoolArray]:
        """Best score that boxes can hold, and which of them can hold a feasible candidate."""
        lower = {
            "memory": bounds.memory_lower_bytes,
            "latency_s": bounds.latency_lower_s,
            "ttft_s": bounds.ttft_lower_s,
        }
        if bounds.tpot_lower_s is not None:
            lower["tpot_s"] = bounds.tpot_lower_s
        limits = self.limits()
        alive = bounds.throughput_upper_per_s * SLACK >= max(self.throughput_per_s, np.finfo(float).tiny)
        for name, values in lower.items():
            if name != objective:
                alive = alive & (values <= limits[name] * SLACK)
        if objective == "throughput":
            return bounds.throughput_upper_per_s, alive
        best = lower.get(objective, np.zeros_like(bounds.latency_lower_s))
        return -np.asarray(best) / SLACK, alive & np.isfinite(best)


@dataclass(slots=True)
class Tally:
    """Candidates that fell out, by constraint, and the best value that each could reach.

    `closest` maps a constraint to the lowest value any candidate evaluated had that met all the others.
    """

    counts: dict[str, int] = field(default_factory=dict)
    closest: dict[str, float] = field(default_factory=dict)

    def take_best(
        self,
        best: Best | None,
        choice: Choice,
        batches: IntArray,
        extents: IntArray,
        e: Estimates,
        constraints: Constraints,
        objective: str = "throughput",
    ) -> Best | None:
        """The better of `best` and the best feasible of the candidates; what fails is noted.

        Ties go to the lower latency, then to the smaller batch.
        """
        met = constraints.met(e)
        self._note(met, e)
        feasible = np.logical_and.reduce([ok for name, ok in met.items() if name != objective])
        if not feasible.any():
            return best
        score = e.throughput_per_s if objective == "throughput" else -constraint_values(e)[objective]
        score = np.where(feasible, score, -np.inf)
        top = np.flatnonzero(score == score.max())
        i = int(top[np.lexsort((batches[top], e.latency_s[top]))[0]])
        found = replace(Best.of(choice, int(batches[i]), int(extents[i]), e, at=i), score=float(score[i]))
        return found if best is None or found.order > best.order else best

    def _note(self, met: dict[str, BoolArray], e: Estimates) -> None:
        values = constraint_values(e)
        for name, ok in met.items():
            self.counts[name] = self.counts.get(name, 0) + int(np.count_nonzero(~ok))
            if name not in values:
                continue
            others = np.logical_and.reduce([met[other] for other in met if other != name])
            if others.any():
                lowest = float(values[name][others].min())
                self.closest[name] = min(self.closest.get(name, np.inf), lowest)
