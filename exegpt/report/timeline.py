"""The timeline of every stage as a trace that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exegpt.events import StageEvent
from exegpt.report.result_file import write_text
from exegpt.report.spread import pool_over_time

# Trace processes of ranks are numbered from 0; the counter of the pool is one more.
_THREAD = 0


def trace_events(events: Sequence[StageEvent]) -> list[dict[str, Any]]:
    """Events in the Trace Event Format, times in microseconds.

    Every stage is a process, named by its place and first rank, with one complete event (`X`) per
    micro-batch; a counter (`C`) follows the queries in decoding.
    """
    stages = sorted({(event.stage, event.rank) for event in events})
    trace: list[dict[str, Any]] = []
    for order, (stage, rank) in enumerate(stages):
        trace.append(_metadata("process_name", rank, {"name": f"stage {stage} (rank {rank})"}))
        trace.append(_metadata("process_sort_index", rank, {"sort_index": order + 1}))
        trace.append(_metadata("thread_name", rank, {"name": "compute"}))
    trace.extend(_complete(event) for event in sorted(events, key=lambda event: (event.start_s, event.rank)))
    counter = max((rank for _, rank in stages), default=-1) + 1
    if stages:
        trace.append(_metadata("process_name", counter, {"name": "pool"}))
        trace.append(_metadata("process_sort_index", counter, {"sort_index": 0}))
    for time_s, num_queries in zip(*pool_over_time(events), strict=True):
        trace.append(
            {
                "ph": "C",
                "name": "active queries",
                "pid": counter,
                "ts": _microseconds(float(time_s)),
                "args": {"queries": int(num_queries)},
            }
        )
    return trace


def write_trace(events: Sequence[StageEvent], path: Path) -> None:
    """Write `trace_events` as a JSON object; open the file in https://ui.perfetto.dev."""
    trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(events)}
    write_text(path, json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n")


def _metadata(name: str, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": _THREAD, "args": args}


def _complete(event: StageEvent) -> dict[str, Any]:
    start = _microseconds(event.start_s)
    return {
        "ph": "X",
        "name": event.phase,
        "cat": event.phase,
        "pid": event.rank,
        "tid": _THREAD,
        "ts": start,
        # From rounded ends, so that neighbours that touch do not overlap: Perfetto would nest them.
        "dur": round(_microseconds(event.end_s) - start, 3),
        "args": {
            "cycle": event.cycle,
            "iteration": event.iteration,
            "micro_batch": event.micro_batch,
            "queries": event.num_queries,
            "tokens": event.num_tokens,
        },
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
