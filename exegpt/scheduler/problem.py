"""A planning problem: everything that a solution depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exegpt.profiler.table import ProfileTable
from exegpt.scheduler.robust import RobustState
from exegpt.scheduler.space import Enumerator, PolicySpace, SpaceSettings, make_spaces
from exegpt.simulator.steady import SteadyState
from exegpt.specs import BoundSpec, ClusterSpec, Counting, ModelSpec, Policy, SolverName
from exegpt.workload.drift import drift_corners
from exegpt.workload.lengths import RequestLengths

# Baselines that every answer is compared with, unless they compete themselves.
BASELINES = (
    Policy.STATIC,
    Policy.STATIC_HYBRID,
    Policy.ITERATION,
    Policy.CHUNKED,
    Policy.DISAGGREGATED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a solution depends on.

    `method` is how `policies` are searched; the tolerances are read by `paper` (see `scheduler.monotone`),
    which leaves `baselines` to branch and bound.
    `bound_quantile` takes the latency bound from the static baseline: that quantile of its
    latencies over the batch sizes that fit.
    `confidence` and `drift_margin` are the margins planned for; see `RobustState`.
    """

    model: ModelSpec
    profile: ProfileTable
    cluster: ClusterSpec
    lengths: RequestLengths
    bound: BoundSpec
    bound_quantile: float | None = None
    policies: Sequence[Policy] = (Policy.RRA,)
    counting: Counting = Counting.exact
    method: SolverName = SolverName.branch_and_bound
    latency_tolerance: float = 0.05
    throughput_tolerance: float = 0.05
    baselines: Sequence[Policy] = BASELINES
    page_size: int = 16
    max_encode_batch_size: int | None = None
    max_decode_iterations: int | None = None
    num_micro_batches: Sequence[int] | None = None
    tp_sizes: Sequence[int] | None = None
    num_replicas: Sequence[int] | None = None
    partial_tp: bool = True
    confidence: float | None = None
    drift_margin: float = 0.0

    @property
    def ranges(self) -> SpaceSettings:
        """The ranges that are searched."""
        return SpaceSettings(
            max_encode_batch_size=self.max_encode_batch_size,
            max_decode_iterations=self.max_decode_iterations,
            num_micro_batches=self.num_micro_batches,
            tp_sizes=self.tp_sizes,
            num_replicas=self.num_replicas,
            partial_tp=self.partial_tp,
        )

    def steady(self, lengths: RequestLengths | None = None) -> SteadyState:
        """The closed forms for this problem, or for other lengths."""
        return SteadyState(
            self.model,
            self.profile,
            lengths or self.lengths,
            counting=self.counting,
            length_percentile=self.bound.length_percentile,
            page_size=self.page_size,
            memory_bytes=self.cluster.memory_bytes,
        )

    @property
    def has_margins(self) -> bool:
        """Whether more is planned for than means of the planned lengths."""
        return self.confidence is not None or self.drift_margin > 0

    def spaces(self, steady: SteadyState, policies: Sequence[Policy]) -> dict[Policy, PolicySpace]:
        """What is searched of each policy; errors as of `make_spaces`."""
        spaces = make_spaces(steady, self.cluster, policies, self.ranges)
        return {policy: space.within(self.cluster.memory_bytes, steady) for policy, space in spaces.items()}

    def check_ranges(self) -> None:
        """Raise ConfigError if a degree or a number of replicas asked for is impossible on the cluster."""
        Enumerator(self.steady(), self.cluster, self.ranges)

    def robust(self, steady: SteadyState) -> SteadyState | RobustState:
        """The closed forms with the margins asked for."""
        if not self.has_margins:
            return steady
        drifts = drift_corners(self.lengths, self.drift_margin) if self.drift_margin else []
        return RobustState(steady, [self.steady(drifted) for drifted in drifts], self.confidence)
