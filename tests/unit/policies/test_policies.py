"""Policies and their books: no page given twice, nobody lost, micro-batches even."""

from itertools import islice

import numpy as np
import pytest

from exegpt.errors import CapacityError
from exegpt.policies.admission import admit, deal
from exegpt.policies.base import Query, Step
from exegpt.policies.pool import Pool
from exegpt.policies.rra import RRA
from exegpt.policies.static import Static


def pool_with(queries, *, m=1, pages=100, page_size=4):
    pool = Pool(num_micro_batches=m, num_pages=pages, page_size=page_size)
    for i, (inputs, outputs) in enumerate(queries):
        pool.arrive(Query(i, inputs, outputs))
    return pool


def test_deal_is_even_and_keeps_order():
    assert deal(range(5), [0, 0]) == ((0, 2, 4), (1, 3))
    assert deal(range(3), [2, 0, 1]) == ((), (0, 1), (2,))
    sizes = np.array([3, 1, 0, 2])
    dealt = deal(range(50), sizes.tolist())
    loads = sizes + [len(d) for d in dealt]
    assert loads.max() - loads.min() <= 1


def test_rra_takes_a_batch_and_what_fits():
    step = RRA(3, 5).next_step(pool_with([(4, 9)] * 5, m=2))
    assert step == Step(((0, 2), (1,)), 5)
    # Four input tokens and five iterations are nine cached tokens: three pages each.
    step = RRA(3, 5).next_step(pool_with([(4, 9)] * 5, pages=7))
    assert step.encode == ((0, 1),)
    assert RRA(3, 5).next_step(pool_with([])) is None


def test_rra_shortens_a_phase_that_pages_do_not_last_for():
    pool = pool_with([(4, 40)] * 2, pages=12)
    pool.begin(Step(((0, 1),), 1))
    step = RRA(2, 30).next_step(pool)
    # Six pages each hold 24 tokens, of which four are input.
    assert (step.num_encoded, step.decode_iterations, step.preempt) == (0, 20, ())


def test_static_waits_for_its_batch():
    pool = pool_with([(4, 9), (4, 3), (4, 5)])
    first = Static(2).next_step(pool)
    assert (first.encode, first.decode_iterations, first.keep_finished) == (((0, 1),), 10, True)
    pool.begin(first)
    assert Static(2).next_step(pool).num_encoded == 0
    for query_id in (0, 1):
        pool.receive(query_id, finished=True)
    assert pool.compact(0) == [0, 1]
    assert Static(2).next_step(pool).encode == ((2,),)


def test_finished_rows_stay_until_the_last_one_if_kept():
    pool = pool_with([(4, 9), (4, 3)])
    pool.begin(Step(((0, 1),), 5, keep_finished=True))
    assert pool.receive(1, finished=True)
    assert pool.compact(0) == []
    assert not pool.receive(1, finished=False), "a finished row's tokens are not its answer's"
    assert pool.receive(0, finished=True)
    assert sorted(pool.compact(0)) == [0, 1]


def test_put_back_with_what_it_had_said():
    pool = pool_with([(4, 9), (4, 9)])
    pool.begin(Step(((0, 1),), 5))
    for _ in range(3):
        pool.receive(1, finished=False)
    pool.begin(Step(((),), 1, preempt=(1,)))
    assert list(pool.waiting) == [Query(1, 7, 6)]
    assert pool.members == [[0]]


def test_a_query_that_never_fits_is_refused():
    with pytest.raises(CapacityError, match="30 input and up to 20 output tokens need 13 K/V pages"):
        pool_with([(30, 20)], pages=12)


@pytest.mark.parametrize("seed", range(60))
def test_pages_are_never_over_committed(seed):
    rng = np.random.default_rng(seed)
    page_size, pages, m = int(rng.integers(1, 8)), int(rng.integers(20, 60)), int(rng.integers(1, 4))
    machine = RRA(int(rng.integers(1, 9)), int(rng.integers(1, 12)))
    pool = Pool(num_micro_batches=m, num_pages=pages, page_size=page_size)
    lengths, generated = {}, {}
    for i in range(40):
        inputs, outputs = int(rng.integers(1, 12)), int(rng.integers(1, 9))
        lengths[i], generated[i] = (inputs, int(rng.integers(1, outputs + 1))), 0
        pool.arrive(Query(i, inputs, outputs))
    done = []
    for _ in range(2000):
        step = machine.next_step(pool)
        if step is None:
            break
        pool.begin(step)
        for _ in range(step.decode_iterations + 1):
            # One token for everyone active: what an iteration caches before it leaves the pipeline.
            held = 0
            for ids in list(pool.members):
                for query_id in ids:
                    held += -(-(lengths[query_id][0] + generated[query_id]) // page_size)
            assert held <= pages
            for index, ids in enumerate(list(pool.members)):
                for query_id in list(ids):
                    generated[query_id] += 1
                    pool.receive(query_id, finished=generated[query_id] >= lengths[query_id][1])
                done += pool.compact(index)
    assert sorted(done) == list(range(40))
    assert not pool.num_active
    assert not pool.waiting


def test_admission_looks_no_further_than_the_queue():
    pool = pool_with([(4, 9)] * 3)
    assert admit(pool, 10, 2).num_queries == 3
    assert [q.id for q in islice(pool.waiting, 3)] == [0, 1, 2]
