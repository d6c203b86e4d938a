"""Mean encode times of batches that count prompts, whose tokens vary.

Few prompts take no less time for being short than a kernel's floor, so the mean time of batches is longer
than that of the mean batch. DISAGGREGATED counts prompts, and so does WAA in batches too small to weigh
(`policies.waa`). A batch of b prompts has b mean + sqrt(b) (x - mean) tokens for x of the prompts' lengths,
likewise its squares: exact for one prompt, and of the right variance for more.
"""

from __future__ import annotations

import numpy as np

from exegpt.policies.waa import LEAST_WEIGHED_BATCH
from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.pipeline import BoolArray
from exegpt.simulator.serving import Serving
from exegpt.specs import Policy

# Parts of equal probability that lengths are taken in, each at its mean.
STRATA = 8


def is_counted(policy: Policy, batch: FloatArray) -> BoolArray:
    """Which batches count prompts."""
    return np.asarray((batch < LEAST_WEIGHED_BATCH) | (policy is Policy.DISAGGREGATED))


def batch_encode_s(
    serving: Serving, policy: Policy, stages: tuple[Stage, ...], batch: FloatArray
) -> FloatArray:
    """Mean stage times of batches, (n, stages); not below those of mean prompts, which the bounds take."""
    return batch_encode_upper_s(serving, policy, stages, batch, batch)


def batch_encode_upper_s(
    serving: Serving, policy: Policy, stages: tuple[Stage, ...], low: FloatArray, high: FloatArray
) -> FloatArray:
    """Upper bounds of `batch_encode_s` over low <= batch <= high; exact where they are the same.

    Tokens rise with the batch; the root mean square of the prompts' lengths is greatest at either end.
    """
    usual = serving.encode_s(stages, high)
    mine = np.flatnonzero(is_counted(policy, low))
    if not len(mine) or not serving.lengths.std_input:
        return usual
    at_low, at_high = (_amounts(serving, b[mine, None]) for b in (low, high))
    rms = np.maximum(at_low[1], at_high[1])
    times = serving.costs(stages).encode_s(high[mine, None], at_high[0], rms).mean(axis=1)
    usual[mine] = np.maximum(usual[mine], times)
    return usual


def _amounts(serving: Serving, batch: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Tokens and root-mean-square lengths of batches (n, 1) in every part, (n, STRATA)."""
    lengths, square = serving.lengths, serving.lengths.mean_square_input
    n = np.arange(len(lengths.input_pmf), dtype=np.float64)
    ends = np.append(0.0, np.cumsum(lengths.input_pmf))
    cuts = np.linspace(0, ends[-1], STRATA + 1)
    share = np.diff(np.clip(ends[None, :], cuts[:-1, None], cuts[1:, None]), axis=1) * STRATA / ends[-1]
    longer = np.sqrt(batch) * (share @ n - serving.mean_input)
    squares = batch * square + np.sqrt(batch) * (share @ n**2 - square)
    return batch * serving.mean_input + longer, np.sqrt(squares / batch)
