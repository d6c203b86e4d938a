"""Timing rules of a pipeline with micro-batches, from stage times.

With P stages of times t_j for one micro-batch and m micro-batches: a phase of m micro-batches takes
sum_j t_j + (m - 1) max_j t_j; a decode iteration takes max(m max_j t_j, sum_j t_j), since a
micro-batch's next token cannot start before its last one left the pipeline (design, section 4).
"""

from __future__ import annotations

import numpy as np

from exegpt.profiler.grid import FloatArray


def phase_s(stage_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """Time for m micro-batches to pass an empty pipeline; stages on the last axis."""
    return np.asarray(stage_s.sum(-1) + (num_micro_batches - 1) * stage_s.max(-1))


def period_s(stage_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """Time of one decode iteration amid others; stages on the last axis."""
    return np.asarray(np.maximum(num_micro_batches * stage_s.max(-1), stage_s.sum(-1)))


def finish_s(encode_s: FloatArray, decode_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """When the last micro-batch ends each decode iteration, counted from the start of encoding.

    Parameters
    ----------
    encode_s : float array, shape (..., P)
    decode_s : float array, shape (..., n, P)

    Returns
    -------
    float array, shape (..., n)
        The last micro-batch enters decoding when its encoding has left the pipeline, and then ends
        an iteration every period. A stage that still works off the encode phase delays it further:
        it has done its whole share of encoding and of the iterations before.
    """
    m = num_micro_batches
    first = phase_s(encode_s, m)[..., None] + decode_s[..., :1, :].sum(-1)
    periods = period_s(decode_s[..., 1:, :], m)
    chain = np.concatenate([first, first + np.cumsum(periods, axis=-1)], axis=-1)
    # Stage j starts encoding when the first micro-batch reaches it, and after its last decode job
    # the micro-batch passes the stages behind it.
    reach = np.cumsum(encode_s, axis=-1) - encode_s
    work = m * (encode_s[..., None, :] + np.cumsum(decode_s, axis=-2))
    # Summed from the last stage: a difference of sums would be NaN where a time is infinite.
    behind = np.zeros_like(decode_s)
    behind[..., :-1] = np.flip(np.cumsum(np.flip(decode_s[..., 1:], -1), axis=-1), -1)
    busiest = (reach[..., None, :] + work + behind).max(-1)
    return np.asarray(np.maximum(chain, busiest))


def cycle_s(encode_s: FloatArray, decode_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """Time from one encode phase's start to the next one's in the steady state.

    The next phase starts as soon as stage 0 has issued its last decode job; what the later stages
    still have to do overlaps with it. A stage can be no faster than its whole share of the cycle.

    Parameters
    ----------
    encode_s : float array, shape (..., P)
    decode_s : float array, shape (..., n, P)

    Returns
    -------
    float array, shape (...)
    """
    m = num_micro_batches
    share = (m * (encode_s + decode_s.sum(-2))).max(-1)
    chain = phase_s(encode_s, m) + decode_s[..., 0, 0] + period_s(decode_s[..., 1:, :], m).sum(-1)
    return np.asarray(np.maximum(share, chain))
