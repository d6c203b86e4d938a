"""K/V pages are counted as tokens come; the count is that of counting all queries anew."""

from __future__ import annotations

import numpy as np
import pytest

from exegpt.policies.base import Query
from exegpt.policies.decode_side import DecodeSide
from exegpt.policies.iteration import Iteration
from exegpt.policies.pool import Pool


def cached(query, generated, start_token):
    """Prompt and tokens whose K/V exists after the next iteration; a query's last token is never cached."""
    return query.input_tokens + min(generated + 1, max(query.max_output_tokens - 1, 0) + start_token)


def draw(rng, count=30):
    return [Query(i, int(rng.integers(1, 12)), int(rng.integers(1, 9))) for i in range(count)]


@pytest.mark.parametrize("first_token_at_encoding", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_pool_knows_the_pages_of_the_next_iteration(seed, first_token_at_encoding):
    rng = np.random.default_rng(seed)
    page_size, m, start = int(rng.integers(1, 6)), int(rng.integers(1, 4)), int(not first_token_at_encoding)
    pages = int(rng.integers(30, 60))
    pool = Pool(
        num_micro_batches=m,
        num_pages=pages,
        page_size=page_size,
        first_token_at_encoding=first_token_at_encoding,
    )
    queries = draw(rng)
    lengths = {q.id: int(rng.integers(1, q.max_output_tokens + 1)) for q in queries}
    for query in queries:
        pool.arrive(query)
    rows: dict[int, tuple[Query, int]] = {}
    total = dict.fromkeys(lengths, 0)
    machine, finished = Iteration(10), 0
    for turn in range(500):
        index = turn % m
        step = machine.next_turn(pool, index)
        if step is not None:
            entering = {q.id: q for q in pool.waiting}
            pool.begin(step)
            for query_id in step.preempt:
                query, generated = rows.pop(query_id)
                assert generated < query.max_output_tokens
            for query_id in step.encode[index]:
                rows[query_id] = (entering[query_id], 0)
        held = sum(-(-cached(q, g, start) // page_size) for q, g in rows.values())
        assert pool.admissible(1, 0) == (0 if held <= pages else -1)
        if held <= pages and pool.waiting:
            first = -(-cached(pool.waiting[0], 0, start) // page_size)
            assert pool.admissible(1, 1) == int(held + first <= pages)
        for query_id in list(pool.members[index]):
            total[query_id] += 1
            rows[query_id] = (rows[query_id][0], rows[query_id][1] + 1)
            pool.receive(query_id, finished=total[query_id] >= lengths[query_id])
        for query_id in pool.compact(index):
            del rows[query_id]
            finished += 1
    assert finished == len(queries)


@pytest.mark.parametrize("first_token_at_encoding", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_decode_side_knows_the_pages_it_holds(seed, first_token_at_encoding):
    rng = np.random.default_rng(seed)
    page_size, start = int(rng.integers(1, 6)), int(not first_token_at_encoding)
    pages = int(rng.integers(30, 60))
    side = DecodeSide(
        num_micro_batches=1,
        num_pages=pages,
        page_size=page_size,
        first_token_at_encoding=first_token_at_encoding,
    )
    waiting, rows = draw(rng), {}
    while waiting or rows:
        held = sum(-(-cached(q, max(g - 1, 0), start) // page_size) for q, g in rows.values())
        free = pages - held
        fits = 0
        for query in waiting:
            free -= -(-cached(query, 0, start) // page_size)
            if free < 0:
                break
            fits += 1
        assert side.admissible(waiting) == fits
        for query in waiting[:fits]:
            side.take(query)
            rows[query.id] = (query, 0)
        waiting = waiting[fits:]
        assert rows, "an empty side takes any of these queries"
        for query_id, (query, generated) in list(rows.items()):
            side.receive(query_id)
            rows[query_id] = (query, generated + 1)
            if generated + 1 == query.max_output_tokens:
                side.leave(query_id)
                del rows[query_id]
    assert side.num_held == 0
