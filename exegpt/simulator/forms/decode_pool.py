"""The pool of a decode pipeline that has GPUs of its own, and how fast it drains.

B queries in m micro-batches take an iteration of T(B) = max(m max_j d_j, sum_j d_j) at B / m queries
each, so they end at the rate B / (E[D] T(B)): the drain. Costs are piecewise linear, and so is T between
pools that are close together: it is looked up at `NUM_POOLS` pools once per pipeline.

Micro-batches go round in a fixed order, so all of them take as long as the slowest: the second term of
T is that of the micro-batch with the longest contexts (`_wait_for_longest`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.memory import OVERFLOW_SIGMAS
from exegpt.simulator.ragged import longest_of
from exegpt.simulator.serving import Serving

# Every pool up to the first number, or up to m; then so many more, each a few per cent above the last.
DENSE_POOLS = 48
NUM_POOLS = 224


# Degree and layers of every stage.
PipelineKey = tuple[tuple[int, int], ...]


def pipeline_key(stages: tuple[Stage, ...]) -> PipelineKey:
    """What a pipeline's times and memory depend on."""
    return tuple((stage.tp_size, stage.num_layers) for stage in stages)


class PoolMoments:
    """Means and variances over the queries of a pool in the steady state, per active query.

    Attributes
    ----------
    mean_iterations : float
        E[D].
    context_tokens, input_tokens : float
        Mean tokens attended to, and those of them that are prompt.
    tokens_variance : float
        Of the pool's summed context. The larger of two: of a pool fed evenly, whose cohorts each lose
        queries at random, and of a pool of constant number, whose queries have random ages.
    age_variance : float
        Of the context of one query of random age.
    count_variance : float
        Of the number of queries of a pool fed evenly: sum_a G(a) (1 - G(a)) / E[D].
    handed_tokens : float
        Prompt tokens per encoded query whose K/V is handed over; queries with D = 0 end before.
    """

    def __init__(self, serving: Serving) -> None:
        completion = serving.completion
        alive, context = completion.survival, completion.context
        self.mean_iterations = completion.mean_iterations
        # Where no query decodes nothing is divided by E[D] but zeros.
        total = self.mean_iterations or 1.0
        ages = np.arange(len(alive))
        self.context_tokens = float(alive @ context) / total
        self.input_tokens = float(alive @ np.maximum(context - 1 - ages, 0.0)) / total
        cohorts = completion.pool_tokens_moments(1)[1] / total
        squares = cohorts + float(((alive * context) ** 2).sum()) / total
        self.age_variance = max(squares - self.context_tokens**2, 0.0)
        self.tokens_variance = max(cohorts, self.age_variance)
        self.count_variance = float((alive * (1 - alive)).sum()) / total
        self.handed_tokens = float(alive[0] * max(context[0] - 1, 0.0))


@dataclass(frozen=True, slots=True)
class Pools:
    """Pools of one decode pipeline; every array has shape (NUM_POOLS,) or is padded to it.

    Attributes
    ----------
    size : float array
        Queries, rising.
    period_s : float array
        T; infinite where the profile does not cover the pool with its reserve.
    passage_s : float array
        Sum of the stages' times: the least time from an iteration's start to its tokens.
    last_s : float array
        The time from an iteration's start to its tokens. Where stage 0 is the slowest, micro-batches
        wait in front of it, before an iteration starts; else in front of the slowest, while it lasts.
    drain_per_s : float array
        Queries that end per second.
    kv_tokens : float array
        Context of the pool with its reserve; page rounding included.
    room_tokens : float array
        K/V tokens that memory has room for beside weights and what this pool needs to compute.
    """

    size: FloatArray
    period_s: FloatArray
    passage_s: FloatArray
    last_s: FloatArray
    drain_per_s: FloatArray
    kv_tokens: FloatArray
    room_tokens: FloatArray


class DecodePools:
    """Looks pools up for decode pipelines, and keeps them."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._found: dict[tuple[PipelineKey, int], Pools] = {}

    @cached_property
    def moments(self) -> PoolMoments:
        """Moments of a query in a pool."""
        return PoolMoments(self.serving)

    def of(self, stages: tuple[Stage, ...], num_micro_batches: int) -> Pools:
        """Pools of a pipeline."""
        # Where a pipeline's ranks lie makes no difference.
        key = (pipeline_key(stages), num_micro_batches)
        if key not in self._found:
            # Beyond the profile times are infinite, and their differences NaN, which covers nothing.
            with np.errstate(invalid="ignore", divide="ignore"):
                self._found[key] = self._look_up(stages, num_micro_batches)
        return self._found[key]

    def kv_tokens(self, pool: FloatArray, under_way: FloatArray) -> FloatArray:
        """K/V tokens of a pool and of queries under way to it, with the reserve and page rounding.

        The reserve covers the variance of independent queries at `OVERFLOW_SIGMAS`; a page is half
        empty on average.
        """
        moments, serving = self.moments, self.serving
        half_page = (serving.page_size - 1) / 2
        reserve = OVERFLOW_SIGMAS * np.sqrt(pool * moments.tokens_variance)
        held = pool * (moments.context_tokens + half_page)
        return np.asarray(held + reserve + under_way * (serving.mean_input + 1 + half_page))

    def _look_up(self, stages: tuple[Stage, ...], m: int) -> Pools:
        serving, moments = self.serving, self.moments
        limit = min(serving.profile.layers[s.tp_size].decode_overhead.limit() for s in stages)
        size = _pool_sizes(limit * m, m)
        busy = np.minimum(np.floor(size), m)
        stage_s, spread = self._mean_stage_s(stages, size / busy)
        # Isotone, as the bounds need it: the mean over a cliff's spread may fall behind it.
        stage_s = np.maximum.accumulate(stage_s, axis=0)
        passage, slowest = stage_s.sum(-1), stage_s.max(-1)
        more = size + OVERFLOW_SIGMAS * np.sqrt(size * moments.count_variance)
        tokens = size * moments.context_tokens + OVERFLOW_SIGMAS * np.sqrt(size * moments.tokens_variance)
        # Pools vary: only those count whose reserve the profile covers too.
        covered = np.isfinite(self._stage_s(stages, more / busy, tokens / busy)).all(-1)
        covered = np.logical_and.accumulate(covered & np.isfinite(spread))
        period = np.maximum(busy * slowest, passage)
        if m > 1:
            period = period + _wait_for_longest(spread, period - passage, m)
        period = np.where(covered, np.maximum.accumulate(period), np.inf)
        last = np.where(stage_s[:, 0] >= slowest, passage, period)
        drain = np.where(covered, size / (moments.mean_iterations * period), 0.0)
        return Pools(
            size=size,
            period_s=period,
            passage_s=np.where(covered, passage, np.inf),
            last_s=np.where(covered, last, np.inf),
            drain_per_s=drain,
            kv_tokens=self.kv_tokens(size, np.zeros_like(size)),
            room_tokens=self._room_tokens(stages, size / busy),
        )

    def _mean_stage_s(self, stages: tuple[Stage, ...], queries: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean stage times of micro-batches, (n, stages), and the deviation of their passage, (n,).

        Contexts of a micro-batch are normal; costs are not linear in them, so their mean is taken by
        Gauss and Hermite's rule of three points, at 0 and at the root of 3 deviations to either side.
        """
        moments = self.moments
        context = queries * moments.context_tokens
        aside = np.sqrt(3 * queries * moments.age_variance)
        least = queries * moments.input_tokens if self.serving.model.is_encoder_decoder else 0.0
        low, middle, high = (
            self._stage_s(stages, queries, np.maximum(tokens, least))
            for tokens in (context - aside, context, context + aside)
        )
        spread = (high - low).sum(-1) / (2 * math.sqrt(3))
        return (low + 4 * middle + high) / 6, spread

    def _stage_s(self, stages: tuple[Stage, ...], queries: FloatArray, context: FloatArray) -> FloatArray:
        return self.serving.decode_s(stages, queries, context, queries * self.moments.input_tokens)

    def _room_tokens(self, stages: tuple[Stage, ...], rows: FloatArray) -> FloatArray:
        zero = np.zeros_like(rows)
        fixed = self.serving.memory(stages, zero, zero, rows).total_bytes
        per_token = self.serving.memory(stages, zero + 1, zero, rows).total_bytes - fixed
        return np.asarray(((self.serving.memory_bytes - fixed) / per_token).min(-1))


def meeting_point(
    load: FloatArray, left: FloatArray, right: FloatArray, left_s: FloatArray, right_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The pool between two neighbours at which the drain reaches an inflow, and where it lies (0 to 1).

    Parameters
    ----------
    load : float array
        Inflow times E[D].
    left, right, left_s, right_s : float arrays
        The neighbours and T there; the drain reaches the inflow at `right`, not at `left`, or both are
        the least pool.

    Notes
    -----
    Between two pools T is a line with slope s, so B = load T(B) is linear in B. The drain is higher at
    `right` than at `left`, which makes the line's value at B = 0 positive; so the drain rises all the
    way, there is one such B, and it rises with the load. Below the least pool, a single query, the
    pipeline is empty at times, and an iteration takes as long as that of one query.
    """
    width = np.maximum(right - left, 1e-9)
    slope = np.where(right > left, (right_s - left_s) / width, 0.0)
    pool = load * (left_s - slope * left) / (1 - load * slope)
    share = np.where(right > left, np.clip((pool - left) / width, 0.0, 1.0), 0.0)
    return pool, share


def between(left: FloatArray, right: FloatArray, share: FloatArray) -> FloatArray:
    """Value at `share` of the way from `left` to `right`, which may be infinite if not reached."""
    return np.where(share < 1, left * (1 - share) + np.where(share > 0, right, 0.0) * share, right)


def _wait_for_longest(spread_s: FloatArray, slack_s: FloatArray, num_micro_batches: int) -> FloatArray:
    """E[(max_k X_k - slack)^+] over the micro-batches' deviations X_k from their mean passage.

    X_k is normal with deviation `spread_s`; the longest of m is taken as normal too, with the mean
    of that maximum and 0.75 of the deviation (0.83 for two, 0.70 for four).
    """
    mean = longest_of(spread_s, np.zeros_like(spread_s), num_micro_batches) - slack_s
    deviation = np.maximum(0.75 * spread_s, 1e-15)
    z = np.clip(mean / deviation, -8.0, 8.0)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in z])
    # Below -8 deviations nothing waits, above 8 everything does.
    return np.asarray(np.where(mean > 8 * deviation, mean, deviation * (density + z * below)))


def _pool_sizes(limit: float, num_micro_batches: int) -> FloatArray:
    """`NUM_POOLS` rising sizes; behind the limit, where nothing is covered, they go on."""
    dense = np.arange(1.0, max(DENSE_POOLS, num_micro_batches) + 1)
    sparse = NUM_POOLS - len(dense)
    if sparse < 1:
        return dense
    top = max(limit, 2 * dense[-1])
    return np.concatenate([dense, np.geomspace(dense[-1], top, sparse + 1)[1:]])
