"""What is searched: the enumerated choices and the ranges of the two integer knobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.errors import CapacityError, ConfigError
from exegpt.profiler.table import ProfileTable
from exegpt.simulator.placement import placements
from exegpt.simulator.steady import Choice, IntArray
from exegpt.specs import ClusterSpec, ModelSpec, Policy

# The static baseline is searched in steps of four queries, as in the paper (section 7.1).
STATIC_BATCH_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Choices with their ranges of `encode_batch_size`, and the range of `decode_iterations`.

    `batch_limit_from` says where the largest batch comes from, for the message if it binds.
    """

    choices: tuple[Choice, ...]
    max_encode_batch_size: int | None
    max_decode_iterations: int
    max_profiled_queries: int

    def batch_sizes(self, choice: Choice) -> IntArray:
        """Candidate batch sizes; every micro-batch gets a query at least."""
        most = self.largest_batch(choice)
        if choice.policy is Policy.STATIC:
            first = max(STATIC_BATCH_STEP, choice.num_micro_batches)
            return np.arange(first, most + 1, STATIC_BATCH_STEP, dtype=np.int64)
        return np.arange(choice.num_micro_batches, most + 1, dtype=np.int64)

    def largest_batch(self, choice: Choice) -> int:
        """Largest batch size searched: the one set, or what the profile covers."""
        covered = self.max_profiled_queries * choice.num_micro_batches
        return min(self.max_encode_batch_size or covered, covered)

    def iterations(self, choice: Choice) -> range:
        """Candidate numbers of decode iterations; STATIC decodes to the end and has none to choose."""
        return range(1, 2) if choice.policy is Policy.STATIC else range(1, self.max_decode_iterations + 1)

    @property
    def size(self) -> int:
        """Number of candidates."""
        return sum(len(self.batch_sizes(c)) * len(self.iterations(c)) for c in self.choices)

    def of(self, policy: Policy) -> Iterator[Choice]:
        """Choices of one policy."""
        return (choice for choice in self.choices if choice.policy is policy)


def make_space(
    model: ModelSpec,
    profile: ProfileTable,
    cluster: ClusterSpec,
    *,
    policies: Sequence[Policy],
    longest_decode: int,
    max_encode_batch_size: int | None,
    max_decode_iterations: int | None,
    num_micro_batches: Sequence[int] | None,
    tp_sizes: Sequence[int] | None,
) -> Space:
    """Enumerate placements, degrees and micro-batches.

    Degrees are those that the model's heads allow, that the profile covers and that divide a node
    (groups stay inside one). STATIC takes the highest degree alone, as FasterTransformer does.
    Micro-batches default to one, to the number of stages, and to twice that.
    """
    degrees = _degrees(model, profile, cluster, tp_sizes)
    choices = []
    for policy in policies:
        for tp_size in degrees[-1:] if policy is Policy.STATIC else degrees:
            num_stages = cluster.num_gpus // tp_size
            counts = num_micro_batches or sorted({1, num_stages, 2 * num_stages})
            placed = placements(model, profile, cluster.num_gpus, tp_size)
            choices += [Choice(policy=policy, stages=s, num_micro_batches=m) for s in placed for m in counts]
    if not choices:
        raise CapacityError(
            f"{model.name} has {model.num_hidden_layers} layers, too few for {cluster.num_gpus} stages; "
            "set cluster.gpus_per_node lower"
        )
    return Space(
        choices=tuple(choices),
        max_encode_batch_size=max_encode_batch_size,
        max_decode_iterations=min(max_decode_iterations or longest_decode, max(longest_decode, 1)) or 1,
        max_profiled_queries=int(min(c.decode_overhead.limit() for c in profile.layers.values())),
    )


def _degrees(
    model: ModelSpec, profile: ProfileTable, cluster: ClusterSpec, wanted: Sequence[int] | None
) -> list[int]:
    divisors = [t for t in model.tp_sizes(cluster.gpus_per_node) if cluster.gpus_per_node % t == 0]
    possible = [t for t in divisors if t in profile.layers]
    if wanted is None:
        return possible
    for tp_size in wanted:
        if tp_size not in possible:
            raise ConfigError(
                f"solver.tp_sizes: {tp_size} is not possible for {model.name} on {cluster.name}; "
                f"allowed: {possible} "
                f"(heads allow {list(model.tp_sizes(cluster.gpus_per_node))}, profiled are "
                f"{sorted(profile.layers)})"
            )
    return sorted(wanted)
