"""Figure 11's arithmetic: what an old schedule does under drift, and the margin that would have saved it."""

from dataclasses import replace

import numpy as np
import pytest
from paper.drift_claims import cycles_of, within
from paper.drift_rows import (
    Drift,
    Drifted,
    Served,
    best_of,
    bound_on,
    fastest,
    least_margin,
    rows_of,
    tightened,
)
from paper.drift_settings import Replayed, late, lost, replayed_margin
from synthetic import constant_profile, tiny_cluster, tiny_model, tiny_profile

from exegpt.scheduler.pipelines import make_pipeline
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.simulator.choice import Choice
from exegpt.specs import BoundSpec, Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import fixed_pmf, truncated_normal_pmf

MODEL = tiny_model()
RRA = Choice(policy=Policy.RRA, stages=make_pipeline((1,), (8,)), num_micro_batches=1)


def constant_problem(output_tokens, bound_s=np.inf):
    """One rank that encodes in 1 s and decodes an iteration in 0.1 s, and outputs of one length."""
    return Problem(
        model=MODEL,
        profile=constant_profile(MODEL, 1.0, 0.1),
        cluster=tiny_cluster(1),
        lengths=independent(fixed_pmf(16), fixed_pmf(output_tokens)),
        bound=BoundSpec(latency_s=bound_s),
        baselines=(),
        max_encode_batch_size=8,
    )


def best_at(problem, batch, iterations):
    e = problem.steady().estimate(RRA, np.array([batch]), np.array([iterations]))
    return Best.of(RRA, batch, iterations, e)


@pytest.mark.parametrize(
    ("factor", "latency_s", "planned_latency_s"),
    [
        # 21 tokens take 20 iterations: a cycle of 2 s, an encode phase and 10 iterations.
        (1.0, 4.0, 4.0),
        # 42 take 41: four cycles, an encode phase and an iteration.
        (2.0, 9.1, 4.0),
        # 7 take 6, in a cycle that ends when they do: 1.6 s. 20 iterations are a tenth one beyond 3 such.
        (1 / 3, 1.6, None),
    ],
)
def test_latency_of_the_drifted_and_of_the_planned_query(factor, latency_s, planned_latency_s):
    problem = constant_problem(21)
    served = Drifted(problem, Drift("mean", factor)).serve(best_at(problem, 4, 10))
    assert served.latency_s == pytest.approx(latency_s)
    if planned_latency_s is None:
        assert served.latency_s < served.planned_latency_s <= 4.0
    else:
        assert served.planned_latency_s == pytest.approx(planned_latency_s)
        assert served.throughput_per_s == pytest.approx(4 / 2.0)


def test_a_query_of_the_percentile_is_bound_on_as_it_is():
    problem = constant_problem(21)
    at = np.array([4]), np.array([10])
    own, same = problem.steady(), bound_on(problem, 21)
    assert same.bound_output_tokens == own.bound_output_tokens
    assert same.estimate(RRA, *at).latency_s == own.estimate(RRA, *at).latency_s


def test_fastest_minds_bound_and_memory():
    problem = constant_problem(21)
    e = problem.steady().estimate(RRA, np.full(20, 4), np.arange(1, 21))
    memory = e.memory.total_bytes.max(-1)
    # Less often encoded is slower to start and faster to end: N_D = 20 has the least latency, 1 + 2 s.
    at = fastest(e, 3.5, int(memory.max()))
    assert at == 19
    assert fastest(e, 2.9, int(memory.max())) is None
    assert fastest(e, np.inf, int(memory.min()) - 1) is None


def test_least_margin_is_the_first_that_meets_its_own_sla():
    def served(latency_s, planned_latency_s, fits=True):
        return Served(
            throughput_per_s=1.0, latency_s=latency_s, planned_latency_s=planned_latency_s, fits=fits
        )

    ladder = [served(11, 10.5), None, served(9, 9, fits=False), served(10.5, 9.5), served(10, 9)]
    ladder += [None] * (41 - len(ladder))
    assert least_margin(ladder, 10.0, planned=True) == 3
    assert least_margin(ladder, 10.0, planned=False) == 4
    assert least_margin(ladder, 8.0, planned=False) is None
    assert within(4, 5)
    assert not within(6, 5)
    assert not within(None, 5)


@pytest.fixture(scope="module")
def drifting():
    """A problem under a bound that binds, and its rows."""
    output_pmf, _ = truncated_normal_pmf(12, 5, 30)
    free = Problem(
        model=MODEL,
        profile=tiny_profile(MODEL, tp_sizes=(1,), num_ranks=1),
        cluster=tiny_cluster(1),
        lengths=independent(fixed_pmf(64), output_pmf),
        bound=BoundSpec(),
        baselines=(),
        max_encode_batch_size=48,
    )
    problem = tightened(free_bound(free), 30)
    drifts = [Drift("mean", 0.8), Drift("mean", 1.0), Drift("mean", 1.2), Drift("std", 1.2)]
    return problem, rows_of(problem, drifts)


def free_bound(problem):
    """The problem bound on the latency of its best schedule without a bound."""
    best = best_of(problem)
    assert best is not None
    return replace(problem, bound=BoundSpec(latency_s=best.latency_s))


def test_without_drift_nothing_is_lost(drifting):
    problem, rows = drifting
    row = next(r for r in rows if r.drift.value == 1.0)
    assert (row.margin, row.planned_margin) == (0, 0)
    assert row.old.latency_s == row.old.planned_latency_s <= problem.bound.latency_s
    assert lost(row) == 0
    assert row.adapted.throughput_per_s == row.new.throughput_per_s


def test_the_margin_found_is_enough_and_one_less_is_not(drifting):
    problem, rows = drifting
    row = next(r for r in rows if str(r.drift) == "mean x1.2")
    assert late(row, planned=False) > 0
    assert row.margin > 0
    now = Drifted(problem, row.drift)
    enough, less = (now.serve(best_of(tightened(problem, k))) for k in (row.margin, row.margin - 1))
    assert enough.latency_s <= problem.bound.latency_s < less.latency_s
    # The query that was planned with is shorter than the one now.
    assert row.planned_margin <= row.margin


def test_a_new_schedule_is_best_and_a_new_extent_between(drifting):
    problem, rows = drifting
    for row in rows:
        assert row.new.latency_s <= problem.bound.latency_s
        assert row.adapted.latency_s <= problem.bound.latency_s
        assert row.new.throughput_per_s >= row.adapted.throughput_per_s
        if row.old.meets(problem.bound.latency_s, planned=False):
            assert row.adapted.throughput_per_s >= row.old.throughput_per_s


def test_replayed_margin_is_the_growth_of_latency():
    def row(value, latency_s):
        return Replayed(
            drift=Drift("mean", value),
            steady_per_s=1.0,
            replayed_per_s=1.0,
            steady_latency_s=1.0,
            replayed_latency_s=latency_s,
        )

    found = [row(0.7, 8.0), row(1.0, 10.0), row(1.3, 12.5)]
    assert replayed_margin(found, Drift("mean", 1.3)) == pytest.approx(0.2)
    assert replayed_margin(found, Drift("mean", 0.7)) == 0


@pytest.mark.parametrize(
    ("tokens", "iterations", "cycles"),
    [(1, 5, 1), (2, 5, 1), (6, 5, 1), (7, 5, 2), (292, 98, 3), (311, 98, 4)],
)
def test_cycles_of_a_query(tokens, iterations, cycles):
    assert cycles_of(tokens, iterations) == cycles
