"""Turns of continuous batching: how many prompts join in each, and how unequal turns stall a pipeline.

Of q slots, each is taken by a new query with chance p per turn, so Binomial(q, p) prompts join in a turn
(renewal theory: p is one over the mean number of turns that a query holds its slot). Their encoding makes
turns unequal, which costs a pipeline more than the mean: micro-batches wait for longer ones ahead of
them, and shorter ones do not make up for it. No simple formula gives that stall for stages of unequal
times, so we play a fixed, evenly spread set of turns through the pipeline, for all candidates at once.

The set does not depend on the candidate, and the number that join in turn i is a quantile of the
binomial at a fixed point u_i: it falls nowhere as slots are added, and no more do the rows that
decode (whose quantile is at 1 - u_i). Every stage time then rises with the slots, turn by turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import IntArray
from exegpt.workload.lengths import RequestLengths

# Multiples of every small number of micro-batches; 240 points keep sampling noise of means under 1 %.
NUM_TURNS = 240
# Turns played before the ones that count: enough for any start to be forgotten.
WARM_UP_TURNS = 48
# Prompts that should join in all turns together; else the chance is doubled, and the effect halved.
LEAST_JOINING = 24.0
# Turns that share out the quantiles of the prompt lengths; divides their number.
STRATA = 16


@dataclass(frozen=True, slots=True)
class Played:
    """What a pipeline makes of a set of turns.

    Attributes
    ----------
    turn_s : float array, shape (n,)
        Mean time from one turn to the next one's, whichever micro-batch has it.
    start_s, pass_s : float arrays, shape (num_turns, n)
        When each turn begins, and how long it then takes until its last job has left the pipeline.
    first_job_s, last_job_s : float arrays, shape (n,)
        From the start of a tagged turn until its first and its last job have left the pipeline.
    """

    turn_s: FloatArray
    start_s: FloatArray
    pass_s: FloatArray
    first_job_s: FloatArray
    last_job_s: FloatArray


def play(jobs: Sequence[FloatArray], tagged: Sequence[FloatArray], num_micro_batches: int) -> Played:
    """Play turns through a pipeline, the micro-batches in rotation.

    Parameters
    ----------
    jobs : sequence of float arrays, shape (num_turns, num_stages, n)
        Stage times of each job of a turn, in order; stage 0 issues a turn's jobs one behind the other,
        and begins a micro-batch's turn when all that its turn before issued has come back.
    tagged : like jobs
        What a turn's jobs would take if the query of interest joined in it. It leaves no trace: each is
        sent into the pipeline as it stands before that turn.

    Notes
    -----
    The turns repeat, and the rate is that of the repeated set. A micro-batch's turn needs the one before
    to come back, so a pipeline of one micro-batch or one stage needs no playing.
    """
    num_turns, num_stages, n = jobs[0].shape
    idle = np.zeros((num_turns, num_stages, n))
    if num_stages == 1 or num_micro_batches == 1:
        ends = _passed(tagged, idle, axis=1)
        whole = _passed(jobs, idle, axis=1)[-1][:, -1]
        starts = np.cumsum(whole, axis=0) - whole
        turn_s = np.maximum(whole.mean(0), least_turn_s(jobs, num_micro_batches))
        return Played(turn_s, starts, whole, ends[0][:, -1].mean(0), ends[-1][:, -1].mean(0))
    free, found = idle[0], idle
    starts, passes = np.zeros((2, num_turns, n))
    back = np.zeros((num_micro_batches, n))
    begun = free[-1]
    warm_up = -(-WARM_UP_TURNS // num_micro_batches) * num_micro_batches
    for count in range(-warm_up, num_turns):
        turn, k = count % num_turns, count % num_micro_batches
        if count == 0:
            begun = free[-1]
        start = np.maximum(free[0], back[k])
        # Times from here on count from `start` for the tagged query; stages free earlier are just free.
        found[turn] = np.maximum(free - start, 0.0)
        free = free.copy()
        free[0] = start
        free = _passed([job[turn] for job in jobs], free, axis=0)[-1]
        back[k] = free[-1]
        starts[turn], passes[turn] = start, free[-1] - start
    ends = _passed(tagged, found, axis=1)
    turn_s = np.maximum((free[-1] - begun) / num_turns, least_turn_s(jobs, num_micro_batches))
    return Played(turn_s, starts, passes, ends[0][:, -1].mean(0), ends[-1][:, -1].mean(0))


def least_turn_s(jobs: Sequence[FloatArray], num_micro_batches: int) -> FloatArray:
    """What no pipeline beats: every stage does all jobs, and a micro-batch passes all stages in its turn."""
    means = [job.mean(0) for job in jobs]
    busiest = np.sum(means, axis=0).max(0)
    passage = np.max([mean.sum(0) for mean in means], axis=0)
    return np.asarray(np.maximum(busiest, passage / num_micro_batches))


def _passed(jobs: Sequence[FloatArray], free: FloatArray, axis: int) -> list[FloatArray]:
    """When every stage has done each of the jobs, sent in a row into stages that are busy until `free`."""
    ends = []
    for job in jobs:
        whole = np.cumsum(job, axis=axis)
        free = whole + np.maximum.accumulate(free - (whole - job), axis=axis)
        ends.append(free)
    return ends


class TurnSample:
    """A fixed set of turns: points of the unit interval, and the prompts that would join in each.

    Parameters
    ----------
    lengths : RequestLengths
    chance : float
        p, of a slot to be taken by a new query in a turn.
    """

    def __init__(self, lengths: RequestLengths, chance: float, num_turns: int = NUM_TURNS) -> None:
        self.chance = chance
        self.num_turns = num_turns
        self._rng = np.random.default_rng(0)
        self.points: FloatArray = (self._rng.permutation(num_turns) + 0.5) / num_turns
        self._cumulative = np.cumsum(lengths.input_pmf)
        self._joining: dict[tuple[int, int], IntArray] = {}
        self._lengths = np.zeros((num_turns, 0))
        self._rank = np.rint((1 - self.points) * num_turns - 0.5).astype(np.int64)

    def doublings(self, mean_slots: FloatArray) -> IntArray:
        """How often the chance is doubled in play, so that enough prompts join to say what they cost."""
        expected = self.chance * mean_slots * self.num_turns
        needed = np.ceil(np.log2(LEAST_JOINING / expected)).astype(np.int64)
        # A chance stays one.
        return np.clip(needed, 0, int(np.log2(1 / self.chance)))

    def joining(self, slots: IntArray, doublings: IntArray) -> IntArray:
        """Prompts that join in each turn; arrays (n,) to shape (num_turns, n)."""
        distinct, places = np.unique(np.stack([slots, doublings]), axis=1, return_inverse=True)
        columns = [self._quantiles(int(q), int(d)) for q, d in distinct.T]
        return np.stack(columns, axis=1)[:, places.ravel()]

    def _quantiles(self, slots: int, doublings: int) -> IntArray:
        key = slots, doublings
        if key not in self._joining:
            chances = np.cumsum(binomial_pmf(slots, self.chance * 2.0**doublings))
            found = np.searchsorted(chances, self.points, side="right")
            self._joining[key] = np.minimum(found, slots)
        return self._joining[key]

    def prompts(self, most: int) -> tuple[FloatArray, FloatArray]:
        """Summed and summed squared tokens of the first k prompts of each turn, (num_turns, most + 1)."""
        while self._lengths.shape[1] < most:
            # Sixteen turns in which about equally many join share out the quantiles evenly, so that even
            # the few turns in which any join have the mean of all prompts.
            strata = self._rng.random((self.num_turns // STRATA, STRATA)).argsort(axis=1)
            quantiles = (strata + self._rng.random(strata.shape)).ravel() / STRATA
            column = np.searchsorted(self._cumulative, quantiles).astype(np.float64)[self._rank]
            self._lengths = np.concatenate([self._lengths, column[:, None]], axis=1)
        chosen = np.concatenate([np.zeros((self.num_turns, 1)), self._lengths[:, :most]], axis=1)
        return np.cumsum(chosen, axis=1), np.cumsum(chosen**2, axis=1)


def binomial_pmf(trials: int, chance: float) -> FloatArray:
    """Chances of 0, 1, .. successes, up to a number beyond which less than 1e-12 is left."""
    if chance >= 1:
        return np.append(np.zeros(trials), 1.0)
    mean = trials * chance
    k = np.arange(min(trials, int(mean + 8 * math.sqrt(mean) + 20)) + 1)
    logs = _log_factorials(trials)
    choose = logs[trials] - logs[k] - logs[trials - k]
    return np.asarray(np.exp(choose + k * math.log(chance) + (trials - k) * math.log1p(-chance)))


@cache
def _log_factorials_up_to(most: int) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])


def _log_factorials(most: int) -> FloatArray:
    """Logarithms of 0!, 1!, .. at least up to `most`."""
    return _log_factorials_up_to(1 << max(most, 1023).bit_length())
