"""Frontiers known step by step: what a few answers settle, and what they leave open."""

import math

import numpy as np
import pytest

from exegpt.scheduler.result import Best
from exegpt.scheduler.staircase import Curve, Refinement, best_of, least_bound_s
from exegpt.simulator.choice import Choice
from exegpt.simulator.placement import make_stages
from exegpt.specs import Policy

CHOICE = Choice(policy=Policy.RRA, stages=make_stages((8,), 1), num_micro_batches=1)


def candidate(latency_s, throughput, worst=None):
    return Best(
        choice=CHOICE,
        batch=1,
        extent=1,
        score=throughput,
        throughput_per_s=throughput,
        latency_s=latency_s,
        ttft_s=0.1,
        tpot_s=0.1,
        decode_batch_size=1.0,
        memory_bytes=(1,),
        worst=worst,
    )


def random_steps(seed, count=60):
    """(latency, throughput) of random candidates; many are beaten by others in both."""
    rng = np.random.default_rng(seed)
    return list(zip(rng.uniform(0.5, 20, count).tolist(), rng.uniform(0.1, 9, count).tolist(), strict=True))


def optimum(steps, bound_s):
    return max((rate for latency_s, rate in steps if latency_s <= bound_s), default=0.0)


def staircase(steps):
    """The candidates that no other beats, by rising latency."""
    return sorted(s for s in steps if not any(o[0] <= s[0] and o[1] >= s[1] and o != s for o in steps))


class CountedSearch:
    """Exact searches over candidates, with the bounds that were asked for."""

    def __init__(self, steps):
        self.steps = steps
        self.bounds = []

    def __call__(self, bound_s, objective):
        if objective == "latency_s":
            latency_s, rate = min(self.steps, default=(None, None))
            return None if latency_s is None else candidate(latency_s, rate)
        self.bounds.append(bound_s)
        found = [(rate, -latency_s) for latency_s, rate in self.steps if latency_s <= bound_s]
        return candidate(-max(found)[1], max(found)[0]) if found else None


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_those_of_a_search_each(seed):
    steps = random_steps(seed)
    search = CountedSearch(steps)
    curve = Curve(search)
    bounds = np.random.default_rng(seed).uniform(0.2, 25, 200).tolist()
    for bound_s in bounds:
        answer = curve.at(bound_s)
        assert (answer.throughput_per_s if answer else 0.0) == optimum(steps, bound_s)
    assert len(search.bounds) < len(bounds) / 2
    assert [b.throughput_per_s for b in curve.answers()] == sorted(
        {optimum(steps, bound_s) for bound_s in bounds} - {0.0}
    )


def test_a_tighter_bound_that_the_answer_meets_is_not_searched():
    search = CountedSearch([(1.0, 1.0), (4.0, 2.0)])
    curve = Curve(search)
    assert curve.at(math.inf).throughput_per_s == 2.0
    assert curve.at(4.0).throughput_per_s == 2.0
    assert search.bounds == [math.inf]
    assert curve.at(3.9).throughput_per_s == 1.0
    assert curve.at(2.0).throughput_per_s == 1.0
    assert curve.at(0.9) is None
    assert search.bounds == [math.inf, 3.9]


def test_what_meets_a_tighter_bound_is_never_lost():
    """A search that rounds its own answer out of a bound that it just meets."""

    def search(bound_s, objective):
        if objective == "latency_s" or bound_s >= 2.0:
            return candidate(2.0, 5.0)
        return None

    assert Curve(search).at(2.0).throughput_per_s == 5.0
    rounding = Curve(lambda bound_s, objective: candidate(1.0, 5.0) if objective == "latency_s" else None)
    assert rounding.at(1.0).throughput_per_s == 5.0


def refined(steps, num_bounds):
    curve = Curve(CountedSearch(steps))
    refinement = Refinement(curve.at)
    refinement.add(least_bound_s(curve.fastest))
    refinement.add(math.inf)
    while refinement.num_bounds < num_bounds and (bound_s := refinement.next_bound_s()) is not None:
        refinement.add(bound_s)
    return refinement


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_bounds", [2, 3, 6, 12])
def test_points_hold_what_they_say(seed, num_bounds):
    steps = random_steps(seed)
    refinement = refined(steps, num_bounds)
    points = refinement.points()
    assert len(points) <= num_bounds
    for point in points:
        for bound_s in (point.best.latency_s, min(point.bound_s, 1e9)):
            assert optimum(steps, bound_s) == point.best.throughput_per_s
    # Taking the best point that meets a bound never loses more than the gap.
    for bound_s in np.geomspace(points[0].best.latency_s, 30, 300).tolist():
        best = max(p.best.throughput_per_s for p in points if p.best.latency_s <= bound_s)
        assert best >= optimum(steps, bound_s) * (1 - refinement.gap()) - 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_enough_bounds_give_every_step(seed):
    steps = random_steps(seed)
    refinement = refined(steps, 10_000)
    assert refinement.next_bound_s() is None
    assert refinement.gap() == 0.0
    # ln(20 / 0.5), halved nine times, is below ln(1.01); then once just under the step.
    assert refinement.num_bounds < 12 * len(staircase(steps))
    assert [(p.best.latency_s, p.best.throughput_per_s) for p in refinement.points()] == staircase(steps)


def test_gap_by_hand():
    refinement = refined([(1.0, 1.0), (2.0, 3.0), (4.0, 4.0)], 2)
    # Between 1 s and 4 s anything from 1 to 4 a second may be possible.
    assert refinement.gap() == pytest.approx(0.75)
    assert refinement.next_bound_s() == pytest.approx(2.0)
    refinement.add(2.0)
    # Left are 1 s to 2 s with 1 to 3 a second, and 2 s to 4 s with 3 to 4: 2/3 and 1/4.
    assert refinement.gap() == pytest.approx(2 / 3)
    assert refinement.next_bound_s() == pytest.approx(math.sqrt(2))


def test_with_margins_the_worst_latency_meets_the_bound():
    assert least_bound_s(candidate(1.0, 5.0, worst={"latency_s": 1.4, "memory": 1.0})) == 1.4
    assert least_bound_s(candidate(1.0, 5.0)) == 1.0


def test_ties_go_to_the_lower_latency():
    assert best_of([None, candidate(2.0, 5.0), candidate(1.0, 5.0)]).latency_s == 1.0
    assert best_of([None]) is None
