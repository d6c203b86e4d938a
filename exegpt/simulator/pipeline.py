"""Timing rules of a pipeline with micro-batches, from stage times.

With P stages of times t_j for one micro-batch and m micro-batches: a phase of m micro-batches takes
sum_j t_j + (m - 1) max_j t_j; a decode iteration takes max(m max_j t_j, sum_j t_j), since a
micro-batch's next token cannot start before its last one left the pipeline (design, section 4).

Cycles of an encode phase and n decode iterations follow each other without a pause: stage j turns to
the next cycle as soon as it has done its last job. When a job can start is the longest path of
stage times that lead to it, over three kinds of steps: the same job on the next stage, the next job
on the same stage, and from a micro-batch's job on the last stage to its next token on stage 0. From
one cycle to the next only the second kind leads, so everything that a cycle does to the one behind
is a P x P matrix of longest paths (`_cycle_paths`). In the steady state the cycle time is that
matrix's greatest mean over circuits, and the stages begin a cycle apart by its eigenvector (max-plus
algebra: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, chapter 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exegpt.profiler.grid import FloatArray

BoolArray = NDArray[np.bool_]


def phase_s(stage_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """Time for m micro-batches to pass an empty pipeline; stages on the last axis."""
    return np.asarray(stage_s.sum(-1) + _times(num_micro_batches - 1, stage_s.max(-1)))


def period_s(stage_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """Time of one decode iteration amid others; stages on the last axis."""
    return np.asarray(np.maximum(num_micro_batches * stage_s.max(-1), stage_s.sum(-1)))


def _times(count: int, stage_s: FloatArray) -> FloatArray:
    """`count * stage_s`, zero for none even of what is infinite."""
    return count * stage_s if count else np.zeros_like(stage_s)


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Steady state of a pipeline's cycles.

    Attributes
    ----------
    cycle_s : float array, shape (...)
        From one encode phase's start to the next one's.
    offset_s : float array, shape (..., P)
        When each stage is free for the encode phase, counted from stage 0; what the stages still do
        of the cycle before delays the first tokens of this one.
    """

    cycle_s: FloatArray
    offset_s: FloatArray


def rhythm(
    encode_s: FloatArray,
    decode_s: FloatArray,
    num_micro_batches: int,
    drains: BoolArray | None = None,
    gains_s: FloatArray | None = None,
    weights: FloatArray | None = None,
) -> Rhythm:
    """Cycle time and offsets of the stages in the steady state.

    Parameters
    ----------
    encode_s : float array, shape (..., P)
    decode_s : float array, shape (..., n, P)
        Zero behind a candidate's own number of iterations.
    drains : bool array, shape (...), optional
        Where every query ends before the cycle's last iteration: stage 0 learns of it when the last
        tokens arrive, and only then begins the next cycle.
    gains_s : float array, shape (..., P, P), optional
        What unequal micro-batches add to the encode phase; see `ragged.ragged_gains_s`.
    weights : float array, shape (..., n), optional
        How many iterations each entry of `decode_s` stands for; the first and the last one for one each.
    """
    encode, decode, finite = _finite(encode_s, decode_s)
    paths = _cycle_paths(encode, decode, num_micro_batches, drains, gains_s, weights)
    cycle, visits = _greatest_mean(paths)
    offset = _eigenvector(paths, cycle, visits)
    return Rhythm(np.where(finite, cycle, np.inf), np.where(finite[..., None], offset, np.inf))


def cycle_s(encode_s: FloatArray, decode_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """Time from one encode phase's start to the next one's in the steady state.

    It falls with no stage time, and more iterations never shorten it; the solver's bounds rely on both.

    Parameters
    ----------
    encode_s : float array, shape (..., P)
    decode_s : float array, shape (..., n, P)
        Zero behind a candidate's own number of iterations.

    Returns
    -------
    float array, shape (...)
    """
    encode, decode, finite = _finite(encode_s, decode_s)
    cycle, _ = _greatest_mean(_cycle_paths(encode, decode, num_micro_batches, None, None, None))
    return np.where(finite, cycle, np.inf)


def encode_end_s(
    encode_s: FloatArray, num_micro_batches: int, offset_s: FloatArray, gains_s: FloatArray | None = None
) -> FloatArray:
    """When the last micro-batch leaves the encode phase; shapes as in `Rhythm` and `rhythm`."""
    _, last = _encode_paths(encode_s, num_micro_batches, gains_s)
    return np.asarray((offset_s + last[..., -1]).max(-1))


def finish_s(
    encode_s: FloatArray,
    decode_s: FloatArray,
    num_micro_batches: int,
    offset_s: FloatArray | None = None,
    gains_s: FloatArray | None = None,
    encode_splits: int = 1,
    weights: FloatArray | None = None,
) -> FloatArray:
    """When the last micro-batch ends each decode iteration, counted from the start of encoding.

    Parameters
    ----------
    encode_s : float array, shape (..., P)
    decode_s : float array, shape (..., n, P)
    offset_s : float array, shape (..., P), optional
        When each stage is free for the encode phase; all at once if not given.
    gains_s, weights : float arrays, optional
        As for `rhythm`; with weights an entry of the result is the end of the last iteration it stands for.
    encode_splits : int
        Encode micro-batches per decode micro-batch; `encode_s` is of one of them.

    Returns
    -------
    float array, shape (..., n)
    """
    encode, decode, finite = _finite(encode_s, decode_s)
    m = num_micro_batches
    offset = np.zeros_like(encode) if offset_s is None else np.where(finite[..., None], offset_s, 0.0)
    first, last = (
        (offset[..., None] + paths).max(-2) for paths in _encode_paths(encode, m, gains_s, encode_splits)
    )
    whole, period = decode.sum(-1), period_s(decode, m)
    # Through the end of encoding: a micro-batch passes all stages, and those behind it follow.
    passed = np.maximum(last[..., -1], first[..., -1] + (m - 1) * decode[..., 0, :].max(-1)) + whole[..., 0]
    ends = passed[..., None] + _sum_behind_first(_weighted(period, weights))
    # Through stage j, which has its encode jobs to do first: it stays the busiest, or the path returns
    # to the stages before it, which costs a whole passage.
    slowest = _suffix_max(decode)
    through = last + _suffix_sum(decode[..., 0, :]) + (m - 1) * slowest[..., 0, :]
    steps = np.maximum(whole[..., None], m * slowest)
    stays = _sum_behind_first(_weighted(steps, weights, axis=-2), axis=-2)
    ends = np.maximum(ends, (through[..., None, :] + stays).max(-1))
    if decode.shape[-2] > 1:
        waits = (period - whole)[..., 1:]
        behind = np.cumsum(_weighted(period - whole, weights)[..., 1:], axis=-1) - waits[..., :1]
        returns = through.max(-1)[..., None] + behind
        ends[..., 1:] = np.maximum(
            ends[..., 1:], returns + _sum_behind_first(_weighted(whole, weights))[..., 1:]
        )
    return np.where(finite[..., None], ends, np.inf)


def _finite(encode_s: FloatArray, decode_s: FloatArray) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Stage times with candidates that have an infinite one set to zero, and which have none."""
    finite = np.asarray(np.isfinite(encode_s).all(-1) & np.isfinite(decode_s).all((-2, -1)))
    if finite.all():
        return encode_s, decode_s, finite
    return (
        np.where(finite[..., None], encode_s, 0.0),
        np.where(finite[..., None, None], decode_s, 0.0),
        finite,
    )


def _weighted(values: FloatArray, weights: FloatArray | None, axis: int = -1) -> FloatArray:
    """`values` times the iterations that each stands for, on the axis of iterations."""
    if weights is None:
        return values
    return values * (weights if axis == -1 else weights[..., None])


def _suffix_sum(values: FloatArray) -> FloatArray:
    return np.flip(np.cumsum(np.flip(values, -1), axis=-1), -1)


def _suffix_max(values: FloatArray) -> FloatArray:
    return np.flip(np.maximum.accumulate(np.flip(values, -1), axis=-1), -1)


def _sum_behind_first(values: FloatArray, axis: int = -1) -> FloatArray:
    """Running sums along an axis that leave its first entry out."""
    sums = np.cumsum(values, axis=axis)
    return np.asarray(sums - np.take(values, [0], axis=axis))


def _encode_paths(
    encode_s: FloatArray, m: int, gains_s: FloatArray | None, splits: int = 1
) -> tuple[FloatArray, FloatArray]:
    """Longest path from the phase's first job on stage i to an end on stage j.

    The ends are those of the first micro-batch, which is encoded in `splits` jobs, and of the last of the
    m; shape (..., P, P) each, with minus infinity below the diagonal.
    """
    num_stages = encode_s.shape[-1]
    first = np.full((*encode_s.shape, num_stages), -np.inf)
    last = first.copy()
    for i in range(num_stages):
        first[..., i, i:] = np.cumsum(encode_s[..., i:], axis=-1)
        slowest = np.maximum.accumulate(encode_s[..., i:], axis=-1)
        last[..., i, i:] = first[..., i, i:] + _times(m * splits - 1, slowest)
        first[..., i, i:] += _times(splits - 1, slowest)
    return first, last if gains_s is None else last + gains_s


def _cycle_paths(
    encode_s: FloatArray,
    decode_s: FloatArray,
    m: int,
    drains: BoolArray | None,
    gains_s: FloatArray | None,
    weights: FloatArray | None,
) -> FloatArray:
    """Longest path from a cycle's first job on stage i to its last job's end on stage j, (..., P, P).

    A path that uses several stages changes them in the first iteration; when it does matters only by
    how much an iteration's times differ from the next one's.
    """
    num_stages = encode_s.shape[-1]
    first, last = _encode_paths(encode_s, m, gains_s)
    d_first, whole, period = decode_s[..., 0, :], decode_s.sum(-1), period_s(decode_s, m)
    num_iterations = (whole > 0).sum(-1)
    paths = np.full_like(first, -np.inf)

    # No return to stage 0: along stage b for the whole cycle, between i and j.
    share = m * _weighted(decode_s, weights, axis=-2).sum(-2)
    before = np.concatenate([np.zeros_like(d_first[..., :1]), np.cumsum(d_first, axis=-1)], axis=-1)
    for b in range(num_stages):
        to = before[..., b, None] - before[..., : b + 1]
        reach = (last[..., : b + 1, : b + 1] + to[..., None, :]).max(-1)
        onward = before[..., b + 1 :] - before[..., b + 1, None]
        along = reach[..., :, None] + share[..., b, None, None] + onward[..., None, :]
        paths[..., : b + 1, b:] = np.maximum(paths[..., : b + 1, b:], along)

    # One return, at the end of encoding: then along the stages up to j, or round and round.
    up_to = np.maximum.accumulate(decode_s, axis=-1)
    entered = np.maximum(last[..., -1, None], first[..., -1, None] + (m - 1) * up_to[..., 0, None, :])
    round_or_along = _weighted(np.maximum(whole[..., None], m * up_to), weights, axis=-2)[..., 1:, :].sum(-2)
    paths = np.maximum(paths, entered + (before[..., 1:] + round_or_along)[..., None, :])

    # Another return after the last iteration but one, which every stage can have taken part in.
    through = (last + (_suffix_sum(d_first) + (m - 1) * _suffix_max(d_first))[..., None, :]).max(-1)
    slowest = (m - 1) * d_first.max(-1)
    passed = np.maximum(
        np.maximum(last[..., -1], first[..., -1] + slowest[..., None]) + whole[..., :1], through
    )
    at = np.maximum(num_iterations - 1, 0)
    last_period = np.take_along_axis(period, at[..., None], axis=-1)
    d_last = np.take_along_axis(decode_s, at[..., None, None], axis=-2)[..., 0, :]
    passed_all = passed + _weighted(period, weights)[..., 1:].sum(-1, keepdims=True)
    to_last = (passed_all - last_period)[..., :, None] + np.cumsum(d_last, axis=-1)[..., None, :]
    paths = np.where((num_iterations > 1)[..., None, None], np.maximum(paths, to_last), paths)

    if drains is not None:
        end = np.where((num_iterations > 0)[..., None], passed_all, last[..., -1])
        paths[..., 0] = np.where(drains[..., None], np.maximum(paths[..., 0], end), paths[..., 0])
    return np.asarray(paths)


def _greatest_mean(paths: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
    """Greatest mean weight of a circuit (Karp, 1978), and the longest paths of k steps from node 0."""
    num_stages = paths.shape[-1]
    visits = [np.full(paths.shape[:-1], -np.inf)]
    visits[0][..., 0] = 0.0
    for _ in range(num_stages):
        visits.append((visits[-1][..., :, None] + paths).max(-2))
    means = [(visits[-1] - visit) / (num_stages - k) for k, visit in enumerate(visits[:-1])]
    return np.min(means, axis=0).max(-1), visits


def _eigenvector(paths: FloatArray, cycle: FloatArray, visits: list[FloatArray]) -> FloatArray:
    """Where P to 2 P cycles from an empty pipeline lead, counted from stage 0; shape (..., P)."""
    num_stages = paths.shape[-1]
    state = visits[-1] - num_stages * cycle[..., None]
    offset = state
    for _ in range(num_stages):
        state = (state[..., :, None] + paths).max(-2) - cycle[..., None]
        offset = np.maximum(offset, state)
    return np.asarray(offset - offset[..., :1])
