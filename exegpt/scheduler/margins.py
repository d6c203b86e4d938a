"""What a margin costs: the throughput that the same search finds without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exegpt.scheduler.result import Best


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """The margins of a problem and their price.

    Attributes
    ----------
    confidence : float, optional
        Probability with which the bound's query is in time.
    drift_margin : float
        Share by which mean and deviation of the output lengths may be off.
    throughput_without_per_s : float, optional
        Best throughput of the same policies without margins; None if nothing is feasible even then.
    wall_s : float
        What finding it took.
    """

    confidence: float | None
    drift_margin: float
    throughput_without_per_s: float | None
    wall_s: float

    def record(self, best: Best | None) -> dict[str, Any]:
        """Under the names of result.json; `cost` is the share of throughput given up for the margins."""
        without = self.throughput_without_per_s
        return {
            "confidence": self.confidence,
            "drift_margin": self.drift_margin,
            "worst": worst_record(best.worst) if best and best.worst else None,
            "throughput_without_per_s": without,
            "cost": 1 - best.throughput_per_s / without if best and without else None,
            "wall_s": self.wall_s,
        }


def worst_record(worst: Mapping[str, float]) -> dict[str, float]:
    """The values that met the constraints, under the names of result.json; memory is the fullest GPU's."""
    return {("memory_bytes" if name == "memory" else name): value for name, value in worst.items()}
