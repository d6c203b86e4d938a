"""Continuous batching seen from one slot: how much work its queries bring in a window of turns.

A slot is taken by a new query in the turn after its last one ended. A query of D decode iterations holds it
for T = D + 1 turns: in the first its prompt is encoded, in the i-th after that it attends to input + i
tokens. Slots are independent renewal processes, so the work of all of them over a window of turns has the
variance of one times their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.serving import Serving


@dataclass(frozen=True, slots=True)
class WindowWork:
    """Mean (3,) and covariance (3, 3) of what one slot brings in a window of turns in the steady state.

    In order: queries that join, prompt tokens encoded, context tokens attended to.
    """

    mean: FloatArray
    covariance: FloatArray


def window_work(serving: Serving, num_turns: int) -> WindowWork:
    """Work of one slot in `num_turns` turns, of which the first is any.

    The slot is found at position j of a query of D iterations with probability p(D) / (E[D] + 1) for each
    j = 0..D. What it brings is the rest of that query's work, and that of a window that begins with a new
    query (`_fresh`) after it.
    """
    queries = _Queries.of(serving)
    firsts, seconds = _fresh(queries, num_turns)
    longest = len(queries.p) - 1
    turns = queries.mean_iterations + 1
    # Position 0: a query joins in the first turn.
    mean, square = firsts[num_turns] / turns, seconds[num_turns] / turns
    iterations = np.arange(longest + 1)
    for left in range(1, longest + 1):
        inside = min(left, num_turns)
        # Queries with D >= left are at position D - left + 1, and attend to input + position, + 1, ..
        d = iterations[left:]
        base = inside * (d - left + 1) + inside * (inside - 1) / 2
        p, p1, p2 = (m[left:] / turns for m in (queries.p, queries.p_input, queries.p_square))
        weight = float(p.sum())
        first = float(inside * p1.sum() + base @ p)
        second = float(inside**2 * p2.sum() + 2 * inside * (base @ p1) + base**2 @ p)
        rest = num_turns - inside
        after, after2 = firsts[rest], seconds[rest]
        brought = np.array([0.0, 0.0, first])
        mean = mean + brought + weight * after
        square = square + weight * after2 + np.outer(brought, after) + np.outer(after, brought)
        square[2, 2] += second
    return WindowWork(mean, square - np.outer(mean, mean))


@dataclass(frozen=True, slots=True)
class _Queries:
    """By D = 0, 1, ..: p(D), and p(D) times mean and mean square input."""

    p: FloatArray
    p_input: FloatArray
    p_square: FloatArray
    mean_iterations: float

    @classmethod
    def of(cls, serving: Serving) -> _Queries:
        lengths, completion = serving.lengths, serving.completion
        offset = len(lengths.output_pmf) - 1 - completion.max_iterations
        p = lengths.output_pmf[offset:]
        return cls(
            p,
            p * lengths.mean_input_by_output[offset:],
            p * lengths.mean_square_input_by_output[offset:],
            completion.mean_iterations,
        )


def _fresh(queries: _Queries, num_turns: int) -> tuple[FloatArray, FloatArray]:
    """First (w, 3) and second (w, 3, 3) moments of windows of w = 0..num_turns that begin with a query.

    A query that ends inside the window brings its work and leaves a shorter one; both moments follow from
    those of the shorter windows (renewal equations).
    """
    longest = len(queries.p) - 1
    weights = (queries.p, queries.p_input, queries.p_square)
    whole1, whole2 = _work(np.arange(longest + 1.0), *weights)
    tails = [np.append(np.cumsum(w[::-1])[::-1], 0.0) for w in weights]
    firsts, seconds = np.zeros((num_turns + 1, 3)), np.zeros((num_turns + 1, 3, 3))
    for w in range(1, num_turns + 1):
        # Queries of T = D + 1 <= w turns end in the window, and leave w - T of it.
        ended = min(w, longest + 1)
        rest = w - 1 - np.arange(ended)
        p, after = queries.p[:ended], firsts[rest]
        mean = whole1[:ended].sum(0) + p @ after
        cross = np.einsum("ti,tj->ij", whole1[:ended], after)
        square = whole2[:ended].sum(0) + cross + cross.T + np.tensordot(p, seconds[rest], axes=1)
        # The others decode to its end.
        cut1, cut2 = _work(np.array([w - 1.0]), *(np.array([tail[ended]]) for tail in tails))
        firsts[w], seconds[w] = mean + cut1[0], square + cut2[0]
    return firsts, seconds


def _work(
    iterations: FloatArray, p: FloatArray, p_input: FloatArray, p_square: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Moments of a joining query's work over so many iterations, times its probability; (n, 3), (n, 3, 3).

    Its work is (1, 0, k (k + 1) / 2) + input (0, 1, k) for k iterations.
    """
    own, per_token = np.zeros((2, len(iterations), 3))
    own[:, 0], own[:, 2] = 1.0, iterations * (iterations + 1) / 2
    per_token[:, 1], per_token[:, 2] = 1.0, iterations
    mean = own * p[:, None] + per_token * p_input[:, None]

    def outer(a: FloatArray, b: FloatArray, weight: FloatArray) -> FloatArray:
        return np.asarray(a[:, :, None] * b[:, None, :] * weight[:, None, None])

    crossed = outer(own, per_token, p_input)
    square = outer(own, own, p) + crossed + crossed.transpose(0, 2, 1)
    return mean, square + outer(per_token, per_token, p_square)
