"""A run or a replay in figures: the `run` record of `result.json`, and how far a prediction was off."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from exegpt.events import RequestRecord, StageEvent
from exegpt.report.spread import worst_spread

Statistics = dict[str, float | None]

_COMPARED: Mapping[str, tuple[str, ...]] = {
    "latency_s": ("mean", "p50", "p99"),
    "ttft_s": ("mean", "p50", "p99"),
    "tpot_s": ("mean", "p50", "p99"),
}
_COMPARED_SCALARS = ("throughput_per_s", "throughput_tokens_per_s", "wall_s", "latency_bound_length_s")


def is_complete(record: RequestRecord) -> bool:
    """Whether the request was served to its end: not failed, not cut off by the end of the job."""
    return record.status == "ok" and record.finish_reason is not None and bool(record.token_s)


def distribution(values: Sequence[float]) -> Statistics:
    """Mean, p50, p90, p99 (linear between order statistics) and max; all None without a value."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "mean": float(np.mean(values)),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(max(values)),
    }


def latencies_s(records: Sequence[RequestRecord]) -> list[float]:
    """Latency from encode start of every complete request."""
    return [
        record.token_s[-1] - record.encode_start_s
        for record in records
        if is_complete(record) and record.encode_start_s is not None
    ]


def summarise_run(
    records: Sequence[RequestRecord],
    events: Sequence[StageEvent],
    *,
    bound_length_ids: Collection[int] | None = None,
) -> dict[str, Any]:
    """The `run` record of a run or a replay.

    Parameters
    ----------
    records : sequence of RequestRecord
        All requests: complete, failed, and those that the end of the job cut off.
    events : sequence of StageEvent
        All stage events; only the stage spreads need them.
    bound_length_ids : ids, optional
        The probes: requests forced to the output length of the bound.

    Returns
    -------
    dict
        Counts, tokens, rates and latencies of the complete requests only (`is_complete`); requests
        that are neither complete nor failed are the difference of `num_requests`. `wall_s` runs from
        the first encode start to the last token of any request. `latency_s` and `ttft_s` run from encode
        start, `e2e_latency_s` from arrival; `tpot_s` is the mean time per further token of requests
        with at least two. `inter_token_s` has p50, p99 and max of the gaps within a request, each
        as a distribution over requests. `latency_bound_length_s` is the mean over the complete
        probes, `latency_bound_length_max_s` the worst. The spreads are `spread.worst_spread`. What
        has no value is None.
    """
    complete = [record for record in records if is_complete(record)]
    started = [record.encode_start_s for record in records if record.encode_start_s is not None]
    ended = [record.token_s[-1] for record in records if record.token_s]
    wall_s = max(ended) - min(started) if started and ended else None
    output_tokens = sum(record.output_tokens for record in complete)
    probe_ids = frozenset(bound_length_ids or ())
    probes = distribution(latencies_s([record for record in records if record.id in probe_ids]))
    gaps = [np.diff(record.token_s) for record in complete if record.output_tokens > 1]
    return {
        "num_requests": len(records),
        "num_completed": len(complete),
        "num_failed": sum(record.status == "failed" for record in records),
        "input_tokens": sum(record.input_tokens for record in complete),
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "throughput_per_s": _rate(len(complete), wall_s),
        "throughput_tokens_per_s": _rate(output_tokens, wall_s),
        "latency_s": distribution(latencies_s(complete)),
        "e2e_latency_s": distribution([record.token_s[-1] - record.arrival_s for record in complete]),
        "ttft_s": distribution(
            [r.token_s[0] - r.encode_start_s for r in complete if r.encode_start_s is not None]
        ),
        "tpot_s": distribution([float(gap.mean()) for gap in gaps]),
        "inter_token_s": {
            "p50": distribution([float(np.percentile(gap, 50)) for gap in gaps]),
            "p99": distribution([float(np.percentile(gap, 99)) for gap in gaps]),
            "max": distribution([float(gap.max()) for gap in gaps]),
        },
        "num_probes": len(probe_ids),
        "latency_bound_length_s": probes["mean"],
        "latency_bound_length_max_s": probes["max"],
        "decode_stage_spread": worst_spread(events, "decode"),
        "encode_stage_spread": worst_spread(events, "encode"),
    }


def relative_errors(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Relative errors (predicted - measured) / measured of two `run` records.

    Returns
    -------
    dict
        `throughput_per_s`, `throughput_tokens_per_s`, `wall_s` and `latency_bound_length_s` as numbers,
        `latency_s`, `ttft_s` and `tpot_s` as {`mean`, `p50`, `p99`}; None where a side has no
        figure or zero was measured.
    """
    errors: dict[str, Any] = {
        key: _relative_error(predicted.get(key), measured.get(key)) for key in _COMPARED_SCALARS
    }
    for key, statistics in _COMPARED.items():
        before, after = predicted.get(key) or {}, measured.get(key) or {}
        errors[key] = {name: _relative_error(before.get(name), after.get(name)) for name in statistics}
    return errors


def _rate(count: int, wall_s: float | None) -> float | None:
    return count / wall_s if count and wall_s else None


def _relative_error(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or not measured:
        return None
    return (predicted - measured) / measured
