"""Best-first branch and bound over boxes of B_E x N_D, all choices in one queue.

The queue is ordered by the upper bound of throughput. Boxes come off it in batches, so that bounds
are computed as arrays; small boxes are evaluated whole. When the best bound left is no higher than
the incumbent, the incumbent is optimal in the space: the gap is zero.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.scheduler.exhaustive import Constraints, Estimate, find_binding, take_best
from exegpt.scheduler.result import Best, Rejections, SearchResult
from exegpt.scheduler.space import Space
from exegpt.simulator.steady import Choice, IntArray

# (choice, batches (n, 2), iterations (n, 2)) -> throughput upper, latency lower, memory lower, each (n,)
Bound = Callable[[Choice, IntArray, IntArray], tuple[FloatArray, FloatArray, FloatArray]]

# Boxes split at a time, and candidates of a box that is evaluated whole instead of split. Larger
# numbers cost more evaluations, smaller ones more calls; times differ little between 16 and 64.
BOXES_AT_ONCE = 32
LEAF_CANDIDATES = 24


@dataclass(frozen=True, slots=True)
class _Box:
    choice: int
    batches: tuple[int, int]
    iterations: tuple[int, int]

    @property
    def size(self) -> int:
        return (self.batches[1] - self.batches[0] + 1) * (self.iterations[1] - self.iterations[0] + 1)

    def halves(self) -> tuple[_Box, _Box]:
        """Cut the side that spans the greater ratio; costs change with ratios, not with differences."""
        (b0, b1), (n0, n1) = self.batches, self.iterations
        if b0 < b1 and (b1 / b0 >= n1 / n0 or n0 == n1):
            middle = min(max(int((b0 * b1) ** 0.5), b0), b1 - 1)
            return _Box(self.choice, (b0, middle), (n0, n1)), _Box(self.choice, (middle + 1, b1), (n0, n1))
        middle = min(max(int((n0 * n1) ** 0.5), n0), n1 - 1)
        return _Box(self.choice, (b0, b1), (n0, middle)), _Box(self.choice, (b0, b1), (middle + 1, n1))


class _Search:
    def __init__(
        self,
        choices: list[Choice],
        estimate: Estimate,
        bound: Bound,
        constraints: Constraints,
        mean_output_tokens: float,
    ) -> None:
        self.choices = choices
        self.estimate = estimate
        self.bound = bound
        self.constraints = constraints
        self.mean_output_tokens = mean_output_tokens
        self.best: Best | None = None
        self.rejections = Rejections()
        self.num_evaluations = 0
        # Candidates sampled from boxes that were split since; a leaf need not look at them again.
        self.sampled: set[tuple[int, int, int]] = set()
        self.heap: list[tuple[float, int, _Box]] = []
        self.tie = itertools.count()

    @property
    def incumbent(self) -> float:
        return self.best.throughput_per_s if self.best else 0.0

    def push(self, boxes: list[_Box]) -> None:
        """Bound boxes and queue those that can still hold a better feasible candidate."""
        for choice in sorted({box.choice for box in boxes}):
            mine = [box for box in boxes if box.choice == choice]
            batches = np.asarray([box.batches for box in mine])
            iterations = np.asarray([box.iterations for box in mine])
            upper, latency, memory = self.bound(self.choices[choice], batches, iterations)
            # Values just over a limit through rounding must not prune what evaluation would accept.
            slack = 1 + 1e-9
            alive = (upper * slack > self.incumbent) & (latency <= self.constraints.bound.latency_s * slack)
            alive &= memory <= self.constraints.memory_bytes * slack
            for i in np.flatnonzero(alive):
                heapq.heappush(self.heap, (-float(upper[i]), next(self.tie), mine[i]))

    def sample(self, choice: int, cell: tuple[int, int]) -> list[tuple[int, int]]:
        """The cell, if it has not been sampled before."""
        if (choice, *cell) in self.sampled:
            return []
        self.sampled.add((choice, *cell))
        return [cell]

    def evaluate(self, choice: int, cells: list[tuple[int, int]]) -> None:
        if not cells:
            return
        batches, iterations = np.asarray(cells).T
        estimates = self.estimate(self.choices[choice], batches, iterations)
        self.num_evaluations += len(cells)
        self.best = take_best(
            self.best,
            self.choices[choice],
            batches,
            iterations,
            estimates,
            self.constraints,
            self.rejections,
            self.mean_output_tokens,
        )

    def pop(self) -> list[_Box]:
        popped: list[_Box] = []
        while self.heap and len(popped) < BOXES_AT_ONCE:
            negative, _, box = heapq.heappop(self.heap)
            if -negative * (1 + 1e-9) <= self.incumbent:
                self.heap.clear()
                break
            popped.append(box)
        return popped

    def run(self) -> None:
        while boxes := self.pop():
            by_choice: dict[int, list[tuple[int, int]]] = {}
            split: list[_Box] = []
            for box in boxes:
                cells = by_choice.setdefault(box.choice, [])
                if box.size <= LEAF_CANDIDATES:
                    inside = itertools.product(
                        range(box.batches[0], box.batches[1] + 1),
                        range(box.iterations[0], box.iterations[1] + 1),
                    )
                    cells += [cell for cell in inside if (box.choice, *cell) not in self.sampled]
                else:
                    split += box.halves()
                    # A candidate of every box: incumbents come early, and bounds then prune more.
                    cells += self.sample(box.choice, (sum(box.batches) // 2, sum(box.iterations) // 2))
            for choice, cells in by_choice.items():
                self.evaluate(choice, cells)
            if split:
                self.push(split)


def branch_and_bound(
    space: Space,
    choices: Iterable[Choice],
    estimate: Estimate,
    bound: Bound,
    constraints: Constraints,
    *,
    mean_output_tokens: float,
) -> SearchResult:
    """The candidate with the highest throughput that meets the constraints, with proof.

    Parameters
    ----------
    space : Space
    choices : iterable of Choice
        RRA choices of the space.
    estimate : callable
        Exact estimates of candidates.
    bound : callable
        Bounds over boxes; see `SteadyState.throughput_upper_and_latency_lower`.
    constraints : Constraints
    mean_output_tokens : float

    Notes
    -----
    An infeasible problem has no incumbent to prune with, but boxes whose latency or memory bound
    breaks a constraint are dropped unseen; the closest values reported come from what was evaluated.
    """
    chosen = list(choices)
    search = _Search(chosen, estimate, bound, constraints, mean_output_tokens)
    roots, size = [], 0
    for index, choice in enumerate(chosen):
        batches, iterations = space.batch_sizes(choice), space.iterations(choice)
        if len(batches):
            size += len(batches) * len(iterations)
            ends = (int(batches[0]), int(batches[-1]))
            roots.append(_Box(index, ends, (iterations[0], iterations[-1])))
            # The corner of least latency and memory: what an infeasible answer is measured by.
            corners = [(ends[0], iterations[0]), (ends[0], iterations[-1])]
            search.evaluate(index, [cell for corner in corners for cell in search.sample(index, corner)])
    search.push(roots)
    search.run()
    return SearchResult(
        best=search.best,
        throughput_upper_per_s=search.incumbent,
        num_evaluations=search.num_evaluations,
        space_size=size,
        rejections=search.rejections,
        binding=find_binding(space, search.best, estimate) if search.best else (),
    )
