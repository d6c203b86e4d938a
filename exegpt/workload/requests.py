"""Requests drawn from a length distribution, with arrival times and probes of the bound's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from exegpt.errors import ConfigError
from exegpt.workload.lengths import RequestLengths
from exegpt.workload.pmf import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the runtime and the replay take it.

    Attributes
    ----------
    id : int
        Place in order of arrival, from 0.
    prompt : str or None
        Text, for requests that come from prompts.
    token_ids : tuple of int or None
        The input; None where only its length matters.
    input_tokens, max_output_tokens : int
        Length of the input, and the limit that generation stops at.
    forced_output_tokens : int or None
        Output length with end-of-sequence suppressed; None lets the model end.
    arrival_s : float
        When it can first be served.
    error : str or None
        Why it cannot be served at all; it fails, and the others are served.
    """

    id: int
    input_tokens: int
    max_output_tokens: int
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    forced_output_tokens: int | None = None
    arrival_s: float = 0.0
    error: str | None = None


def closed_arrivals(n: int) -> FloatArray:
    """Arrival times of a saturated system, s: all 0; shape (n,)."""
    return np.zeros(n)


def poisson_arrivals(rate_per_s: float, n: int, rng: np.random.Generator) -> FloatArray:
    """Arrival times of a Poisson process, s, the first after a random gap too; shape (n,).

    Raises
    ------
    ConfigError
        If the rate is not above 0.
    """
    if not 0 < rate_per_s < np.inf:
        raise ConfigError(f"workload.rate_per_s={rate_per_s}: must be above 0 requests/s for arrival=poisson")
    return np.cumsum(rng.exponential(1 / rate_per_s, size=n))


def trace_arrivals(arrivals_s: FloatArray | None, n: int) -> FloatArray:
    """The first `n` arrival times of a trace, s; shape (n,).

    Raises
    ------
    ConfigError
        If the trace has no arrival times, or fewer than `n`.
    """
    if arrivals_s is None:
        raise ConfigError("workload.arrival=trace: the trace has no arrival times; use closed or poisson")
    if n > len(arrivals_s):
        raise ConfigError(
            f"workload.num_requests={n}: the trace has {len(arrivals_s)} arrivals; "
            "ask for no more with workload.arrival=trace"
        )
    return arrivals_s[:n]


def sample_requests(
    lengths: RequestLengths,
    n: int,
    rng: np.random.Generator,
    *,
    vocab_size: int | None = None,
    arrivals_s: FloatArray | None = None,
) -> list[Request]:
    """Draw `n` requests with forced output lengths; the same `rng` state gives the same requests.

    Parameters
    ----------
    lengths : RequestLengths
    n : int
    rng : numpy Generator
    vocab_size : int or None
        Draw uniform token ids below it; None leaves them out (simulation needs lengths only).
    arrivals_s : float array, shape (n,), or None
        Rising arrival times in s; None is closed: all at 0.

    Raises
    ------
    ConfigError
        If `n` is below 1, or the arrival times are not `n` rising numbers.
    """
    if n < 1:
        raise ConfigError(f"workload.num_requests={n}: must be at least 1")
    arrivals = closed_arrivals(n) if arrivals_s is None else np.asarray(arrivals_s, dtype=np.float64)
    if arrivals.shape != (n,) or not np.isfinite(arrivals).all() or (np.diff(arrivals) < 0).any():
        raise ConfigError(
            f"arrival times: expected {n} rising numbers of seconds, found shape {arrivals.shape}"
        )
    inputs, outputs = lengths.sample(rng, n)
    return [
        Request(
            id=index,
            input_tokens=int(inputs[index]),
            max_output_tokens=int(outputs[index]),
            token_ids=_random_ids(rng, vocab_size, int(inputs[index])),
            forced_output_tokens=int(outputs[index]),
            arrival_s=float(arrivals[index]),
        )
        for index in range(n)
    ]


def with_probes(
    requests: Sequence[Request], num_probes: int, output_tokens: int, rng: np.random.Generator
) -> list[Request]:
    """The requests, `num_probes` of them forced to `output_tokens`, spread evenly over the order.

    Probes measure the latency of the bound's length, which few drawn requests have exactly. One
    stands at a random place in each of `num_probes` equal parts, and keeps its input and arrival.

    Raises
    ------
    ConfigError
        If there are fewer requests than probes, or `output_tokens` is below 1.
    """
    if not 0 <= num_probes <= len(requests):
        raise ConfigError(
            f"runner.num_probes={num_probes}: must lie in 0..{len(requests)}, the number of requests "
            "(workload.num_requests)"
        )
    if output_tokens < 1:
        raise ConfigError(f"probe length {output_tokens}: must be at least 1 token")
    result = list(requests)
    edges = [len(result) * part // max(num_probes, 1) for part in range(num_probes + 1)]
    for low, high in pairwise(edges):
        place = int(rng.integers(low, high))
        result[place] = replace(
            result[place], max_output_tokens=output_tokens, forced_output_tokens=output_tokens
        )
    return result


def _random_ids(rng: np.random.Generator, vocab_size: int | None, count: int) -> tuple[int, ...] | None:
    return None if vocab_size is None else tuple(rng.integers(vocab_size, size=count).tolist())
