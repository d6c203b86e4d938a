"""What a search returns: best candidate, why others fell out, and how far the proof reaches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from exegpt.schedule import Knobs, Schedule
from exegpt.simulator.steady import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best candidate of a search, with its estimates in seconds and bytes."""

    choice: Choice
    encode_batch_size: int
    decode_iterations: int
    throughput_per_s: float
    throughput_tokens_per_s: float
    latency_s: float
    ttft_s: float
    tpot_s: float
    decode_batch_size: float
    memory_bytes: tuple[int, ...]

    def knobs(self) -> Knobs:
        """The candidate's knobs as a schedule has them."""
        tp_size = self.choice.tp_size
        return Knobs(
            encode_batch_size=self.encode_batch_size,
            decode_batch_size=max(round(self.decode_batch_size), 1),
            decode_iterations=self.decode_iterations,
            num_micro_batches=self.choice.num_micro_batches,
            tp_size=tp_size,
            num_tp_gpus=sum(s.tp_size for s in self.choice.stages),
        )

    def predicted(self) -> dict[str, float]:
        """Estimates under their names in files."""
        names = ("throughput_per_s", "throughput_tokens_per_s", "latency_s", "ttft_s", "tpot_s")
        return {name: getattr(self, name) for name in names}

    def schedule(self, model: str, lengths: dict[str, Any]) -> Schedule:
        """The candidate as a schedule."""
        return Schedule(
            model=model,
            policy=self.choice.policy,
            knobs=self.knobs(),
            stages=self.choice.stages,
            lengths=lengths,
            predicted=self.predicted(),
        )


@dataclass(slots=True)
class Rejections:
    """Candidates that fell out, by constraint, and the best value that each could reach.

    `closest` maps a constraint to the lowest value any candidate had that met all the others.
    """

    counts: dict[str, int] = field(default_factory=dict)
    closest: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Outcome of searching one policy.

    Attributes
    ----------
    best : Best or None
        None if no candidate meets every constraint; then `rejections` says what to relax.
    throughput_upper_per_s : float
        No candidate of the space that meets the constraints has more.
    num_evaluations, space_size : int
    binding : tuple of str
        Search ranges that the best candidate lies at the edge of.
    """

    best: Best | None
    throughput_upper_per_s: float
    num_evaluations: int
    space_size: int
    rejections: Rejections
    binding: tuple[str, ...] = ()
