"""What a search returns: the best candidate of a policy, why others fell out, how far the proof reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from exegpt.schedule import SIDED_POLICIES, Knobs, Schedule
from exegpt.scheduler.continuous import continuous_knobs
from exegpt.simulator.choice import Choice, Estimates
from exegpt.specs import Policy

if TYPE_CHECKING:
    from exegpt.scheduler.limits import NextBatch


def side_knobs(choice: Choice) -> dict[str, int]:
    """Knobs of a choice whose encoding and decoding have GPUs of their own; empty for others."""
    if choice.policy not in SIDED_POLICIES:
        return {}
    decode_tp_size = max(stage.tp_size for stage in choice.decode_stages)
    knobs = {
        "encode_gpus": choice.num_encode_instances * sum(s.tp_size for s in choice.encode_stages),
        "decode_tp_size": decode_tp_size,
        "num_decode_tp_gpus": sum(s.tp_size for s in choice.decode_stages if s.tp_size == decode_tp_size),
    }
    if choice.policy is Policy.DISAGGREGATED:
        knobs["num_encode_instances"] = choice.num_encode_instances
        knobs["num_decode_instances"] = choice.num_decode_instances
    return knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best candidate of a search, with its estimates in seconds and bytes.

    `batch` and `extent` count what `Choice` says; `score` is what the search made greatest; `memory_parts`
    are the bytes of a rank of every stage by use; `worst` are the values that met the constraints where a
    margin was planned.
    """

    choice: Choice
    batch: int
    extent: int
    score: float
    throughput_per_s: float
    latency_s: float
    ttft_s: float
    tpot_s: float
    decode_batch_size: float
    memory_bytes: tuple[int, ...]
    memory_parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    worst: Mapping[str, float] | None = None

    @classmethod
    def of(cls, choice: Choice, batch: int, extent: int, e: Estimates, *, at: int = 0) -> Best:
        """The candidate that row `at` of the estimates is of, scored by its throughput."""
        throughput_per_s = float(e.throughput_per_s[at])
        parts = e.memory.parts_bytes.items()
        return cls(
            choice=choice,
            batch=batch,
            extent=extent,
            score=throughput_per_s,
            throughput_per_s=throughput_per_s,
            latency_s=float(e.latency_s[at]),
            ttft_s=float(e.ttft_s[at]),
            tpot_s=float(e.tpot_s[at]),
            decode_batch_size=float(e.decode_batch_size[at]),
            memory_bytes=tuple(int(b) for b in e.memory.total_bytes[at]),
            memory_parts={name: tuple(int(b) for b in part[at]) for name, part in parts},
            worst=None if e.worst is None else {name: float(v[at]) for name, v in e.worst.items()},
        )

    @property
    def order(self) -> tuple[float, float, int]:
        """Greater is better: the score, then less latency, then a smaller batch."""
        return self.score, -self.latency_s, -self.batch

    def knobs(self) -> Knobs:
        """The candidate's knobs as a schedule has them."""
        choice = self.choice
        knobs = Knobs(
            encode_batch_size=self.batch,
            decode_batch_size=max(round(self.decode_batch_size), 1),
            decode_iterations=self.extent if choice.policy is Policy.RRA else 1,
            num_micro_batches=choice.num_micro_batches,
            tp_size=choice.tp_size,
            num_tp_gpus=sum(s.tp_size for s in choice.encode_stages if s.tp_size == choice.tp_size),
            **side_knobs(choice),
        )
        return replace(knobs, **continuous_knobs(self))

    def predicted(self, mean_output_tokens: float) -> dict[str, float]:
        """Estimates under their names in files."""
        return {
            "throughput_per_s": self.throughput_per_s,
            "throughput_tokens_per_s": self.throughput_per_s * mean_output_tokens,
            "latency_s": self.latency_s,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
        }

    def schedule(self, model: str, lengths: Mapping[str, Any], mean_output_tokens: float) -> Schedule:
        """The candidate as a schedule."""
        return Schedule(
            model=model,
            policy=self.choice.policy,
            knobs=self.knobs(),
            stages=self.choice.stages,
            num_replicas=self.choice.num_replicas,
            lengths=lengths,
            predicted=self.predicted(mean_output_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Outcome of searching one policy.

    Attributes
    ----------
    best : Best or None
        None if no candidate meets every constraint; then `closest` says what to relax.
    throughput_upper_per_s : float, optional
        No candidate of the space that meets the constraints has more; None if that is not proven.
    num_evaluations, space_size : int
    rejected : mapping of str to int
        Candidates evaluated that break each constraint.
    closest : mapping of str to float
        The lowest value of a constraint that any candidate has that meets all the others; where it is
        needed (nothing is feasible) it is searched for, else it comes from what was evaluated.
    binding : tuple of str
        Search ranges that the best candidate lies at the edge of.
    further : NextBatch, optional
        The best candidate with the next larger batch, and the constraints that this breaks.
    """

    best: Best | None
    throughput_upper_per_s: float | None
    num_evaluations: int
    space_size: int
    rejected: Mapping[str, int]
    closest: Mapping[str, float]
    binding: tuple[str, ...] = ()
    further: NextBatch | None = None
