"""Continuous batching and the hybrid static baseline: who joins when, and no page given twice."""

import numpy as np
import pytest
import synthetic

from exegpt.errors import ConfigError
from exegpt.policies.base import Query, Step
from exegpt.policies.chunked import Chunked
from exegpt.policies.iteration import Iteration, slots_of
from exegpt.policies.pool import Pool
from exegpt.policies.static_hybrid import StaticHybrid
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.mixed import chunk_attention_s
from exegpt.simulator.placement import make_stages
from exegpt.simulator.replay import replay
from exegpt.workload.requests import Request, poisson_arrivals

MODEL = synthetic.tiny_model()
PHASES = ("encode", "decode")
PROFILE = synthetic.tiny_profile(MODEL)


class HandCosts:
    """Two stages: encoding takes 4 and 2 s a micro-batch, a decode iteration 1 and 3 s."""

    stages = stage_shapes(make_stages((4, 4), 1))

    def encode_one_s(self, queries, tokens, rms_tokens):
        return [4.0, 2.0]

    def decode_one_s(self, queries, context_tokens, input_tokens):
        return [1.0, 3.0]


def pool_with(queries, *, m=1, pages=100, page_size=4):
    pool = Pool(num_micro_batches=m, num_pages=pages, page_size=page_size)
    for i, (inputs, outputs) in enumerate(queries):
        pool.arrive(Query(i, inputs, outputs))
    return pool


def request(i, output, arrival=0.0, inputs=5):
    return Request(
        id=i, input_tokens=inputs, max_output_tokens=output, forced_output_tokens=output, arrival_s=arrival
    )


def test_slots_are_dealt_evenly():
    assert [slots_of(7, 3, k) for k in range(3)] == [3, 2, 2]


def test_iteration_fills_the_free_slots_of_one_micro_batch():
    pool = pool_with([(4, 9)] * 9, m=2)
    step = Iteration(6).next_turn(pool, 1)
    assert step == Step(((), (0, 1, 2)), 1)
    pool.begin(step)
    pool.receive(1, finished=True)
    assert pool.compact(1) == [1]
    assert Iteration(6).next_turn(pool, 1).encode == ((), (3,))
    assert Iteration(6).next_turn(pool_with([]), 0) is None


def test_chunks_fill_what_decoding_leaves_of_the_budget():
    pool = pool_with([(6, 9), (6, 9), (6, 9)])
    machine = Chunked(3, 8)
    first = machine.next_turn(pool, 0)
    assert (first.encode, first.chunks) == (((0, 1),), ((0, 6), (1, 2)))
    pool.begin(first)
    assert pool.decoding(0) == [0]
    pool.receive(0, finished=False)
    second = machine.next_turn(pool, 0)
    # One row decodes, so seven tokens are left: four for the second prompt, three for the third.
    assert (second.encode, second.chunks) == (((2,),), ((1, 4), (2, 3)))
    pool.begin(second)
    assert pool.partly_encoded(0) == [(2, 3)]


def test_rows_are_decoded_even_beyond_the_budget():
    pool = pool_with([(1, 9)] * 3)
    pool.begin(Step(((0, 1, 2),), 1))
    step = Chunked(3, 2).next_turn(pool, 0)
    assert (step.encode, step.chunks) == (((),), ())


def test_hybrid_encodes_in_parts():
    pool = pool_with([(4, 9)] * 8, m=2)
    step = StaticHybrid(8, 4).next_step(pool)
    assert list(step.encode_parts()) == [(0, (0, 4)), (0, (2, 6)), (1, (1, 5)), (1, (3, 7))]
    with pytest.raises(ConfigError, match="encode_micro_batches=3 must be a multiple of num_micro_batches=2"):
        StaticHybrid(8, 3).next_step(pool)


def test_iteration_turns_event_by_event():
    requests = [request(0, 2), request(1, 3), request(2, 2)]
    result = replay(Iteration(2), HandCosts(), requests, num_micro_batches=2, num_pages=1000, page_size=4)
    seen = [(e.stage, e.phase, e.micro_batch, e.start_s, e.end_s) for e in result.events]
    assert sorted(seen, key=lambda e: (e[0], e[3])) == [
        (0, "encode", 0, 0.0, 4.0),
        (0, "encode", 1, 4.0, 8.0),
        (0, "decode", 0, 8.0, 9.0),  # query 0's first token came at 6
        (0, "decode", 1, 10.0, 11.0),  # query 1's came at 10
        (0, "encode", 0, 13.0, 17.0),  # query 0 ended at 13, and 2 takes its slot
        (0, "decode", 1, 17.0, 18.0),  # query 1's second token came at 16
        (0, "decode", 0, 19.0, 20.0),
        (1, "encode", 0, 4.0, 6.0),
        (1, "encode", 1, 8.0, 10.0),
        (1, "decode", 0, 10.0, 13.0),
        (1, "decode", 1, 13.0, 16.0),
        (1, "encode", 0, 17.0, 19.0),
        (1, "decode", 1, 19.0, 22.0),
        (1, "decode", 0, 22.0, 25.0),
    ]
    assert {r.id: r.finish_s for r in result.records} == {0: 13.0, 1: 22.0, 2: 25.0}


def machines():
    return {"iteration": Iteration(6), "chunked": Chunked(6, 24), "hybrid": StaticHybrid(6, 4)}


@pytest.mark.parametrize("arrival", ["closed", "poisson", "bursts"])
@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("pages", [1000, 26])
def test_no_token_is_lost_whatever_the_arrivals_and_pages(name, arrival, pages):
    rng = np.random.default_rng(3)
    times = {
        "closed": np.zeros(60),
        "poisson": poisson_arrivals(20.0, 60, rng),
        "bursts": np.repeat([0.0, 1.0, 50.0], 20),
    }[arrival]
    requests = [request(i, 1 + (7 * i) % 40, float(t), inputs=1 + (11 * i) % 50) for i, t in enumerate(times)]
    costs = StageCosts(PROFILE, MODEL, stage_shapes(make_stages((4, 4), 1)))
    result = replay(machines()[name], costs, requests, num_micro_batches=2, num_pages=pages, page_size=4)
    assert [r.status for r in result.records] == ["ok"] * 60
    assert [r.output_tokens for r in result.records] == [1 + (7 * i) % 40 for i in range(60)]
    for record in result.records:
        assert record.arrival_s <= record.encode_start_s < record.first_token_s
        assert record.token_s == sorted(record.token_s)
    if pages == 1000 and name == "iteration":
        # Nothing is put back: every prompt is encoded once, and every further token decoded once.
        counts = {
            p: sum(e.num_queries for e in result.events if e.phase == p and not e.stage) for p in PHASES
        }
        assert counts == {"encode": 60, "decode": sum(r.output_tokens - 1 for r in result.records)}


@pytest.mark.parametrize("name", ["iteration", "chunked"])
def test_turns_never_exceed_slots_or_budget(name):
    requests = [request(i, 1 + (7 * i) % 40, inputs=1 + (11 * i) % 50) for i in range(80)]
    costs = StageCosts(PROFILE, MODEL, stage_shapes(make_stages((4, 4), 1)))
    result = replay(machines()[name], costs, requests, num_micro_batches=2, num_pages=1000, page_size=4)
    assert max(e.num_queries for e in result.events) <= 3
    start = {e.cycle: e.start_s for e in result.events if e.phase == "mixed" and not e.stage}
    assert (len(start) > 20) == (name == "chunked")


def test_a_split_prompt_costs_the_attention_of_a_whole_one():
    grid = PROFILE.layers[1].encode_attention
    whole = chunk_attention_s(grid, [(0, 300)])
    parts = [chunk_attention_s(grid, [part]) for part in ((0, 100), (100, 220), (220, 300))]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)
    assert chunk_attention_s(grid, [(0, 100)] * 9) == pytest.approx(9 * chunk_attention_s(grid, [(0, 100)]))
