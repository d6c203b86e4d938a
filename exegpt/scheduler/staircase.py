"""What answers under some latency bounds say about all others.

Let f(L) be the highest throughput of any candidate that meets every other constraint and a latency bound
L. It is a staircase that never falls as L grows, of up to thousands of steps. Searches give its exact value
at chosen bounds, and each value settles more than its own bound:

* An answer under L with latency l <= L is optimal for every bound in [l, L]: it still meets the tighter
  bound, under which no more is possible than under L.
* No answer under L is none under any tighter bound.
* Where two bounds have the same throughput, so has every bound between.

So only bounds between a searched one and the latency of the next answer stay open, and there f lies between
the throughputs of the two.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from exegpt.scheduler.result import Best

# Ends of an open interval this close: whether anything lies between shows at once just under the upper one,
# where halving would go down to neighbouring floats.
_CLOSE = 1.01

# (latency bound, objective) -> the best candidate that meets it
Search = Callable[[float, str], Best | None]


def least_bound_s(best: Best) -> float:
    """The tightest latency bound that a candidate meets: its latency, or the worst that its margins allow."""
    return best.latency_s if best.worst is None else best.worst["latency_s"]


def best_of(candidates: Iterable[Best | None]) -> Best | None:
    """The candidate with the highest throughput, of several the one with the least latency; None of none."""
    found = [best for best in candidates if best is not None]
    return max(found, key=lambda best: (best.throughput_per_s, -best.latency_s), default=None)


class Curve:
    """Exact answers of one policy under latency bounds; what earlier answers settle is not searched again.

    Parameters
    ----------
    search : callable
        Called with objective `throughput`, and once with `latency_s` and no bound.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._bounds: list[float] = []
        self._answers: dict[float, Best | None] = {}
        self.fastest = search(math.inf, "latency_s")

    def at(self, bound_s: float) -> Best | None:
        """The candidate with the highest throughput under a bound; None if there is none."""
        if bound_s in self._answers:
            return self._answers[bound_s]
        answer = self._settled(bound_s) or self._searched(bound_s)
        insort(self._bounds, bound_s)
        self._answers[bound_s] = answer
        return answer

    def answers(self) -> tuple[Best, ...]:
        """Different answers by rising bound, each with more throughput than the one before."""
        found: list[Best] = []
        for bound_s in self._bounds:
            answer = self._answers[bound_s]
            if answer is not None and (not found or answer.throughput_per_s > found[-1].throughput_per_s):
                found.append(answer)
        return tuple(found)

    def _settled(self, bound_s: float) -> Best | None:
        looser = self._looser(bound_s)
        if looser is None:
            return None
        tighter = self._tighter(bound_s)
        if tighter is not None and tighter.throughput_per_s >= looser.throughput_per_s:
            return tighter
        return looser if least_bound_s(looser) <= bound_s else None

    def _searched(self, bound_s: float) -> Best | None:
        if self.fastest is None or bound_s < least_bound_s(self.fastest):
            return None
        # What meets a tighter bound meets this one: a search can only find better.
        known = [self._search(bound_s, "throughput"), self._tighter(bound_s), self.fastest]
        return best_of(known)

    def _looser(self, bound_s: float) -> Best | None:
        at = bisect_left(self._bounds, bound_s)
        return self._answers[self._bounds[at]] if at < len(self._bounds) else None

    def _tighter(self, bound_s: float) -> Best | None:
        at = bisect_right(self._bounds, bound_s)
        return self._answers[self._bounds[at - 1]] if at else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A schedule that is the best under every latency bound from `least_bound_s(best)` to `bound_s`."""

    bound_s: float
    best: Best


class Refinement:
    """Answers f(L) at the bounds asked for so far, and where it is least known.

    Parameters
    ----------
    answer : callable
        The best candidate under a bound; there is one under every bound that is added.
    """

    def __init__(self, answer: Callable[[float], Best | None]) -> None:
        self._answer = answer
        self._known: list[tuple[float, Best]] = []

    @property
    def num_bounds(self) -> int:
        """Bounds added."""
        return len(self._known)

    def add(self, bound_s: float) -> None:
        """Find the answer under another bound."""
        best = self._answer(bound_s)
        assert best is not None
        insort(self._known, (bound_s, best), key=lambda known: known[0])

    def points(self) -> tuple[Point, ...]:
        """Different answers, each with the loosest bound that it is known to be best under."""
        found: list[Point] = []
        for bound_s, best in self._known:
            if found and best.throughput_per_s <= found[-1].best.throughput_per_s:
                found[-1] = replace(found[-1], bound_s=bound_s)
            else:
                found.append(Point(bound_s=bound_s, best=best))
        return tuple(found)

    def gap(self) -> float:
        """Greatest share of throughput that an open bound may have above the point before it."""
        steps = [1 - below / above for _, _, below, above in self._open()]
        return max(steps, default=0.0)

    def next_bound_s(self) -> float | None:
        """Where the frontier is least known; None if it is known everywhere."""
        widest = max(self._open(), key=lambda step: _openness(*step), default=None)
        return None if widest is None else _inside(widest[0], widest[1])

    def _open(self) -> list[tuple[float, float, float, float]]:
        """Bounds without an answer: their ends, and the throughputs at or below and above them."""
        points = self.points()
        found = []
        for before, after in pairwise(points):
            low, high = before.bound_s, least_bound_s(after.best)
            if low < _inside(low, high):
                found.append((low, high, before.best.throughput_per_s, after.best.throughput_per_s))
        return found


def _inside(low: float, high: float) -> float:
    """A bound below `high` to search next; not above `low` if no float is between."""
    return math.sqrt(low * high) if high > low * _CLOSE else math.nextafter(high, 0.0)


def _openness(low: float, high: float, below: float, above: float) -> float:
    return math.log(high / low) * math.log(above / below)
