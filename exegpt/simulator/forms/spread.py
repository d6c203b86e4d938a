"""How much micro-batches of ragged prompts stall each other while they are encoded."""

from __future__ import annotations

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.serving import Serving


def ragged_spread_s(
    serving: Serving, stages: tuple[Stage, ...], queries: FloatArray, num_jobs: int, encode_s: FloatArray
) -> FloatArray:
    """Deviation of each stage's time for one of `num_jobs` micro-batches; shape (n, num_stages).

    Parameters
    ----------
    queries : float array, shape (n,)
        Prompts of a micro-batch; a fraction means that some have one more than others.
    encode_s : float array, shape (n, num_stages)
        Mean stage times.

    Notes
    -----
    Tokens vary with the prompts and by a whole prompt where the batch does not divide.
    """
    if num_jobs == 1 or len(stages) == 1:
        return np.zeros_like(encode_s)
    mean, square = serving.mean_input, serving.rms_input**2
    counts = queries % 1 * (1 - queries % 1)
    variance = queries * serving.lengths.std_input**2 + counts * mean**2
    deviation = np.sqrt(variance)
    # One deviation more tokens: so many more queries, and so many more squared tokens.
    share = np.divide(counts * mean**2, variance, out=np.zeros_like(variance), where=variance > 0)
    more = deviation * share / mean
    squares = queries * square
    squares = squares + deviation * (share * square / mean + (1 - share) * square_per_token(serving))
    longer = serving.costs(stages).encode_s(
        queries + more, queries * mean + deviation, np.sqrt(squares / (queries + more))
    )
    return np.maximum(longer - encode_s, 0.0)


def square_per_token(serving: Serving) -> float:
    """Regression of a prompt's squared length on its length, in tokens."""
    pmf = serving.lengths.input_pmf
    n = np.arange(len(pmf), dtype=np.float64)
    deviation = n - serving.lengths.mean_input
    variance = float(pmf @ deviation**2)
    return float(pmf @ (n**2 * deviation)) / variance if variance > 0 else 0.0
