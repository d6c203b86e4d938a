"""Timelines worked out by hand."""

import numpy as np
import pytest
import synthetic

from exegpt.policies.rra import RRA
from exegpt.policies.static import Static
from exegpt.simulator.costs import stage_shapes
from exegpt.simulator.pipeline import cycle_s, finish_s, period_s, phase_s
from exegpt.simulator.placement import make_stages
from exegpt.simulator.replay import replay
from exegpt.workload.requests import Request, poisson_arrivals


class HandCosts:
    """Two stages: encoding takes 4 and 2 s a micro-batch, a decode iteration 1 and 3 s."""

    stages = stage_shapes(make_stages((4, 4), 1))

    def encode_one_s(self, queries, tokens, rms_tokens):
        return [4.0, 2.0]

    def decode_one_s(self, queries, context_tokens, input_tokens):
        return [1.0, 3.0]


def request(i, output, arrival=0.0):
    return Request(
        id=i, input_tokens=5, max_output_tokens=output, forced_output_tokens=output, arrival_s=arrival
    )


def run(machine, requests, m=2, pages=1000):
    return replay(machine, HandCosts(), requests, num_micro_batches=m, num_pages=pages, page_size=4)


def test_two_stages_two_micro_batches_event_by_event():
    # Queries 0, 2 in micro-batch 0 and 1, 3 in micro-batch 1; query 4 comes with the next cycle.
    result = run(RRA(4, 2), [request(0, 1), request(1, 3), request(2, 3), request(3, 2), request(4, 2)])
    seen = [
        (e.stage, e.phase, e.cycle, e.iteration, e.micro_batch, e.num_queries, e.start_s, e.end_s)
        for e in result.events
    ]
    assert sorted(seen, key=lambda e: (e[0], e[6])) == [
        # Stage 0: encode both, then decode when the tokens are back from stage 1.
        (0, "encode", 0, 0, 0, 2, 0.0, 4.0),
        (0, "encode", 0, 0, 1, 2, 4.0, 8.0),
        (0, "decode", 0, 1, 0, 1, 8.0, 9.0),  # query 0 ended with its first token, at 6
        (0, "decode", 0, 1, 1, 2, 10.0, 11.0),  # its tokens come at 10
        (0, "decode", 0, 2, 0, 1, 13.0, 14.0),  # back from stage 1 at 13
        (0, "decode", 0, 2, 1, 1, 16.0, 17.0),  # query 3 ended with its second token, at 16
        # Cycle 1: query 4 joins micro-batch 0; both still hold a query whose last token is under way.
        (0, "encode", 1, 0, 0, 1, 17.0, 21.0),
        (0, "decode", 1, 1, 0, 1, 24.0, 25.0),  # stage 1 encoded query 4 from 22 to 24
        # Stage 1.
        (1, "encode", 0, 0, 0, 2, 4.0, 6.0),
        (1, "encode", 0, 0, 1, 2, 8.0, 10.0),
        (1, "decode", 0, 1, 0, 1, 10.0, 13.0),
        (1, "decode", 0, 1, 1, 2, 13.0, 16.0),
        (1, "decode", 0, 2, 0, 1, 16.0, 19.0),
        (1, "decode", 0, 2, 1, 1, 19.0, 22.0),
        (1, "encode", 1, 0, 0, 1, 22.0, 24.0),
        (1, "decode", 1, 1, 0, 1, 25.0, 28.0),
    ]
    finish = {r.id: r.finish_s for r in result.records}
    assert finish == {0: 6.0, 1: 22.0, 2: 19.0, 3: 16.0, 4: 28.0}


def test_static_computes_finished_rows_until_the_longest_ends():
    result = run(Static(2), [request(0, 1), request(1, 3), request(2, 1)], m=1)
    rows = [(e.phase, e.iteration, e.num_queries) for e in result.events if e.stage == 0]
    assert rows == [("encode", 0, 2), ("decode", 1, 2), ("decode", 2, 2), ("encode", 0, 1)]
    assert [r.output_tokens for r in result.records] == [1, 3, 1]


def test_nothing_starts_before_it_arrives():
    rng = np.random.default_rng(0)
    times = poisson_arrivals(0.1, 30, rng)
    result = run(RRA(3, 2), [request(i, 1 + i % 5, float(t)) for i, t in enumerate(times)])
    assert all(r.encode_start_s >= r.arrival_s for r in result.records)
    assert all(r.output_tokens == 1 + r.id % 5 for r in result.records)


def test_a_query_that_never_fits_fails_alone():
    big = Request(id=1, input_tokens=400, max_output_tokens=10, forced_output_tokens=10)
    result = run(RRA(2, 2), [request(0, 3), big, request(2, 3)], pages=20)
    assert [r.status for r in result.records] == ["ok", "failed", "ok"]
    assert "400 input" in result.records[1].error
    assert [r.output_tokens for r in result.records] == [3, 0, 3]


def test_few_pages_lose_no_token():
    requests = [
        Request(id=i, input_tokens=3 + i % 4, max_output_tokens=40, forced_output_tokens=1 + (7 * i) % 40)
        for i in range(40)
    ]
    result = run(RRA(6, 8), requests, pages=24)
    assert [r.output_tokens for r in result.records] == [1 + (7 * i) % 40 for i in range(40)]
    assert sum(e.num_queries for e in result.events if e.phase == "encode" and e.stage == 0) > 40


def test_papers_micro_batch_example():
    # Paper, figure 4(b) and (c): one encode and three decode GPUs, two tokens, equal stages of time 1.
    # Without micro-batches 1 + 2 * 3 = 7; with three of a third of the time, 3 2/3.
    stages = np.ones(3)
    assert phase_s(stages, 1) + period_s(stages, 1) + 1 == pytest.approx(7)
    third = stages / 3
    assert 1 + phase_s(third, 3) + period_s(third, 3) == pytest.approx(3 + 2 / 3)


def test_one_stage_cycle_is_the_sum_of_its_jobs():
    encode, decode = np.array([3.0]), np.array([[1.0], [2.0], [0.5]])
    assert cycle_s(encode, decode, 1) == pytest.approx(6.5)
    assert finish_s(encode, decode, 1).tolist() == pytest.approx([4.0, 6.0, 6.5])
    assert cycle_s(encode, decode, 4) == pytest.approx(26.0)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_cycle_rises_with_every_stage_time_and_iteration(m, num_stages):
    rng = np.random.default_rng(m * 10 + num_stages)
    for _ in range(30):
        encode = rng.exponential(size=num_stages) * 5
        decode = rng.exponential(size=(rng.integers(1, 6), num_stages))
        before = cycle_s(encode, decode, m)
        more = decode * (1 + rng.exponential(size=decode.shape) * (rng.random(decode.shape) < 0.3))
        assert cycle_s(encode * (1 + rng.random(num_stages)), more, m) >= before * (1 - 1e-12)
        longer = np.concatenate([decode, rng.exponential(size=(1, num_stages))])
        assert cycle_s(encode, longer, m) >= before * (1 - 1e-12)
        assert before >= (m * (encode + decode.sum(0))).max() * (1 - 1e-12)


def test_synthetic_profile_covers_what_the_tests_ask():
    profile = synthetic.tiny_profile(synthetic.tiny_model())
    assert profile.layers[1].decode_overhead.limit() == 1024
