"""Figure 10's arithmetic: the split of a trace, and what is measured in a replay."""

from dataclasses import replace

import numpy as np
import pytest
from paper.real_lengths_claims import winners_claim
from paper.real_lengths_data import Trace, split
from paper.real_lengths_outcomes import Outcome, without_tail
from paper.real_lengths_replay import PROBES, Replayed, measured, replay_best, with_bound_length
from synthetic import constant_profile, tiny_cluster, tiny_model

from exegpt.events import RequestRecord
from exegpt.scheduler.pipelines import make_pipeline
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.simulator.choice import Choice
from exegpt.specs import BoundSpec, Policy
from exegpt.workload.lengths import joint
from exegpt.workload.requests import sample_requests

TRACE = Trace(name="made", file="made.csv", stands_for="WMT", max_input=90, max_output=40)


def pairs(count, seed=1):
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.integers(1, 100, count), rng.integers(1, 50, count)])


def test_split_drops_what_is_too_long_and_parts_the_rest():
    given = pairs(1000)
    found = split(TRACE, given)
    kept = given[(given[:, 0] <= 90) & (given[:, 1] <= 40)]
    assert 0 < len(kept) < len(given)
    assert (found.num_pairs, found.num_dropped) == (1000, 1000 - len(kept))
    assert len(found.planned.pairs) == round(len(kept) / 10)
    together = np.concatenate([found.planned.pairs, found.served.pairs])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, kept.tolist()))
    again = split(TRACE, given)
    assert np.array_equal(again.planned.pairs, found.planned.pairs)
    # At random, not the first ones.
    assert not np.array_equal(found.planned.pairs, kept[: len(found.planned.pairs)])


def record(index, start_s, token_s):
    return RequestRecord(index, 10, encode_start_s=start_s, token_s=list(token_s))


def test_throughput_and_latency_behind_the_warm_up():
    # A query starts every second, and its two tokens are there 3 and 4 s after; one in five has three.
    records = [record(i, i, [i + 3.0, i + 4.0, *([i + 6.0] if i % 5 == 0 else [])]) for i in range(30)]
    # In the warm-up all is slow; it is not to be seen.
    records[0] = record(0, 0.0, [90.0, 100.0, 110.0])
    exact = measured([records], 5, 3, 5.5, shorter_too=False)
    assert exact.throughput_per_s == pytest.approx(1.0)
    assert exact.latency_s == pytest.approx(6.0)
    assert exact.in_time == 0.0
    worst = measured([records, records], 5, 2, 4.5, shorter_too=True)
    assert worst.throughput_per_s == pytest.approx(2.0)
    assert (worst.latency_s, worst.in_time) == (pytest.approx(4.0), 1.0)
    both = measured([records], 5, 3, 5.5, shorter_too=True)
    assert both.latency_s == pytest.approx(6.0)
    assert 0.5 < both.in_time < 1.0


def test_queries_about_the_99th_percentile_get_its_length():
    lengths = joint(np.column_stack([np.full(1000, 7), np.arange(1, 1001)]))
    requests = sample_requests(lengths, 4000, np.random.default_rng(3))
    changed = with_bound_length(requests, lengths, 991)
    moved = [r for r, c in zip(requests, changed, strict=True) if r != c]
    low, high = (1000 * q for q in PROBES)
    assert moved
    assert all(low <= r.max_output_tokens <= high for r in moved)
    assert sum(r.forced_output_tokens == 991 for r in changed) == pytest.approx(
        4000 * (high - low) / 1000, rel=0.3
    )
    assert [r.input_tokens for r in changed] == [r.input_tokens for r in requests]


@pytest.mark.parametrize("policy", [Policy.RRA, Policy.STATIC])
def test_a_replay_on_the_planned_lengths_is_the_closed_form(policy):
    """With constant stage times and outputs of one length nothing is left to chance."""
    model = tiny_model()
    lengths = joint(np.column_stack([np.full(10, 16), np.full(10, 21)]))
    problem = Problem(
        model=model,
        profile=constant_profile(model, 1.0, 0.1),
        cluster=tiny_cluster(1),
        lengths=lengths,
        bound=BoundSpec(),
        baselines=(),
    )
    choice = Choice(policy=policy, stages=make_pipeline((1,), (8,)), num_micro_batches=1)
    at = np.array([4]), np.array([10 if policy is Policy.RRA else 1])
    best = Best.of(choice, 4, int(at[1][0]), problem.steady().estimate(choice, *at))
    found = replay_best(problem, best, lengths, best.latency_s + 1e-6)
    assert found.throughput_per_s == pytest.approx(best.throughput_per_s, rel=1e-3)
    assert found.latency_s == pytest.approx(best.latency_s)
    assert found.in_time == 1.0


def outcome(stands_for, **rates):
    """An outcome with throughputs, planned as replayed."""
    template = Best(
        choice=None,
        batch=1,
        extent=1,
        score=0.0,
        throughput_per_s=1.0,
        latency_s=1.0,
        ttft_s=1.0,
        tpot_s=1.0,
        decode_batch_size=1.0,
        memory_bytes=(),
    )
    seen = {n: Replayed(throughput_per_s=x, latency_s=1.0, in_time=1.0) for n, x in rates.items()}
    return Outcome(
        split=replace(split(TRACE, pairs(100)), trace=replace(TRACE, stands_for=stands_for)),
        model="m",
        bound="medium",
        bound_s=2.0,
        best={n: replace(template, throughput_per_s=x) for n, x in rates.items()},
        replayed=seen,
        expected_s=dict.fromkeys(rates, 1.0),
        unlimited=Replayed(throughput_per_s=rates["STATIC"] / 2, latency_s=1.0, in_time=1.0),
        least_waa_s=None if "WAA" in rates else 3.0,
    )


def test_gains_are_of_what_was_planned_to_be_better():
    found = outcome("WMT", RRA=6.0, WAA=8.0, STATIC=2.0)
    assert (found.gain, found.planned_gain, found.unlimited_gain) == (4.0, 4.0, 8.0)
    served = {**found.replayed, "RRA": replace(found.replayed["RRA"], throughput_per_s=9.0)}
    other = replace(found, replayed=served)
    assert (other.chosen, other.winner) == ("WAA", "RRA")
    assert other.gain == 4.0


def test_winners_need_the_papers_policy_in_most_scenarios():
    waa, rra = {"RRA": 1.0, "WAA": 2.0, "STATIC": 1.0}, {"RRA": 2.0, "STATIC": 1.0}
    papers = [outcome("WMT", **waa), outcome("CNN/DailyMail", **waa), outcome("Alpaca", **rra)]
    assert winners_claim(papers).agrees
    assert not winners_claim([*papers, outcome("WMT", **rra)]).agrees
    assert not winners_claim([outcome("Alpaca", **waa)]).agrees
    assert "3.00 s at least, the bound is 2.00 s" in winners_claim(papers).why


def test_without_its_tail_no_output_is_beyond_so_many_means():
    lengths = joint(np.column_stack([np.full(100, 7), np.concatenate([np.full(98, 10), [100, 200]])]))
    cut = without_tail(lengths)
    assert cut.max_output == round(2.5 * lengths.mean_output)
    assert cut.output_pmf[:11] == pytest.approx(lengths.output_pmf[:11])
