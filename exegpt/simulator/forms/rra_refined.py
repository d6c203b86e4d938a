"""Closer lower bounds of RRA over boxes: nearly exact where a box is one candidate, exact for one stage.

Everything is evaluated at the least batch b of the box, since costs fall with no batch, and over the blocks
of iterations of the closed form (`IterationBlocks`). For N_D in [n0, n1] the first n0 - 1 iterations of a
cycle have at least the least active queries and contexts that their block has under any of these N_D, the
last one likewise, and each of the n - n0 others costs at least x, an iteration with the least of every
block. With e_j and d_uj the times of stage j so found and m micro-batches, two of the circuits of jobs
whose longest is the cycle (`simulator.pipeline`) give, whatever n of the box,

- along a stage: T >= m (e_j + sum_u d_uj);
- once through encoding, the first iteration, the n - 2 following ones and the last one's first job:
  T >= phase + w_1 + sum_{1<u<n} p_u + d_n0, with w_u = sum_j d_uj and the period p_u = max(w_u, m max_j
  d_uj).

The bound's query of D iterations passes c = floor((D - 1) / n) cycles, an encode phase and the first r = D -
c n iterations of a cycle: latency >= phase + c T + w_1 + sum_{1<u<=r} p_u. However n and r divide them, it
takes D iterations, so what a smaller n leaves out of the sums over u is counted as iterations that cost x:

- along a stage: phase + c m (e_j + sum_{u<=n0} d_uj) + w_1 + sum_{1<u<=r0} p_u + (D - 1 - those) m x_j;
- through encoding: (c + 1) (phase + w_1) + c (sum_{1<u<n0} p_u + d_n0) + sum_{1<u<=r0} p_u + (D - c - 1 -
  those) max(w_x, m max_j x_j), where "those" counts d_n0 and all terms of the sums.

r0 = D - c n1 where all n of the box have the same c, otherwise no iteration is certain. Both are linear in
c, so their least value lies at the least or the greatest c.

Of several ragged micro-batches the longest delays the pipeline (`EncodeSpread`): over a box by the least
that it can be longer than the mean, which has the greatest batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, IntArray
from exegpt.simulator.forms.encode_spread import EncodeSpread
from exegpt.simulator.forms.rra_bounds import Prepared, candidate_memory
from exegpt.simulator.iteration_blocks import LeastBlocks
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import StageKinds


@dataclass(frozen=True, slots=True)
class _Iteration:
    """An iteration of every box, or of every block: times by kind (.., kinds), their sum and the period."""

    times: FloatArray
    whole: FloatArray
    period: FloatArray


@dataclass(frozen=True, slots=True)
class _Cycle:
    """Least times of a cycle: encoding by kind, the phase, iterations; `weights` as in `LeastBlocks`."""

    encode: FloatArray
    phase: FloatArray
    weights: FloatArray
    inner: _Iteration
    first: _Iteration
    last: _Iteration
    every: _Iteration


def refined_bounds(
    serving: Serving,
    spread: EncodeSpread,
    prepared: Prepared,
    which: IntArray,
    batches: IntArray,
    extents: IntArray,
) -> Bounds:
    """Bounds of boxes: choice `which` (n,), B_E in `batches` (n, 2), N_D in `extents` (n, 2)."""
    kinds = prepared.kinds.take(which)
    m, replicas = prepared.num_micro_batches[which], prepared.num_replicas[which]
    low = batches[:, 0].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        cycle = _cycle(serving, spread, kinds, m, batches, extents)
        along, through = _circuits(kinds, m, cycle)
        length = np.maximum(kinds.slowest(along), through)
        decode = _decode(serving, kinds, m, cycle, along, extents)
    start = np.zeros_like(cycle.phase) if serving.first_token_at_encoding else cycle.first.whole
    gaps = serving.num_gaps
    after = (decode - start) / gaps if gaps else np.zeros_like(decode)
    # A pool's least tokens over several N_D are bounded elsewhere.
    single = extents[:, 0] == extents[:, 1]
    memory = candidate_memory(serving, prepared.memory[which], m, low, extents[:, 0])
    return Bounds(
        throughput_upper_per_s=np.nan_to_num(replicas * batches[:, 1] / length),
        latency_lower_s=np.nan_to_num(cycle.phase + decode, nan=np.inf),
        ttft_lower_s=np.nan_to_num(cycle.phase + start, nan=np.inf),
        tpot_lower_s=np.nan_to_num(after, nan=np.inf),
        memory_lower_bytes=np.where(single, memory, 0.0),
    )


def _cycle(
    serving: Serving,
    spread: EncodeSpread,
    kinds: StageKinds,
    m: FloatArray,
    batches: IntArray,
    extents: IntArray,
) -> _Cycle:
    share = batches[:, 0] / m
    encode = serving.tables.encode_s(kinds, share)
    longest = _longest_encode(serving, spread, kinds, m, batches, extents, encode)
    blocks = serving.iteration_blocks.least(extents[:, 0], extents[:, 1])
    iterations = _decode_s(serving, kinds, m, share, blocks)
    inner = _at(iterations, slice(0, -2))
    every = _at(iterations, -1)
    # Of one iteration, or of an unknown number, the first may be any.
    known = extents[:, 0] > 1
    first = _either(known, _at(iterations, 0), every)
    return _Cycle(
        encode=encode,
        phase=kinds.total(encode) + (m - 1) * kinds.slowest(encode) + longest,
        weights=blocks.weights,
        inner=inner,
        first=first,
        last=_at(iterations, -2),
        every=every,
    )


def _decode_s(
    serving: Serving, kinds: StageKinds, m: FloatArray, share: FloatArray, blocks: LeastBlocks
) -> _Iteration:
    """Iterations of the blocks, then the last one, then the least: shapes (n, blocks + 2, ..)."""
    held = np.concatenate([blocks.inner, blocks.last[:, None], blocks.every[:, None]], axis=1)
    # What holds nothing costs nothing; there is nothing to look up.
    count, width, _ = held.shape
    needed = np.concatenate([blocks.weights > 0, np.ones((count, 2), dtype=bool)], axis=1)
    rows, _ = np.nonzero(needed)
    times = np.zeros((count, width, kinds.layers.shape[1]))
    queries, context, inputs = (share[rows, None] * held[needed]).T
    times[needed] = serving.tables.decode_s(kinds.take(rows), queries, context, inputs)
    whole = (times * kinds.count[:, None, :]).sum(-1)
    return _Iteration(times, whole, np.maximum(whole, m[:, None] * times.max(-1)))


def _at(iterations: _Iteration, at: int | slice) -> _Iteration:
    return _Iteration(iterations.times[:, at], iterations.whole[:, at], iterations.period[:, at])


def _either(condition: np.ndarray, left: _Iteration, right: _Iteration) -> _Iteration:
    return _Iteration(
        np.where(condition[:, None], left.times, right.times),
        np.where(condition, left.whole, right.whole),
        np.where(condition, left.period, right.period),
    )


def _longest_encode(
    serving: Serving,
    spread: EncodeSpread,
    kinds: StageKinds,
    m: FloatArray,
    batches: IntArray,
    extents: IntArray,
    encode: FloatArray,
) -> FloatArray:
    """What the longest micro-batch adds to the encode phase, on every stage but the one it adds most to."""
    several = kinds.count.sum(-1) > 1
    rows = np.flatnonzero(several & (m > 1))
    gains = np.zeros_like(encode)
    if len(rows):
        mine, jobs = kinds.take(rows), m[rows].astype(np.int64)
        most = serving.tables.encode_s(mine, batches[rows, 1] / jobs)
        gains[rows] = spread.least_of_kinds(mine, jobs, batches[rows], extents[rows], encode[rows], most)
    return np.where(several, kinds.total(gains) - kinds.slowest(gains), 0.0)


def _circuits(kinds: StageKinds, m: FloatArray, cycle: _Cycle) -> tuple[FloatArray, FloatArray]:
    """Least times of a cycle: along each kind of stage (n, kinds), and through encoding (n,)."""
    decoded = (cycle.inner.times * cycle.weights[..., None]).sum(1) + cycle.last.times
    along = np.where(kinds.count > 0, m[:, None] * (cycle.encode + decoded), 0.0)
    # The pipeline's first stage is its first kind.
    return along, cycle.phase + _turns(cycle) + cycle.last.times[:, 0]


def _turns(cycle: _Cycle) -> FloatArray:
    """The first iteration, which is a passage and no period, and those between it and the last one."""
    several = cycle.weights.sum(1) > 0
    return np.where(several, cycle.first.whole + _between(cycle, cycle.weights), 0.0)


def _between(cycle: _Cycle, weights: FloatArray) -> FloatArray:
    """Periods of `weights` iterations of each block without the cycle's first one; (n,)."""
    return np.asarray((weights * cycle.inner.period)[:, 1:].sum(1))


def _decode(
    serving: Serving,
    kinds: StageKinds,
    m: FloatArray,
    cycle: _Cycle,
    along: FloatArray,
    extents: IntArray,
) -> FloatArray:
    """From the end of encoding to the bound query's last token."""
    ends = serving.completion.iterations_of(serving.bound_output_tokens)
    if ends == 0:
        return np.zeros_like(cycle.phase)
    most, least = ((ends - 1) // extents[:, i] for i in (0, 1))
    # Iterations that are certain to be taken of the last cycle.
    rest = np.where(most == least, ends - least * extents[:, 1], 1)
    begun = np.clip(rest[:, None] - (np.cumsum(cycle.weights, axis=1) - cycle.weights), 0, cycle.weights)
    final = cycle.first.whole + _between(cycle, begun)
    taken = np.maximum(begun.sum(1), 1) - 1
    left = ends - taken
    passed = [_passed(m, cycle, along, extents[:, 0], count, left) for count in (least, most)]
    # Each circuit by itself is linear in the number of cycles.
    stay, through = (np.minimum(*values) for values in zip(*passed, strict=True))
    return np.asarray(final + np.maximum(kinds.slowest(stay), through))


def _passed(
    m: FloatArray, cycle: _Cycle, along: FloatArray, n0: IntArray, cycles: IntArray, ends: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """What `cycles` whole cycles cost, and all of `ends` iterations but the last cycle's first one.

    Along each kind of stage (n, kinds), and through encoding (n,).
    """
    left = np.maximum(ends - 1 - cycles * n0, 0)
    some = cycles > 0
    stay = np.where(some[:, None], cycles[:, None] * along, 0.0) + (m * left)[:, None] * cycle.every.times
    passage = cycle.phase + _turns(cycle) + cycle.last.times[:, 0]
    # A cycle of an unknown number of iterations shows only its last one's first job.
    left = np.where(n0 > 1, left, 0.0)
    return stay, np.where(some, cycles * passage, 0.0) + left * cycle.every.period
