"""What is searched: the enumerated choices of each policy, and the ranges of its two integer knobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from exegpt.errors import CapacityError, ConfigError
from exegpt.profiler.table import ProfileTable
from exegpt.scheduler import continuous, sides
from exegpt.scheduler.candidates import SLACK
from exegpt.scheduler.pipelines import Dealer, group_sizes, make_pipeline, shapes
from exegpt.simulator.choice import Choice, IntArray
from exegpt.simulator.serving import Serving
from exegpt.simulator.steady import SteadyState
from exegpt.specs import ClusterSpec, ModelSpec, Policy

# The static baseline is searched in steps of four queries, as in the paper (section 7.1).
STATIC_BATCH_STEP = 4
_STATIC = (Policy.STATIC, Policy.STATIC_HYBRID)


@dataclass(frozen=True, slots=True)
class PolicySpace:
    """Choices of one policy with their ranges of `batch`, and the values of `extent`.

    Attributes
    ----------
    first, step, count : int arrays, shape (choices,)
        Batches of a choice: `count` values from `first` in steps of `step`.
    extents : int array
        Values of the second knob, the same for every choice, rising.
    """

    policy: Policy
    choices: tuple[Choice, ...]
    first: IntArray
    step: IntArray
    count: IntArray
    extents: IntArray

    @property
    def size(self) -> int:
        """Number of candidates."""
        return int(self.count.sum()) * len(self.extents)

    def sizes(self, choice: int) -> tuple[int, int]:
        """Number of batches and of extents of a choice."""
        return int(self.count[choice]), len(self.extents)

    def values(self, which: IntArray, batches: IntArray, extents: IntArray) -> tuple[IntArray, IntArray]:
        """Knobs at indices (n, k) of choices `which` (n,)."""
        return self.first[which][:, None] + self.step[which][:, None] * batches, self.extents[extents]

    def batches(self, choice: int) -> IntArray:
        """All batches of a choice."""
        return np.asarray(self.first[choice] + self.step[choice] * np.arange(self.count[choice]))

    def within(self, memory_bytes: float, steady: SteadyState) -> PolicySpace:
        """The same up to the last batch of each choice that memory holds with the least extent, or one.

        For continuous batching only, whose bounds cost what a range spans; others refuse what is beyond it.
        """
        if self.policy not in continuous.SLOT_STEPS:
            return self
        counts = self.count.copy()
        for index, choice in enumerate(self.choices):
            batches = self.batches(index)
            used = steady.candidate_bytes(choice, batches, np.full_like(batches, self.extents[0]))
            fitting = np.flatnonzero(used <= memory_bytes * SLACK)
            counts[index] = min(max(int(fitting.max(initial=-1)) + 1, 1), len(batches))
        return replace(self, count=counts)

    def index_of(self, choice: int, batch: int, extent: int) -> tuple[int, int]:
        """Indices of a candidate's knobs."""
        at = (batch - int(self.first[choice])) // int(self.step[choice])
        return at, int(np.searchsorted(self.extents, extent))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSettings:
    """Ranges asked for; None takes what memory, profile and lengths imply.

    `partial_tp` allows pipelines of tensor-parallel groups and single GPUs.
    """

    max_encode_batch_size: int | None = None
    max_decode_iterations: int | None = None
    num_micro_batches: Sequence[int] | None = None
    tp_sizes: Sequence[int] | None = None
    num_replicas: Sequence[int] | None = None
    partial_tp: bool = True


class Enumerator:
    """What the choices of every policy are made from.

    Raises
    ------
    ConfigError
        If a degree or a number of replicas is asked for that model, profile or cluster do not allow.
    """

    def __init__(self, serving: Serving, cluster: ClusterSpec, settings: SpaceSettings) -> None:
        self.serving = serving
        self.cluster = cluster
        self.settings = settings
        self.degrees = _degrees(serving, cluster, settings.tp_sizes)
        self.groups = _groups(cluster, settings.num_replicas)
        self._weights = serving.model.num_parameters * serving.profile.dtype.num_bytes

    @cached_property
    def dealer(self) -> Dealer:
        """Layers dealt for stages that encode and decode."""
        return Dealer(self.serving)

    def fits(self, num_gpus: int, copies: float = 1.0) -> bool:
        """Whether so many GPUs can hold the weights at all."""
        return num_gpus * self.cluster.memory_bytes > copies * self._weights

    def micro_batches(self, num_stages: int) -> list[int]:
        """Numbers of micro-batches: one, half as many as stages, as many, and twice as many."""
        default = {1, (num_stages + 1) // 2, num_stages, 2 * num_stages}
        return list(self.settings.num_micro_batches or sorted(default))

    def pipelines(self, num_gpus: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Degrees and layers of the stages that so many GPUs can form."""
        return [
            (shape, counts)
            for shape in shapes(num_gpus, self.degrees)
            if self.settings.partial_tp or len(set(shape)) == 1
            for counts in self.dealer.deals(shape)
        ]


def rra_choices(enumerator: Enumerator) -> list[Choice]:
    """Every group size, partial tensor parallelism, deal of layers and number of micro-batches."""
    choices = []
    for group in enumerator.groups:
        if not enumerator.fits(group):
            continue
        for shape, counts in enumerator.pipelines(group):
            stages = make_pipeline(shape, counts)
            choices += [
                Choice(
                    policy=Policy.RRA,
                    stages=stages,
                    num_micro_batches=m,
                    num_replicas=enumerator.cluster.num_gpus // group,
                )
                for m in enumerator.micro_batches(len(stages))
            ]
    return choices


def static_choices(enumerator: Enumerator) -> list[Choice]:
    """The highest degree inside a node, pipelined across nodes, as FasterTransformer is run (paper, 7.1)."""
    cluster, degree = enumerator.cluster, enumerator.degrees[-1]
    shape = (degree,) * (cluster.num_gpus // degree)
    return [
        Choice(policy=Policy.STATIC, stages=make_pipeline(shape, counts), num_micro_batches=m)
        for counts in enumerator.dealer.deals(shape)
        for m in enumerator.micro_batches(len(shape))
    ]


ENUMERATORS: dict[Policy, Callable[[Enumerator], list[Choice]]] = {
    Policy.RRA: rra_choices,
    Policy.STATIC: static_choices,
    Policy.STATIC_HYBRID: continuous.static_hybrid_choices,
    Policy.ITERATION: continuous.iteration_choices,
    Policy.CHUNKED: continuous.chunked_choices,
    Policy.WAA_C: partial(sides.waa_choices, policy=Policy.WAA_C),
    Policy.WAA_M: partial(sides.waa_choices, policy=Policy.WAA_M),
    Policy.WAA: partial(sides.waa_choices, policy=Policy.WAA),
    Policy.DISAGGREGATED: sides.disaggregated_choices,
}


def make_spaces(
    serving: Serving, cluster: ClusterSpec, policies: Sequence[Policy], settings: SpaceSettings
) -> dict[Policy, PolicySpace]:
    """The space of each policy.

    Raises
    ------
    ConfigError
        If a range asked for is impossible.
    CapacityError
        If no policy has a choice: the weights fit nowhere, or there are more stages than layers.
    """
    enumerator = Enumerator(serving, cluster, settings)
    spaces = {policy: _space(policy, enumerator) for policy in policies}
    if not any(len(space.choices) for space in spaces.values()):
        model = serving.model
        needed = model.num_parameters * serving.profile.dtype.num_bytes / 2**30
        raise CapacityError(
            f"{model.name} has {needed:.1f} GiB of weights in {model.num_hidden_layers} layers; no pipeline "
            f"of the {cluster.num_gpus} GPUs with {cluster.memory_bytes / 2**30:.1f} GiB each holds it. "
            "Raise cluster.num_nodes, cluster.gpus_per_node or cluster.memory_gib"
        )
    return spaces


def _space(policy: Policy, enumerator: Enumerator) -> PolicySpace:
    settings, serving = enumerator.settings, enumerator.serving
    choices = tuple(ENUMERATORS[policy](enumerator))
    profiled = int(min(c.decode_overhead.limit() for c in serving.profile.layers.values()))
    least = np.asarray([_parts(choice) for choice in choices], dtype=np.int64).reshape(-1)
    step = np.full(len(choices), STATIC_BATCH_STEP if policy in _STATIC else 1, dtype=np.int64)
    if policy in continuous.SLOT_STEPS:
        # Micro-batches have equally many slots.
        step = least * continuous.SLOT_STEPS[policy]
    first = np.maximum(least, step)
    most = np.minimum(settings.max_encode_batch_size or profiled * least, profiled * least)
    return PolicySpace(
        policy=policy,
        choices=choices,
        first=first,
        step=step,
        count=np.maximum((most - first) // step + 1, 0),
        extents=_extents(policy, serving, settings),
    )


def _parts(choice: Choice) -> int:
    """Micro-batches that share the batch: each gets a query at least."""
    if choice.policy in (Policy.RRA, Policy.STATIC, Policy.STATIC_HYBRID, Policy.ITERATION, Policy.CHUNKED):
        return max(choice.num_micro_batches, choice.encode_micro_batches or 1)
    return 1


def _extents(policy: Policy, serving: Serving, settings: SpaceSettings) -> IntArray:
    if policy is Policy.RRA:
        longest = max(serving.completion.max_iterations, 1)
        return np.arange(1, min(settings.max_decode_iterations or longest, longest) + 1, dtype=np.int64)
    if policy is Policy.CHUNKED:
        return np.asarray(continuous.TOKEN_BUDGETS, dtype=np.int64)
    return np.ones(1, dtype=np.int64)


def possible_replicas(cluster: ClusterSpec) -> list[int]:
    """Numbers of equal groups that a cluster can be split into."""
    return sorted(cluster.num_gpus // group for group in group_sizes(cluster))


def possible_degrees(model: ModelSpec, profile: ProfileTable, cluster: ClusterSpec) -> list[int]:
    """Degrees that heads and profile allow and that divide a node, since groups stay inside one."""
    divisors = [t for t in model.tp_sizes(cluster.gpus_per_node) if cluster.gpus_per_node % t == 0]
    return [t for t in divisors if t in profile.layers]


def _groups(cluster: ClusterSpec, wanted: Sequence[int] | None) -> list[int]:
    possible = group_sizes(cluster)
    if wanted is None:
        return possible
    counts = possible_replicas(cluster)
    for count in wanted:
        if count not in counts:
            raise ConfigError(
                f"solver.num_replicas: {count} is not possible on {cluster.name} ({cluster.num_nodes} x "
                f"{cluster.gpus_per_node} GPUs); allowed: {counts}"
            )
    return [group for group in possible if cluster.num_gpus // group in wanted]


def _degrees(serving: Serving, cluster: ClusterSpec, wanted: Sequence[int] | None) -> list[int]:
    """The degrees asked for, else all that are possible."""
    model, profile = serving.model, serving.profile
    possible = possible_degrees(model, profile, cluster)
    if wanted is None:
        return possible
    for tp_size in wanted:
        if tp_size not in possible:
            raise ConfigError(
                f"solver.tp_sizes: {tp_size} is not possible for {model.name} on {cluster.name}; "
                f"allowed: {possible} (heads allow {list(model.tp_sizes(cluster.gpus_per_node))}, profiled "
                f"are {sorted(profile.layers)})"
            )
    return sorted(wanted)
