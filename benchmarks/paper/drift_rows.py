"""A schedule after the output lengths have drifted from those it was solved for: what it does, what would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.scheduler.solve import resolve_bound, solve
from exegpt.simulator.choice import Estimates, IntArray
from exegpt.simulator.steady import SteadyState
from exegpt.specs import BoundSpec, Policy
from exegpt.workload.drift import drifted
from exegpt.workload.lengths import RequestLengths, independent

# Per cent by which the planning bound is made tighter, one after another.
TIGHTER = range(41)
# Share of the queries that have a length which none had.
RARE = 1e-9


@dataclass(frozen=True, slots=True)
class Drift:
    """One moment of the output lengths: `mean` and `std` by a factor, `skew` to a value."""

    moment: str
    value: float

    def __str__(self) -> str:
        return f"skew {self.value:+g}" if self.moment == "skew" else f"{self.moment} x{self.value:g}"

    def of(self, lengths: RequestLengths) -> RequestLengths:
        """The lengths drifted."""
        match self.moment:
            case "mean":
                return drifted(lengths, mean=self.value)
            case "std":
                return drifted(lengths, std=self.value)
        return drifted(lengths, skew=self.value)


FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)
SKEWS = (-0.4, -0.2, 0.0, 0.2, 0.4)
DRIFTS = (
    *(Drift(moment, factor) for moment in ("mean", "std") for factor in FACTORS),
    *(Drift("skew", skew) for skew in SKEWS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a schedule does: latency of the 99th percentile of the lengths now, and of the planned ones."""

    throughput_per_s: float
    latency_s: float
    planned_latency_s: float
    fits: bool

    def meets(self, bound_s: float, *, planned: bool) -> bool:
        """Whether it fits in memory and its query is in time: the planned one, or the drifted one."""
        return self.fits and (self.planned_latency_s if planned else self.latency_s) <= bound_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A policy under a drift.

    `old` keeps batch, iterations and placement; `new` is solved for the drifted lengths, `adapted` has the
    best N_D with the old batch and placement (RRA only), None where nothing meets the bound. Margins in
    per cent; None if none of `TIGHTER` is enough.
    """

    drift: Drift
    bound_s: float
    old: Served
    new: Best | None
    adapted: Best | None
    margin: int | None
    planned_margin: int | None


class Drifted:
    """A problem with drifted lengths, for schedules that were solved without the drift."""

    def __init__(self, problem: Problem, drift: Drift) -> None:
        self.problem = replace(problem, lengths=drift.of(problem.lengths))
        self.now = self.problem.steady()
        self.planned = bound_on(self.problem, problem.steady().bound_output_tokens)

    def serve(self, best: Best) -> Served:
        """A schedule with its own batch, iterations and placement."""
        at = np.asarray([best.batch]), np.asarray([best.extent])
        e = self.now.estimate(best.choice, *at)
        return Served(
            throughput_per_s=float(e.throughput_per_s[0]),
            latency_s=float(e.latency_s[0]),
            planned_latency_s=float(self.planned.estimate(best.choice, *at).latency_s[0]),
            fits=bool(e.memory.total_bytes[0].max() <= self.problem.cluster.memory_bytes),
        )

    def adapt(self, best: Best) -> Best | None:
        """RRA's batch and placement with the N_D of most throughput within bound and memory."""
        extents = np.arange(1, max(self.now.completion.max_iterations, 1) + 1)
        e = self.now.estimate(best.choice, np.full_like(extents, best.batch), extents)
        at = fastest(e, self.problem.bound.latency_s, self.problem.cluster.memory_bytes)
        return None if at is None else Best.of(best.choice, best.batch, int(extents[at]), e, at=at)


def bound_on(problem: Problem, output_tokens: int) -> SteadyState:
    """The closed forms whose bound's query has this length, be it a percentile of the lengths or not."""
    lengths = problem.lengths
    if output_tokens > lengths.max_output:
        # The forms know no query longer than all: one in so many moves nothing else.
        pmf = np.zeros(output_tokens + 1)
        pmf[: lengths.max_output + 1] = lengths.output_pmf * (1 - RARE)
        pmf[output_tokens] = RARE
        lengths = independent(lengths.input_pmf, pmf)
    steady = problem.steady(lengths)
    steady.num_gaps += output_tokens - steady.bound_output_tokens
    steady.bound_output_tokens = output_tokens
    return steady


def fastest(e: Estimates, bound_s: float, memory_bytes: int) -> int | None:
    """Row of the estimates with most throughput among those in time and in memory."""
    meets = (e.latency_s <= bound_s) & (e.memory.total_bytes.max(-1) <= memory_bytes)
    rows: IntArray = np.flatnonzero(meets)
    return int(rows[e.throughput_per_s[rows].argmax()]) if len(rows) else None


def best_of(problem: Problem) -> Best | None:
    """The best schedule of the problem's policies, without baselines."""
    return solve(replace(problem, baselines=())).best


def fixed_bound(problem: Problem) -> Problem:
    """The problem with its bound in seconds, which then does not move with the lengths."""
    return replace(problem, bound=resolve_bound(problem), bound_quantile=None)


def tightened(problem: Problem, per_cent: int) -> Problem:
    """The problem under a bound tighter by so many per cent."""
    bound = BoundSpec(latency_s=problem.bound.latency_s * (1 - per_cent / 100))
    return replace(problem, bound=bound)


def least_margin(served: Sequence[Served | None], bound_s: float, *, planned: bool) -> int | None:
    """The least margin whose schedule still meets the bound; `served` has one for every of `TIGHTER`."""
    pairs = zip(TIGHTER, served, strict=True)
    return next((k for k, s in pairs if s is not None and s.meets(bound_s, planned=planned)), None)


def rows_of(
    problem: Problem, drifts: Sequence[Drift] = DRIFTS, *, done: Callable[[], None] = lambda: None
) -> list[Row]:
    """A row per drift of a problem with a bound in seconds that it has a schedule for."""
    has_bound = np.isfinite(problem.bound.latency_s)
    ladder = [best_of(tightened(problem, k)) for k in (TIGHTER if has_bound else [0])]
    assert ladder[0] is not None
    rows = []
    for drift in drifts:
        rows.append(_row(problem, drift, ladder, ladder[0]))
        done()
    return rows


def _row(problem: Problem, drift: Drift, ladder: Sequence[Best | None], old: Best) -> Row:
    now, bound_s = Drifted(problem, drift), problem.bound.latency_s
    served = [None if best is None else now.serve(best) for best in ladder]
    first = now.serve(old)
    margins = [
        least_margin(served, bound_s, planned=planned) if len(served) > 1 else None
        for planned in (False, True)
    ]
    return Row(
        drift=drift,
        bound_s=bound_s,
        old=first,
        new=best_of(now.problem),
        adapted=now.adapt(old) if old.choice.policy is Policy.RRA else None,
        margin=margins[0],
        planned_margin=margins[1],
    )
