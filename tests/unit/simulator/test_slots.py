"""A slot's work by enumeration, and what follows for latency against the probes of a replay."""

import numpy as np
import pytest
import synthetic

from exegpt.policies.chunked import Chunked
from exegpt.policies.iteration import Iteration
from exegpt.simulator.choice import Choice
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.fluctuation import slots_spread
from exegpt.simulator.placement import make_stages
from exegpt.simulator.replay import replay
from exegpt.simulator.slots import window_work
from exegpt.simulator.steady import SteadyState
from exegpt.specs import Policy
from exegpt.workload.lengths import independent, joint
from exegpt.workload.pmf import truncated_normal_pmf
from exegpt.workload.requests import sample_requests, with_probes

MODEL = synthetic.tiny_model()
PROFILE = synthetic.tiny_profile(MODEL)
PAIRS = joint(np.array([[3, 1], [5, 2], [4, 4], [9, 4], [11, 7], [20, 9], [2, 9]]))
S = independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0])


def windows(left, query=None, at=0):
    """(probability, work) of every course of the `left` turns from position `at` of a query on."""
    if left == 0:
        yield 1.0, np.zeros(3)
        return
    if query is None:
        for pair in PAIRS.pairs:
            for p, work in windows(left, tuple(pair)):
                yield p / len(PAIRS.pairs), work
        return
    tokens, turns = query
    now = np.array([1.0, tokens, 0.0]) if at == 0 else np.array([0.0, 0.0, tokens + at])
    following = (query, at + 1) if at + 1 < turns else (None, 0)
    for p, work in windows(left - 1, *following):
        yield p, now + work


@pytest.mark.parametrize("num_turns", [1, 2, 3, 5])
def test_window_by_enumeration(num_turns):
    # A query of S tokens holds its slot for S turns; the window begins at any of them.
    states = [(tuple(pair), at) for pair in PAIRS.pairs for at in range(pair[1])]
    courses = [(p / len(states), work) for query, at in states for p, work in windows(num_turns, query, at)]
    p, work = np.array([p for p, _ in courses]), np.array([w for _, w in courses])
    assert p.sum() == pytest.approx(1)
    mean = p @ work
    covariance = (work * p[:, None]).T @ work - np.outer(mean, mean)
    found = window_work(SteadyState(MODEL, PROFILE, PAIRS), num_turns)
    assert found.mean == pytest.approx(mean, rel=1e-9)
    assert found.covariance == pytest.approx(covariance, rel=1e-9, abs=1e-9)


def test_a_long_window_brings_as_much_as_lengths_say():
    serving = SteadyState(MODEL, PROFILE, S)
    found = window_work(serving, 300)
    joins = 300 / (serving.completion.mean_iterations + 1)
    contexts = float(serving.completion.token_tails[1].sum())
    assert found.mean == pytest.approx(joins * np.array([1, S.mean_input, contexts]), rel=1e-9)
    # Renewal theory: the number that joins gains var(T) / E[T]^3 of variance per turn in the long run.
    later = window_work(serving, 400).covariance[0, 0] - found.covariance[0, 0]
    variance = S.std_output**2 * 100 / (serving.completion.mean_iterations + 1) ** 3
    assert later == pytest.approx(variance, rel=1e-3)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("policy", "slots", "budget", "m", "counts", "costs"),
    [
        (Policy.ITERATION, 12, 1, 1, (8,), {}),
        (Policy.CHUNKED, 44, 512, 1, (8,), {}),
        (Policy.ITERATION, 78, 1, 2, (4, 4), {}),
        (Policy.CHUNKED, 12, 128, 1, (8,), {}),
        (Policy.ITERATION, 31, 1, 1, (8,), {"head_s": 8e-3}),
        (Policy.ITERATION, 51, 1, 1, (8,), {"overhead_s": 2e-3, "linear_s": 1e-4}),
        (Policy.CHUNKED, 32, 1024, 1, (8,), {"head_s": 8e-3}),
    ],
)
def test_spread_is_that_of_probes(policy, slots, budget, m, counts, costs):
    profile, stages, share, total = (
        synthetic.tiny_profile(MODEL, **costs),
        make_stages(counts, 1),
        1 / 60,
        4000,
    )
    steady = SteadyState(MODEL, profile, S)
    tokens = steady.bound_output_tokens
    machine = Iteration(slots) if policy is Policy.ITERATION else Chunked(slots, budget)
    found = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        requests = sample_requests(S, total, rng)
        probed = with_probes(requests, round(total * share), tokens, rng)
        ids = {new.id for new, old in zip(probed, requests, strict=True) if new is not old}
        shapes = StageCosts(profile, MODEL, stage_shapes(stages))
        done = replay(machine, shapes, probed, num_micro_batches=m, num_pages=10**7, page_size=16)
        middle = range(total // 8, total - total // 8)
        found += [r.finish_s - r.encode_start_s for r in done.records if r.id in ids and r.id in middle]
    choice = Choice(policy=policy, stages=stages, num_micro_batches=m)
    e = steady.estimate(choice, np.array([slots]), np.array([budget]))
    work = window_work(steady, steady.completion.iterations_of(tokens) + 1)
    spread = slots_spread(steady, choice, e, work)
    # A deviation of 90 values is itself known to 1 / sqrt(2 n), 8 %.
    assert len(found) > 90
    assert 0.8 < spread.std_s[0] / np.std(found) < 1.3
