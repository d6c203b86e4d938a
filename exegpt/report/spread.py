"""How evenly the cycles of a schedule load each stage, and how large its pool is over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from exegpt.events import StageEvent

# Our choice: of fewer cycles the 99th percentile is the longest one, which says nothing of spread.
MIN_CYCLES = 8
_FIRST_ITERATION = 1


def cycle_seconds(events: Sequence[StageEvent], phase: str) -> dict[int, dict[int, float]]:
    """Summed computing time of each cycle, by first rank of the stage: rank -> cycle -> seconds."""
    seconds: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.phase == phase:
            seconds[event.rank][event.cycle] += event.end_s - event.start_s
    return {rank: dict(cycles) for rank, cycles in sorted(seconds.items())}


def steady_cycles(events: Sequence[StageEvent]) -> range:
    """Cycles between the filling of the pool and its draining.

    Returns
    -------
    range of cycle numbers
        Empty if nothing was encoded.

    Notes
    -----
    Our choice. The last cycle that encodes may have a rest batch and afterwards the pool drains,
    so the range ends before it. The pool of a cycle is the rows of its first decode iteration; its
    steady level is the median over the second half of the cycles left, and the range begins with the
    first cycle that reaches this level. A policy that starts with a full pool loses no cycle.
    """
    encoding = sorted({event.cycle for event in events if event.phase == "encode"})
    if len(encoding) < 2:
        return range(0)
    pool: dict[int, int] = defaultdict(int)
    for event in events:
        if event.phase == "decode" and event.stage == 0 and event.iteration == _FIRST_ITERATION:
            pool[event.cycle] += event.num_queries
    cycles = range(encoding[0], encoding[-1])
    sizes = [pool.get(cycle, 0) for cycle in cycles]
    level = float(np.median(sizes[len(sizes) // 2 :]))
    first = next(index for index, size in enumerate(sizes) if size >= level)
    return cycles[first:]


def stage_spreads(events: Sequence[StageEvent], phase: str) -> dict[int, float]:
    """Spread of each stage's summed time per cycle: 99th percentile over mean, minus 1.

    Parameters
    ----------
    events : sequence of StageEvent
        All events of a run or a replay.
    phase : str
        `encode` or `decode`.

    Returns
    -------
    dict
        First rank of the stage -> spread; stages with fewer than `MIN_CYCLES` steady cycles that
        have this phase are left out.
    """
    steady = steady_cycles(events)
    spreads = {}
    for rank, cycles in cycle_seconds(events, phase).items():
        seconds = np.array([value for cycle, value in cycles.items() if cycle in steady])
        if len(seconds) >= MIN_CYCLES and seconds.mean() > 0:
            spreads[rank] = float(np.percentile(seconds, 99) / seconds.mean() - 1)
    return spreads


def worst_spread(events: Sequence[StageEvent], phase: str) -> float | None:
    """The largest of `stage_spreads`; None if no stage has enough steady cycles."""
    return max(stage_spreads(events, phase).values(), default=None)


def pool_over_time(
    events: Sequence[StageEvent],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Queries in decoding, as a step function of all replicas together.

    Returns
    -------
    times_s : float array, shape (n,)
        Starts of the decode iterations on first stages, and the end of the last one.
    num_queries : int array, shape (n,)
        Rows of the iteration that starts, from then on; 0 at the end.
    """
    starts: dict[tuple[int, int, int], float] = {}
    sizes: dict[tuple[int, int, int], int] = defaultdict(int)
    end_s: dict[int, float] = {}
    for event in events:
        if event.phase == "decode" and event.stage == 0:
            key = (event.rank, event.cycle, event.iteration)
            starts[key] = min(event.start_s, starts.get(key, event.start_s))
            sizes[key] += event.num_queries
            end_s[event.rank] = max(event.end_s, end_s.get(event.rank, event.end_s))
    changes = [(start_s, key[0], sizes[key]) for key, start_s in starts.items()]
    changes += [(when_s, rank, 0) for rank, when_s in end_s.items()]
    times, totals, now = [], [], dict.fromkeys(end_s, 0)
    for when_s, rank, size in sorted(changes, key=lambda change: change[:2]):
        now[rank] = size
        times.append(when_s)
        totals.append(sum(now.values()))
    return np.array(times, dtype=np.float64), np.array(totals, dtype=np.int64)
