"""The paper's Algorithm 1 (section 5.1): branch and bound that takes the estimates to be monotonic.

For one choice of the enumerated knobs it searches the plane of `batch` (x, rising) and `extent` (y: N_D
falling for RRA, rising for others), in which a block's top right corner has the greatest throughput and
latency, and its bottom left corner the least. Where that holds the answer is optimal; measured costs break
it in places, and the optimum may be missed. Nothing is proven either way: it is here for comparison.

A block is cut by its better feasible corner of top left and bottom right, a half is kept if its bottom left
misses the latency bound by less than eL, and blocks whose top right falls short of the incumbent by more
than eT are dropped. What the listing leaves open is settled so (our choices, all on the safe side):

- "Sorted by lower bound": the block with the highest throughput at its bottom left comes first.
- A block of one cell ends; a side of one cell is not split, the other one is. Halves share no cells.
- Every corner that is evaluated and feasible may become the incumbent, the first one too only if it is.
- A half whose top right is feasible is not queued: nothing in it is better.
- Blocks are dropped whenever one is queued or taken, not only when the incumbent improves.
- All constraints count as the latency bound does: eL is that share of each bound on time, memory has none.
  A corner beyond the profile has no throughput to drop its block by.
- One incumbent serves all choices of a policy; those with the most at their top right come first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.scheduler.branch_and_bound import Found
from exegpt.scheduler.candidates import BoolArray, Constraints, Evaluate, Tally
from exegpt.scheduler.result import Best
from exegpt.scheduler.space import PolicySpace
from exegpt.simulator.choice import constraint_values
from exegpt.specs import Policy

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Block:
    """Cells (x, y) of a choice's plane, first and last of each inclusive."""

    left: int
    right: int
    bottom: int
    top: int

    @property
    def corners(self) -> tuple[Cell, Cell, Cell, Cell]:
        """Bottom left, top right, top left, bottom right."""
        low, high = (self.left, self.bottom), (self.right, self.top)
        return low, high, (self.left, self.top), (self.right, self.bottom)

    def halves(self, *, vertically: bool) -> tuple[Block, Block]:
        """Left and right of a vertical cut, or below and above of another; whichever side can be cut."""
        if (vertically and self.right > self.left) or self.top == self.bottom:
            middle = (self.left + self.right) // 2
            return (
                Block(self.left, middle, self.bottom, self.top),
                Block(middle + 1, self.right, self.bottom, self.top),
            )
        middle = (self.bottom + self.top) // 2
        return (
            Block(self.left, self.right, self.bottom, middle),
            Block(self.left, self.right, middle + 1, self.top),
        )


@dataclass(frozen=True, slots=True)
class Performance:
    """One cell's throughput, infinite beyond the profile, and whether it meets the constraints.

    `admits`: it meets them by the tolerance, so that cells above and right of it may matter.
    """

    throughput_per_s: float
    feasible: bool
    admits: bool


@dataclass(slots=True)
class _PolicySearch:
    """One policy's incumbent over all its choices."""

    space: PolicySpace
    evaluate: Evaluate
    constraints: Constraints
    latency_tolerance: float
    throughput_tolerance: float
    best: Best | None = None
    tally: Tally = field(default_factory=Tally)
    num_evaluations: int = 0

    def falls_short(self, upper: Performance) -> bool:
        """Whether a block with this top right is given up."""
        if self.best is None:
            return False
        best = self.best.throughput_per_s
        return upper.throughput_per_s + self.throughput_tolerance * best < best


class _Plane:
    """One choice's plane: evaluates cells, each once."""

    def __init__(self, search: _PolicySearch, index: int) -> None:
        space = search.space
        self.search = search
        self.choice = space.choices[index]
        self.batches = space.batches(index)
        self.extents = space.extents[::-1] if space.policy is Policy.RRA else space.extents
        self.seen: dict[Cell, Performance] = {}

    @property
    def block(self) -> Block:
        return Block(0, len(self.batches) - 1, 0, len(self.extents) - 1)

    def look_at(self, cells: Iterable[Cell]) -> None:
        """Evaluate those of the cells that are new, all at once."""
        search = self.search
        fresh = [cell for cell in dict.fromkeys(cells) if cell not in self.seen]
        if not fresh:
            return
        x, y = np.asarray(fresh).T
        batches, extents = self.batches[x], self.extents[y]
        e = search.evaluate(self.choice, batches, extents)
        search.num_evaluations += len(fresh)
        search.best = search.tally.take_best(
            search.best, self.choice, batches, extents, e, search.constraints
        )
        met = search.constraints.met(e)
        feasible = np.logical_and.reduce(list(met.values()))
        admits = self._admits(constraint_values(e), met["profile"])
        throughput = np.where(met["profile"], e.throughput_per_s, np.inf)
        for i, cell in enumerate(fresh):
            self.seen[cell] = Performance(float(throughput[i]), bool(feasible[i]), bool(admits[i]))

    def _admits(self, values: dict[str, FloatArray], covered: BoolArray) -> BoolArray:
        within = covered
        for name, limit in self.search.constraints.limits().items():
            share = 0.0 if name == "memory" else self.search.latency_tolerance
            within = within & (values[name] <= limit * (1 + share))
        return within

    def run(self) -> None:
        """Algorithm 1."""
        block = self.block
        low, high, _, _ = block.corners
        self.look_at((low, high))
        if self.seen[high].feasible or not self.seen[low].admits:
            return
        queue: list[tuple[float, int, Block]] = []
        tie = itertools.count()
        heapq.heappush(queue, (-self.seen[low].throughput_per_s, next(tie), block))
        while queue:
            _, _, block = heapq.heappop(queue)
            if block.left == block.right and block.bottom == block.top:
                continue
            if self.search.falls_short(self.seen[block.corners[1]]):
                continue
            halves = block.halves(vertically=self._vertically(block))
            self.look_at(cell for half in halves for cell in half.corners[:2])
            for half in halves:
                low, high, _, _ = half.corners
                kept = self.seen[low].admits and not self.seen[high].feasible
                if kept and not self.search.falls_short(self.seen[high]):
                    heapq.heappush(queue, (-self.seen[low].throughput_per_s, next(tie), half))

    def _vertically(self, block: Block) -> bool:
        """The cut: vertical if top left is the better feasible corner, else across the longer side."""
        _, _, left, right = block.corners
        self.look_at((left, right))
        feasible = [cell for cell in (left, right) if self.seen[cell].feasible]
        if feasible:
            return max(feasible, key=lambda cell: self.seen[cell].throughput_per_s) == left
        return block.right - block.left >= block.top - block.bottom


def search(
    space: PolicySpace,
    evaluate: Evaluate,
    constraints: Constraints,
    *,
    latency_tolerance: float,
    throughput_tolerance: float,
) -> Found:
    """The best candidate that Algorithm 1 finds in a policy's space; there may be better ones.

    Parameters
    ----------
    space : PolicySpace
    evaluate : callable
        Estimates of candidates of one choice.
    constraints : Constraints
    latency_tolerance : float
        eL as a share of every bound on time.
    throughput_tolerance : float
        eT as a share of the incumbent's throughput.
    """
    found = _PolicySearch(space, evaluate, constraints, latency_tolerance, throughput_tolerance)
    planes = [_Plane(found, index) for index in range(len(space.choices)) if min(space.sizes(index)) > 0]
    for plane in planes:
        plane.look_at((plane.block.corners[1],))
    planes.sort(key=lambda plane: -plane.seen[plane.block.corners[1]].throughput_per_s)
    for plane in planes:
        plane.run()
    return Found(best=found.best, tally=found.tally, num_evaluations=found.num_evaluations)
