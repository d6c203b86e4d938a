"""Sweeps of one control variable with all others fixed, and how many of their points break monotonicity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.space import PolicySpace
from exegpt.simulator.choice import Choice
from exegpt.simulator.steady import SteadyState
from exegpt.specs import Policy

NUM_BATCHES = 24
NUM_ITERATIONS = 16
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Throughput and latency along one variable, in the order in which both should rise.

    Points that do not fit in memory or the profile are left out.
    """

    variable: str
    throughput_per_s: FloatArray
    latency_s: FloatArray


@dataclass(frozen=True, slots=True)
class Grid:
    """Estimates of a choice over batches (first axis) and iterations; NaN where it does not fit."""

    choice: Choice
    throughput_per_s: FloatArray
    latency_s: FloatArray


def breaks(values: FloatArray, slack: FloatArray | float) -> int:
    """Points that lie below the greatest one before them by more than `slack`.

    Parameters
    ----------
    values : float array, shape (n,)
        In the order in which they should rise.
    slack : float or float array, shape (n - 1,)
        How far below is still taken for monotonic.
    """
    if len(values) < 2:
        return 0
    greatest = np.maximum.accumulate(values)[:-1]
    return int(np.count_nonzero(values[1:] < greatest - slack))


def throughput_breaks(sweep: Sweep, tolerance: float) -> int:
    """Breaks of throughput; the tolerance is a share of what was achieved before."""
    return breaks(sweep.throughput_per_s, tolerance * np.maximum.accumulate(sweep.throughput_per_s)[:-1])


def latency_breaks(sweep: Sweep, tolerance: float, bound_s: float) -> int:
    """Breaks of latency; the tolerance is a share of the bound."""
    return breaks(sweep.latency_s, tolerance * bound_s)


def sweeps(given: Problem) -> Iterator[Sweep]:
    """All sweeps of a problem: RRA's B_E and N_D, WAA's B_E, GPUs under tensor parallelism, micro-batches.

    Our choice: batches and iterations in about equal ratios, as the paper does not say which it took; one
    replica, since the paper has no others; for the GPUs under tensor parallelism the fastest placement of
    each number of them.
    """
    given = replace(given, num_replicas=(1,), num_micro_batches=MICRO_BATCHES)
    steady = given.steady()
    spaces = given.spaces(steady, [Policy.RRA, Policy.WAA_C])
    for grid in grids(spaces[Policy.RRA], steady, given.cluster.memory_bytes):
        for column in range(grid.latency_s.shape[1]):
            yield _sweep("RRA B_E", grid.throughput_per_s[:, column], grid.latency_s[:, column])
        for row in range(grid.latency_s.shape[0]):
            yield _sweep("RRA N_D", grid.throughput_per_s[row, ::-1], grid.latency_s[row, ::-1])
    waa = list(grids(spaces[Policy.WAA_C], steady, given.cluster.memory_bytes))
    for grid in waa:
        yield _sweep("WAA B_E", grid.throughput_per_s[:, 0], grid.latency_s[:, 0])
    yield from _micro_batch_sweeps(waa)
    yield from _tp_sweeps(waa)


def grids(space: PolicySpace, steady: SteadyState, memory_bytes: float) -> Iterator[Grid]:
    """Estimates of every choice of a space on a grid of batches, the same for all, and iterations."""
    if not space.choices:
        return
    batches = _ratios(int(max(space.batches(i)[-1] for i in range(len(space.choices)))), NUM_BATCHES)
    extents = (
        _ratios(int(space.extents[-1]), NUM_ITERATIONS) if len(space.extents) > 1 else np.ones(1, np.int64)
    )
    batch, extent = (x.ravel() for x in np.meshgrid(batches, extents, indexing="ij"))
    for choice in space.choices:
        e = steady.estimate(choice, batch, extent)
        fits = np.isfinite(e.latency_s) & (e.memory.total_bytes.max(-1) <= memory_bytes)
        throughput, latency = (np.where(fits, x, np.nan) for x in (e.throughput_per_s, e.latency_s))
        shape = len(batches), len(extents)
        yield Grid(choice, throughput.reshape(shape), latency.reshape(shape))


def _ratios(last: int, count: int) -> np.ndarray:
    return np.unique(np.geomspace(1, last, count).round().astype(np.int64))


def _sweep(variable: str, throughput_per_s: FloatArray, latency_s: FloatArray) -> Sweep:
    fits = np.isfinite(latency_s)
    return Sweep(variable, throughput_per_s[fits], latency_s[fits])


def _micro_batch_sweeps(waa: list[Grid]) -> Iterator[Sweep]:
    """Fewer micro-batches are larger ones."""
    groups: dict[object, list[Grid]] = defaultdict(list)
    for grid in waa:
        groups[grid.choice.stages].append(grid)
    for group in groups.values():
        yield from _across("WAA B_m", sorted(group, key=lambda g: -g.choice.num_micro_batches))


def _tp_sweeps(waa: list[Grid]) -> Iterator[Sweep]:
    """Fewer GPUs under tensor parallelism of one degree: deeper pipelines."""
    groups: dict[object, dict[int, list[Grid]]] = defaultdict(lambda: defaultdict(list))
    for grid in waa:
        sizes = [stage.tp_size for stage in grid.choice.stages]
        degrees = sorted(set(sizes) - {1})
        if len(degrees) <= 1:
            for degree in degrees or _degrees(waa):
                groups[degree, grid.choice.num_micro_batches][sum(s for s in sizes if s > 1)].append(grid)
    for group in groups.values():
        counts = sorted(group, reverse=True)
        yield from _across("WAA TP", [_fastest(group[n]) for n in counts])


def _degrees(waa: list[Grid]) -> set[int]:
    return {stage.tp_size for grid in waa for stage in grid.choice.stages} - {1}


def _fastest(group: list[Grid]) -> Grid:
    """Of every batch the placement with the most throughput."""
    throughput = np.stack([g.throughput_per_s for g in group])
    at = np.nanargmax(np.where(np.isnan(throughput), -np.inf, throughput), axis=0)
    latency = np.stack([g.latency_s for g in group])
    taken = (np.take_along_axis(x, at[None], 0)[0] for x in (throughput, latency))
    return Grid(group[0].choice, *taken)


def _across(variable: str, group: list[Grid]) -> Iterator[Sweep]:
    """A sweep over the members of a group for every batch."""
    for row in range(group[0].latency_s.shape[0]):
        yield _sweep(
            variable,
            np.array([g.throughput_per_s[row, 0] for g in group]),
            np.array([g.latency_s[row, 0] for g in group]),
        )
