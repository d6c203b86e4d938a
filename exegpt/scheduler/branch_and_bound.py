"""Best-first branch and bound over boxes of batch x extent, all choices of all policies in one queue.

The queue is ordered by what a box can at best hold. Boxes come off it many at a time, so that bounds
are computed as arrays over choices; small boxes are evaluated whole. When the best bound left is no better
than the incumbent, the incumbent is optimal in the space: the gap is zero. Every policy has its own
incumbent, since the answer names each policy's best schedule.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.scheduler.candidates import SLACK, BoolArray, Constraints, Evaluate, Tally
from exegpt.scheduler.result import Best
from exegpt.scheduler.space import PolicySpace
from exegpt.simulator.choice import Bounds, Choice, IntArray

# (choices, which (n,), batches (n, 2), extents (n, 2)) -> bounds
BoundBoxes = Callable[[Sequence[Choice], IntArray, IntArray, IntArray], Bounds]

# The same arguments -> closer bounds, or None
RefineBoxes = Callable[[Sequence[Choice], IntArray, IntArray, IntArray], Bounds | None]

# Boxes taken off the queue at a time, and those of them to be evaluated; candidates of a box that is looked
# at one by one instead of split. More at a time cost what the next incumbent would have dropped; fewer cost
# calls.
BOXES_AT_ONCE = 128
EVALUATED_AT_ONCE = 32
LEAF_CANDIDATES = 32
# Boxes whose knobs span no more than this ratio in all are bounded closely; in wider ones that shows little.
NARROW_RATIO = 4.0
# Where the search starts: candidates spread over the most promising choices, then around the best one.
SEED_CHOICES = 4
SEED_POINTS = 7


@dataclass(slots=True)
class _PolicySearch:
    """One policy's space, incumbent and counts.

    `whole_leaves`: small boxes are evaluated as they are, since candidates have no closer bounds.
    """

    space: PolicySpace
    tally: Tally
    whole_leaves: bool = False
    best: Best | None = None
    num_evaluations: int = 0
    seen: set[tuple[int, int, int]] = field(default_factory=set)


class _Search:
    def __init__(
        self,
        spaces: Sequence[PolicySpace],
        evaluate: Evaluate,
        bound: BoundBoxes,
        refine: RefineBoxes,
        constraints: Constraints,
        objective: str,
    ) -> None:
        self.policies = [_PolicySearch(space, Tally()) for space in spaces]
        self.evaluate_choice = evaluate
        self.bound_boxes = bound
        self.refine_boxes = refine
        self.constraints = constraints
        self.objective = objective
        self.slack = SLACK if objective == "throughput" else 1.0
        # Boxes are rows of indices: policy, choice, first and last batch, first and last extent.
        self.heap: list[tuple[float, int, tuple[int, ...]]] = []
        self.tie = itertools.count()

    def incumbent(self, policy: int) -> float:
        """Score that a candidate of a policy has to beat."""
        best = self.policies[policy].best
        return -np.inf if best is None else best.score

    def push(self, boxes: IntArray) -> None:
        """Bound boxes (n, 6) and queue those that can still hold a better feasible candidate.

        Narrow boxes are bounded once more, closely.
        """
        for policy in np.unique(boxes[:, 0]).tolist():
            mine = boxes[boxes[:, 0] == policy]
            space = self.policies[policy].space
            batches, extents = space.values(mine[:, 1], mine[:, 2:4], mine[:, 4:6])
            bounds = self.bound_boxes(space.choices, mine[:, 1], batches, extents)
            score, alive = self._scores(policy, bounds)
            wide = batches[:, 1] * extents[:, 1] > NARROW_RATIO * batches[:, 0] * extents[:, 0]
            near = np.flatnonzero(alive & ~wide)
            if len(near):
                refined = self.refine_boxes(space.choices, mine[near, 1], batches[near], extents[near])
                self.policies[policy].whole_leaves = refined is None
                if refined is not None:
                    closer, alive[near] = self._scores(policy, refined)
                    score[near] = np.minimum(score[near], closer)
            self._queue(mine[alive], score[alive])

    def _scores(self, policy: int, bounds: Bounds) -> tuple[FloatArray, BoolArray]:
        """Best scores that boxes can hold, and which of them can hold a better feasible candidate."""
        score, alive = self.constraints.box_scores(bounds, self.objective)
        return score, alive & (score * self.slack > self.incumbent(policy))

    def _queue(self, boxes: IntArray, score: FloatArray) -> None:
        for box, value in zip(boxes.tolist(), (-score).tolist(), strict=True):
            heapq.heappush(self.heap, (value, next(self.tie), tuple(box)))

    def evaluate(self, policy: int, choice: int, cells: IntArray) -> None:
        """Evaluate candidates (n, 2) of one choice, as indices of batch and extent."""
        search = self.policies[policy]
        fresh = [cell for cell in cells.tolist() if (choice, *cell) not in search.seen]
        if not fresh:
            return
        search.seen.update((choice, *cell) for cell in fresh)
        index = np.asarray(fresh)
        batches, extents = search.space.values(np.full(len(index), choice), index[:, :1], index[:, 1:])
        search.num_evaluations += len(index)
        chosen = search.space.choices[choice]
        estimates = self.evaluate_choice(chosen, batches[:, 0], extents[:, 0])
        search.best = search.tally.take_best(
            search.best, chosen, batches[:, 0], extents[:, 0], estimates, self.constraints, self.objective
        )

    def seed(self) -> None:
        """Find good incumbents: the sooner they come, the more is never looked at."""
        order = sorted(self.heap)
        for policy in range(len(self.policies)):
            promising = dict.fromkeys(box[1] for _, _, box in order if box[0] == policy)
            for choice in itertools.islice(promising, SEED_CHOICES):
                self._seed_choice(policy, choice)

    def _seed_choice(self, policy: int, choice: int) -> None:
        sizes = self.policies[policy].space.sizes(choice)
        window = [(0, size - 1) for size in sizes]
        for _ in range(4):
            axes = [_spread(low, high, SEED_POINTS) for low, high in window]
            cells = np.asarray(list(itertools.product(*axes)))
            self.evaluate(policy, choice, cells)
            best = self.policies[policy].best
            if best is None or best.choice is not self.policies[policy].space.choices[choice]:
                # Nothing feasible here yet: look at smaller batches.
                window[0] = (0, max(axes[0][len(axes[0]) // 2], 1) if len(axes[0]) > 1 else 0)
                continue
            at = self.policies[policy].space.index_of(choice, best.batch, best.extent)
            window = [_around(axis, i) for axis, i in zip(axes, at, strict=True)]

    def pop(self) -> IntArray:
        popped: list[tuple[int, ...]] = []
        evaluated = 0
        while self.heap and len(popped) < BOXES_AT_ONCE and evaluated < EVALUATED_AT_ONCE:
            negative, _, box = heapq.heappop(self.heap)
            if -negative * self.slack > self.incumbent(box[0]):
                popped.append(box)
                evaluated += self.is_evaluated(box)
        return np.asarray(popped, dtype=np.int64).reshape(-1, 6)

    def is_evaluated(self, box: Sequence[int]) -> bool:
        """Whether a box is small enough to look at all its candidates."""
        size = _size(box)
        return size == 1 or (size <= LEAF_CANDIDATES and self.policies[box[0]].whole_leaves)

    def run(self) -> None:
        while len(boxes := self.pop()):
            evaluated = np.asarray([self.is_evaluated(box) for box in boxes.tolist()])
            self._evaluate_candidates(_candidates(boxes[evaluated]))
            small = np.asarray([_size(box) <= LEAF_CANDIDATES for box in boxes.tolist()])
            parts = [_candidates(boxes[small & ~evaluated]), self._split(boxes[~small])]
            if sum(map(len, parts)):
                self.push(np.concatenate(parts))

    def _evaluate_candidates(self, cells: IntArray) -> None:
        chosen: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for policy, choice, batch, _, extent, _ in cells.tolist():
            chosen.setdefault((policy, choice), []).append((batch, extent))
        for (policy, choice), found in chosen.items():
            self.evaluate(policy, choice, np.asarray(found))

    def _split(self, boxes: IntArray) -> IntArray:
        """Halves along the side that spans the greater ratio; costs change with ratios, not differences."""
        halves = [boxes[:0]]
        for policy in np.unique(boxes[:, 0]).tolist():
            mine = boxes[boxes[:, 0] == policy]
            space = self.policies[policy].space
            batches, extents = space.values(mine[:, 1], mine[:, 2:4], mine[:, 4:6])
            wide = batches[:, 1] * extents[:, 0] >= extents[:, 1] * batches[:, 0]
            by_batch = ((mine[:, 3] > mine[:, 2]) & wide) | (mine[:, 5] == mine[:, 4])
            for at, column in ((by_batch, 2), (~by_batch, 4)):
                rows = mine[at]
                low, high = rows[:, column], rows[:, column + 1]
                # The geometric middle, as values of a range of steps from above zero go.
                middle = np.clip(
                    np.floor(np.sqrt((low + 1.0) * (high + 1.0))).astype(np.int64) - 1, low, high - 1
                )
                left, right = rows.copy(), rows.copy()
                left[:, column + 1], right[:, column] = middle, middle + 1
                halves += [left, right]
        return np.concatenate(halves)


def _size(box: Sequence[int]) -> int:
    """Number of a box's candidates."""
    return (box[3] - box[2] + 1) * (box[5] - box[4] + 1)


def _candidates(boxes: IntArray) -> IntArray:
    """Every candidate of the boxes (n, 6) as a box of its own."""
    cells = [boxes[:0]]
    for policy, choice, b0, b1, e0, e1 in boxes.tolist():
        batch, extent = (m.ravel() for m in np.meshgrid(np.arange(b0, b1 + 1), np.arange(e0, e1 + 1)))
        head = np.full_like(batch, policy), np.full_like(batch, choice)
        cells.append(np.stack([*head, batch, batch, extent, extent], axis=-1))
    return np.concatenate(cells)


def _spread(low: int, high: int, count: int) -> list[int]:
    """Up to `count` indices from low to high, each the same factor further."""
    points = np.geomspace(low + 1, high + 1, count) - 1
    return sorted(set(np.clip(np.round(points), low, high).astype(int).tolist()))


def _around(axis: list[int], value: int) -> tuple[int, int]:
    """The neighbours of a value on an axis."""
    at = int(np.searchsorted(axis, value))
    return axis[max(at - 1, 0)], axis[min(at + 1, len(axis) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found about one policy."""

    best: Best | None
    tally: Tally
    num_evaluations: int


def branch_and_bound(
    spaces: Sequence[PolicySpace],
    evaluate: Evaluate,
    bound: BoundBoxes,
    refine: RefineBoxes,
    constraints: Constraints,
    *,
    objective: str = "throughput",
) -> list[Found]:
    """The candidate of each policy that is best by `objective` and meets the constraints, with proof.

    Parameters
    ----------
    spaces : sequence of PolicySpace
    evaluate : callable
        Exact estimates of candidates of one choice.
    bound : callable
        Bounds over boxes; see `SteadyState.bounds`.
    refine : callable
        Closer bounds over boxes; see `SteadyState.refine`.
    constraints : Constraints
    objective : str
        `throughput` (the highest), or the name of a constraint, whose value is made lowest.
    """
    search = _Search(spaces, evaluate, bound, refine, constraints, objective)
    roots = [
        (p, c, 0, sizes[0] - 1, 0, sizes[1] - 1)
        for p, space in enumerate(spaces)
        for c, sizes in enumerate(map(space.sizes, range(len(space.choices))))
        if min(sizes) > 0
    ]
    if roots:
        search.push(np.asarray(roots, dtype=np.int64))
        search.seed()
        search.run()
    return [Found(best=p.best, tally=p.tally, num_evaluations=p.num_evaluations) for p in search.policies]
