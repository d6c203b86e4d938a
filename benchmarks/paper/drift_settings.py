"""Where figure 11 is looked at: the policies under the bounds that they have a schedule for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from agree.cases import Case
from agree.measure import compare

from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.scheduler.solve import solve
from exegpt.specs import Policy
from paper.drift_rows import DRIFTS, Drift, Row, fixed_bound, rows_of
from paper.scenarios import Scenario, problem

EXPERIMENT, TASK = "opt-13b", "T"
# The paper's bound first.
BOUNDED = ("medium", "loose")
# Pairs of samples that a drift is replayed with.
REPLAYED_PAIRS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Policies under a bound in seconds, their best schedule for the planned lengths, and its drifts.

    `unmet` are the bounds before it that they do not meet, with the least latency that they reach.
    """

    name: str
    bound: str
    unmet: Mapping[str, float]
    problem: Problem
    best: Best
    rows: Sequence[Row]

    def row(self, moment: str, value: float) -> Row:
        """The row of one drift."""
        return next(r for r in self.rows if r.drift == Drift(moment, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Throughput and latency of the 99th percentile of the drifted lengths, closed form and replay."""

    drift: Drift
    steady_per_s: float
    replayed_per_s: float
    steady_latency_s: float
    replayed_latency_s: float


def first_feasible(
    name: str, policies: Sequence[Policy], bounds: Sequence[str], done: Callable[[], None]
) -> Setting:
    """The policies under the first of the bounds that they meet, with every drift."""
    unmet: dict[str, float] = {}
    for bound in bounds:
        given = fixed_bound(problem(Scenario(experiment=EXPERIMENT, task=TASK, bound=bound), policies))
        found = solve(replace(given, baselines=()))
        if found.best is not None:
            rows = rows_of(given, DRIFTS, done=done)
            return Setting(name=name, bound=bound, unmet=unmet, problem=given, best=found.best, rows=rows)
        unmet[bound] = min(r.closest["latency_s"] for r in found.policies.values())
    raise AssertionError(f"{name} has no schedule even without a bound")


def replayed(setting: Setting, drifts: Sequence[Drift], done: Callable[[], None]) -> list[Replayed]:
    """The old schedule replayed with drifted lengths: what its file holds is held."""
    return [_replay(setting, drift, done) for drift in drifts]


def _replay(setting: Setting, drift: Drift, done: Callable[[], None]) -> Replayed:
    planned, best = setting.problem.lengths, setting.best
    case = Case(
        setting=setting.name,
        problem=replace(setting.problem, lengths=drift.of(planned)),
        choice=best.choice,
        batch=best.batch,
        extent=best.extent,
        schedule=best.schedule(setting.problem.model.name, planned.summary(), planned.mean_output),
        is_best=False,
    )
    found = compare(case, REPLAYED_PAIRS)
    done()
    served = setting.row(drift.moment, drift.value).old
    return Replayed(
        drift=drift,
        steady_per_s=served.throughput_per_s,
        replayed_per_s=found.throughput_per_s,
        steady_latency_s=served.latency_s,
        replayed_latency_s=found.latency_s,
    )


def adapted_shares(setting: Setting) -> list[float | None]:
    """Throughput with a new N_D alone over that of a new schedule, per drift; None if N_D is not enough."""
    return [
        r.adapted.throughput_per_s / r.new.throughput_per_s if r.adapted is not None else None
        for r in setting.rows
        if r.new is not None
    ]


def lost(row: Row) -> float:
    """Share of the re-optimised throughput that the old schedule is short of; below 0 where it has more."""
    return 0.0 if row.new is None else 1 - row.old.throughput_per_s / row.new.throughput_per_s


def late(row: Row, *, planned: bool) -> float:
    """Share of the bound by which the old schedule is late; below 0 where it is in time."""
    return (row.old.planned_latency_s if planned else row.old.latency_s) / row.bound_s - 1


def own_margin(setting: Setting, row: Row, *, planned: bool) -> float:
    """Share by which the bound is to be tighter if the latency of the schedules grows as the old one's."""
    now = row.old.planned_latency_s if planned else row.old.latency_s
    return max(1 - setting.best.latency_s / now, 0.0)


def replayed_margin(found: Sequence[Replayed], drift: Drift) -> float:
    """As `own_margin` under (a), of a replayed schedule; `found` has its replay without a drift too."""
    latency_s = {r.drift: r.replayed_latency_s for r in found}
    return max(1 - latency_s[Drift(drift.moment, 1.0)] / latency_s[drift], 0.0)


def mean_share(shares: Sequence[float | None]) -> float:
    """Mean of what is there."""
    return fmean(s for s in shares if s is not None)
