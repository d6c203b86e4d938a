"""Bounds of RRA over boxes of B_E x N_D that always hold, for the boxes of many choices at once.

Given only that costs do not fall as queries, tokens or summed context grow. For a box B in [b0, b1], n in
[n0, n1], with m micro-batches, per stage:

- *Encoding.* A micro-batch has B / m queries, so m e(B / m) / B >= min over x in [b0 / m, b1 / m] of e(x)
  / x.
- *Decoding without attention.* In iteration u a micro-batch has x_u = B a_u / m queries, where sum_u a_u
  = A (the mean number of iterations, whatever n is). All x_u lie behind x = b0 min a / m. With h the
  greatest convex function below the cost f behind that point, Jensen gives m sum_u f(x_u) / B >= A h(z) /
  z at the mean z = B A / (m n), which lies in [b0 A / (m n1), b1 A / (m n0)].
- *Attention.* m sum_u g(q_u, y_u) / B >= C min g(q0, y) / y over all contexts y that the box can have,
  where C = sum_u of the context per encoded query and q0 the least queries. Likewise, with a line g(q0,
  y) >= a + s y behind the least context, m sum_u g / B >= m n a / B + s C. The greater of both.

Each sum over a cycle is thus at least B times a constant of the box. Two circuits of jobs (see
`simulator.pipeline`) cannot be shorter than

- everything that one stage does in a cycle: m (e_j + sum_u d_uj);
- from the first encode job on stage 0 through encoding, then n - 1 iterations, then the last one's first
  job: sum_j e_j + (m - 1) max_j e_j + sum_j d_1j + sum_{1<u<n} max(sum_j d_uj, m max_j d_uj) + d_n0. With
  sum_j d_uj throughout this is a sum over u < n; with m max_j d_uj it is that sum less m max_j d_1j, for
  which an upper bound is taken (the greatest corner), and plus sum_j d_1j. The last iteration has no more
  queries than the others on average and at most the greatest context.

A cycle T is at least the greater of both, and throughput = B / T at most its inverse per B. A query of D
iterations passes c = floor((D - 1) / n) cycles, an encode phase and r = D - n c further iterations, each
of at least w. With c >= c1 = floor((D - 1) / n1) that is c T + r w = D w + c (T - n w) >= D w + c1 (T1 -
n1 w) where the lower bound T1 of T exceeds n1 w; and T >= (n - 1) w + phase gives D w + c (phase - w),
which is least at the least or the greatest c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, Choice, IntArray
from exegpt.simulator.memory import OVERFLOW_SIGMAS
from exegpt.simulator.pool_tables import CUTS
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import StageKinds


@dataclass(frozen=True, slots=True)
class Prepared:
    """Arrays over the choices of a search: kinds of stages, micro-batches, replicas, memory."""

    choices: Sequence[Choice]
    kinds: StageKinds
    num_micro_batches: FloatArray
    num_replicas: FloatArray
    memory: FloatArray  # (choices, stages, 4): fixed, per K/V token, per encode token, per row


def prepare(serving: Serving, choices: Sequence[Choice]) -> Prepared:
    """What `rra_bounds` needs to know about each choice."""
    coefficients = [serving.memory_coefficients(c.stages) for c in choices]
    width = max(len(c) for c in coefficients)
    # A repeated stage changes no maximum.
    padded = [np.concatenate([c, np.repeat(c[:1], width - len(c), axis=0)]) for c in coefficients]
    return Prepared(
        choices=choices,
        kinds=serving.tables.kinds([c.stages for c in choices]),
        num_micro_batches=np.asarray([c.num_micro_batches for c in choices], dtype=np.float64),
        num_replicas=np.asarray([c.num_replicas for c in choices], dtype=np.float64),
        memory=np.asarray(padded),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """Of a stage, by kind, (n, kinds).

    Lower bounds per encoded query of its encoding, of its decoding in a cycle, in all iterations but the
    last, and in those that the bound's query takes of its last cycle; a lower bound of any iteration, an
    upper bound of a cycle's first one.
    """

    encode: FloatArray
    decode: FloatArray
    but_last: FloatArray
    final: FloatArray
    iteration: FloatArray
    first_upper: FloatArray


def rra_bounds(
    serving: Serving, prepared: Prepared, which: IntArray, batches: IntArray, extents: IntArray
) -> Bounds:
    """Bounds of boxes: choice `which` (n,), B_E in `batches` (n, 2), N_D in `extents` (n, 2)."""
    kinds = prepared.kinds.take(which)
    m, replicas = prepared.num_micro_batches[which], prepared.num_replicas[which]
    b0, b1 = batches[:, 0].astype(np.float64), batches[:, 1].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        work = _work(serving, kinds, m, b0, b1, extents)
        first = serving.tables.encode_s(kinds, b0 / m)
        phase = kinds.total(first) + (m - 1) * kinds.slowest(first)
        # Per query of the batch, so that it holds for every B of the box.
        through = (kinds.total(work.encode) + (m - 1) * kinds.slowest(work.encode)) / m
        once = kinds.total(work.iteration)
        first_turn = (np.where(np.isfinite(once), once, 0.0) / b1) - m * kinds.slowest(work.first_upper) / b0
        turns = np.maximum(kinds.total(work.but_last) / m, kinds.slowest(work.but_last) + first_turn)
        # The pipeline's first stage is its first kind.
        again = np.where(np.isfinite(work.iteration[:, 0]), work.iteration[:, 0], 0.0)
        through = through + turns + again / b1
        per_query = np.maximum(kinds.slowest(work.encode + work.decode), through)
        cycle = np.maximum(
            kinds.slowest(m[:, None] * first + b0[:, None] * work.decode),
            phase + b0 * turns + again,
        )
        final = b0 / m * kinds.total(work.final)
        latency, decode = _latency(serving, kinds.total(work.iteration), final, cycle, phase, extents)
    ends = serving.completion.iterations_of(serving.bound_output_tokens)
    return Bounds(
        throughput_upper_per_s=_clean(replicas / per_query, 0.0),
        latency_lower_s=_clean(latency, np.inf),
        ttft_lower_s=_clean(phase, np.inf),
        tpot_lower_s=_clean(decode / ends if ends else np.zeros_like(decode), np.inf),
        memory_lower_bytes=_memory(serving, prepared.memory[which], m, b0, extents),
    )


def _work(
    serving: Serving, kinds: StageKinds, m: FloatArray, b0: FloatArray, b1: FloatArray, extents: IntArray
) -> _Work:
    tables, pool = serving.tables, serving.pool_tables
    n0, n1 = extents[:, 0], extents[:, 1]
    low, high = b0 / m, b1 / m
    least = low * pool.least("active_last", n0, n1)
    # Iterations behind the longest query's end are empty and count for no mean.
    u0 = np.minimum(n0, pool.most)
    final_iterations = _final_iterations(serving, extents)
    linear, but_last, final = _linear(serving, kinds, low, high, extents, final_iterations)
    attention, last, once = np.zeros_like(linear), np.zeros_like(linear), np.zeros_like(linear)
    for part in ["context"] if tables.cross_attention is None else ["own", "inputs"]:
        whole, every, one = _attention(serving, kinds, part, least, (low, high), (n0, n1), (u0, b1, m))
        attention, last, once = attention + whole, last + every, once + one
    empty = kinds.count == 0
    encode = np.where(empty, 0.0, tables.encode_least_per_query_s(kinds, low, high))
    return _Work(
        encode=encode,
        decode=np.where(empty, 0.0, linear + attention),
        but_last=np.where(empty, 0.0, but_last + last),
        final=np.where(empty, 0.0, final + final_iterations[:, None] * once / low[:, None]),
        iteration=np.where(empty, 0.0, tables.decode_linear_s(kinds, least) + once),
        first_upper=tables.decode_s(
            kinds,
            high * pool.greatest("active_first", n0, n1),
            high * pool.greatest("context_most", n0, n1),
            high * pool.greatest("inputs_most", n0, n1),
        ),
    )


def _final_iterations(serving: Serving, extents: IntArray) -> FloatArray:
    """Least number of iterations that the bound's query takes of its last cycle; at least one."""
    ends = serving.completion.iterations_of(serving.bound_output_tokens)
    most, least = (np.maximum(ends - 1, 0) // extents[:, i] for i in (0, 1))
    return np.where(most == least, np.maximum(ends - least * extents[:, 1], 1), 1).astype(np.float64)


def _linear(
    serving: Serving,
    kinds: StageKinds,
    low: FloatArray,
    high: FloatArray,
    extents: IntArray,
    final_iterations: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Decoding without attention per encoded query: in a cycle, in all but its last iteration, in the first.

    Whatever part of the iterations is looked at, the others cost something too. The best of several parts:
    all iterations, or those with at least some share of the mean number of queries, for where the last
    iterations have fractions of a query, the function below the cost loses what does not depend on its size.
    Those parts come first in a cycle, and earlier iterations have no fewer queries.
    """
    pool, tables = serving.pool_tables, serving.tables
    n0, n1 = extents[:, 0], extents[:, 1]
    whole = np.zeros(kinds.layers.shape)
    but_last, final = whole, whole
    for k in range(len(CUTS)):
        c0, c1 = (f(f"busy_count_{k}", n0, n1) for f in (pool.least, pool.greatest))
        s0, s1 = (f(f"busy_sum_{k}", n0, n1) for f in (pool.least, pool.greatest))
        start = low * pool.least(f"busy_least_{k}", n0, n1)
        ratio = tables.decode_least_per_query_s(kinds, start, low * s0 / c1, high * s1 / c0)
        part = s0[:, None] * ratio
        whole = np.maximum(whole, part)
        but_last = np.maximum(but_last, ((c0 - 1) / c0)[:, None] * part)
        share = np.minimum(final_iterations, c0) / c1
        final = np.maximum(final, share[:, None] * part)
    return whole, but_last, final


def _attention(
    serving: Serving,
    kinds: StageKinds,
    part: str,
    least: FloatArray,
    micro_batch: tuple[FloatArray, FloatArray],
    extents: tuple[IntArray, IntArray],
    counts: tuple[FloatArray, FloatArray, FloatArray],
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Attention of a part of the context: in a cycle, in all but its last iteration, in one iteration."""
    tables, pool = serving.tables, serving.pool_tables
    table = tables.cross_attention if part == "inputs" else tables.self_attention
    assert table is not None
    u0, b1, m = counts
    y0, y1 = pool.least(f"{part}_least", *extents), pool.greatest(f"{part}_most", *extents)
    whole = pool.least(f"{part}_sum", *extents)[:, None]
    but_last = np.maximum(whole - y1[:, None], 0.0)
    y_low, y_high = (micro_batch[0] * y0)[:, None], (micro_batch[1] * y1)[:, None]
    ratio = table.least_ratio(kinds.degree, least[:, None], y_low, y_high)
    start, slope = table.line(kinds.degree, least[:, None], y_low)
    # Times per iteration of the line's start; one that is negative holds for no number of them.
    fixed = np.where(start > 0, (m / b1)[:, None] * start, -np.inf)
    cycle = np.maximum(_product(whole, ratio), u0[:, None] * fixed + whole * slope)
    rest = np.maximum(_product(but_last, ratio), (u0 - 1)[:, None] * fixed + but_last * slope)
    once = np.maximum(_product(y_low, ratio), start + slope * y_low)
    return kinds.layers * cycle, kinds.layers * np.where(u0[:, None] > 1, rest, 0.0), kinds.layers * once


def _product(tokens: FloatArray, ratio: FloatArray) -> FloatArray:
    """No tokens cost nothing, whatever each would."""
    return np.where(tokens > 0, tokens * ratio, 0.0)


def _latency(
    serving: Serving,
    iteration: FloatArray,
    final: FloatArray,
    cycle: FloatArray,
    phase: FloatArray,
    extents: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Lower bounds of the bound query's latency, and of its decode part."""
    ends = serving.completion.iterations_of(serving.bound_output_tokens)
    if ends == 0:
        return phase, np.zeros_like(phase)
    n0, n1 = extents[:, 0], extents[:, 1]
    least, most = (ends - 1) // n1, (ends - 1) // n0
    once = np.where(np.isfinite(iteration), iteration, 0.0)
    # T >= (n - 1) w + phase; the phase may be shorter than the iteration that the next cycle overlaps.
    surplus = phase - once
    decode = ends * once + np.minimum(least * surplus, most * surplus)
    decode = np.maximum(
        decode, np.where(least > 0, np.maximum(least, 1) * cycle, 0.0) + np.maximum(once, final)
    )
    whole = cycle - n1 * once
    decode = np.maximum(decode, np.where((whole >= 0) & (least > 0), ends * once + least * whole, 0.0))
    return phase + decode, decode


def _memory(
    serving: Serving, coefficients: FloatArray, m: FloatArray, b0: FloatArray, extents: IntArray
) -> FloatArray:
    """Bytes at the least batch with the least mean and the least variance of the pool, each over the N_D."""
    pool = serving.pool_tables
    mean = pool.least("pool_mean", extents[:, 0], extents[:, 1])
    variance = pool.least("pool_variance", extents[:, 0], extents[:, 1])
    return _bytes(serving, coefficients, m, b0, b0 * mean + OVERFLOW_SIGMAS * np.sqrt(b0 * variance), b0)


def candidate_memory(
    serving: Serving, coefficients: FloatArray, m: FloatArray, batch: FloatArray, n_d: IntArray
) -> FloatArray:
    """Bytes of the fullest rank of each candidate."""
    active = batch * serving.pool_tables.at("active_first", n_d)
    tokens = pool_kv_tokens(serving, batch, n_d, active)
    return _bytes(serving, coefficients, m, batch, tokens, np.maximum(active, batch))


def pool_kv_tokens(serving: Serving, batch: FloatArray, n_d: IntArray, active: FloatArray) -> FloatArray:
    """Tokens that pages must be there for: the mean, a reserve for its variance, half a page a query."""
    pool = serving.pool_tables
    tokens = batch * pool.at("pool_mean", n_d)
    tokens += OVERFLOW_SIGMAS * np.sqrt(batch * pool.at("pool_variance", n_d))
    return np.asarray(tokens + active * (serving.page_size - 1) / 2)


def _bytes(
    serving: Serving,
    coefficients: FloatArray,
    m: FloatArray,
    batch: FloatArray,
    tokens: FloatArray,
    rows: FloatArray,
) -> FloatArray:
    amounts = np.stack([np.ones_like(batch), tokens, batch / m * serving.mean_input, rows / m], axis=-1)
    return np.asarray((coefficients * amounts[:, None, :]).sum(-1).max(-1))


def _clean(values: FloatArray, instead: float) -> FloatArray:
    """`values` with `instead` for what is not a number: nothing of the box is covered by the profile."""
    return np.where(np.isnan(values), instead, values)
