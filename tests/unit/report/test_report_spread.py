import numpy as np
import pytest

from exegpt.events import StageEvent
from exegpt.report.spread import (
    MIN_CYCLES,
    pool_over_time,
    stage_spreads,
    steady_cycles,
    worst_spread,
)


def cycles(pools, decode_s, *, encode_s=1.0, last_encoding=None, stage=0):
    """Cycles of one encode and two decode events, the given time of decoding split between them."""
    events, now = [], 0.0
    for cycle, (pool, seconds) in enumerate(zip(pools, decode_s, strict=True)):
        if last_encoding is None or cycle <= last_encoding:
            events.append(StageEvent(stage, stage, "encode", cycle, 0, 0, 4, 40, now, now + encode_s))
            now += encode_s
        for iteration in (1, 2):
            events.append(
                StageEvent(stage, stage, "decode", cycle, iteration, 0, pool, 9, now, now + seconds / 2)
            )
            now += seconds / 2
    return events


def test_filling_and_draining_are_left_out():
    pools = [4, 8, 12, 16, 16, 16, 16, 16, 12, 6]
    events = cycles(pools, [1.0] * 10, last_encoding=7)
    assert list(steady_cycles(events)) == [3, 4, 5, 6]


def test_policy_with_a_full_pool_loses_only_the_last_cycle():
    assert list(steady_cycles(cycles([8] * 5, [1.0] * 5))) == [0, 1, 2, 3]


def test_no_steady_cycles_without_two_encodings():
    assert list(steady_cycles([])) == []
    assert list(steady_cycles(cycles([8], [1.0]))) == []


def test_spread_is_p99_over_mean_of_the_steady_cycles():
    rng = np.random.default_rng(1)
    seconds = rng.uniform(0.9, 1.1, size=40)
    pools = [4, 8, 12, *[16] * 37]
    # The filling cycles and the last one would spoil the figure if they counted.
    seconds[:3], seconds[-1] = 0.1, 9.0
    expected = np.percentile(seconds[3:-1], 99) / seconds[3:-1].mean() - 1
    events = cycles(pools, seconds)
    assert worst_spread(events, "decode") == pytest.approx(expected)
    assert worst_spread(events, "encode") == pytest.approx(0.0)


def test_worst_stage_counts():
    even = cycles([8] * 20, [1.0] * 20)
    uneven = cycles([8] * 20, [1.0] * 10 + [1.2] * 10, stage=1)
    spreads = stage_spreads(even + uneven, "decode")
    assert spreads[0] == pytest.approx(0.0)
    assert worst_spread(even + uneven, "decode") == spreads[1] > 0.05


@pytest.mark.parametrize(("count", "known"), [(MIN_CYCLES, False), (MIN_CYCLES + 1, True)])
def test_few_cycles_give_no_figure(count, known):
    assert (worst_spread(cycles([8] * count, [1.0] * count), "decode") is not None) == known


def test_pool_is_a_step_function_of_all_micro_batches_and_replicas():
    def decode(rank, cycle, iteration, micro_batch, rows, start):
        return StageEvent(rank, 0, "decode", cycle, iteration, micro_batch, rows, 0, start, start + 0.5)

    events = [
        decode(0, 0, 1, 0, 4, 1.0),
        decode(0, 0, 1, 1, 3, 1.5),
        decode(0, 0, 2, 0, 2, 2.0),
        decode(5, 0, 1, 0, 10, 1.25),
        StageEvent(1, 1, "decode", 0, 1, 0, 4, 0, 1.5, 2.0),
        StageEvent(0, 0, "encode", 0, 0, 0, 4, 0, 0.0, 1.0),
    ]
    times, sizes = pool_over_time(events)
    assert times.tolist() == [1.0, 1.25, 1.75, 2.0, 2.5]
    assert sizes.tolist() == [7, 17, 7, 2, 0]


def test_no_events_no_pool():
    times, sizes = pool_over_time([])
    assert len(times) == len(sizes) == 0
