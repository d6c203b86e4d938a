"""Runs, simulations and profiles as rows of text; `tables` prints them, `html` lays them out.

Records are those of `result.json`; a key that a record lacks shows as `-`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exegpt.report.schedule_text import Record
from exegpt.report.solution_rows import bound_text, throughput_text
from exegpt.report.units import ABSENT, format_number, format_percent, format_seconds, ratio_of


def run_rows(run: Record) -> list[tuple[str, str, str, str]]:
    """Quantity, predicted, measured and relative error of a run."""
    predicted, error = run.get("predicted") or {}, run.get("error") or {}
    return [
        (
            label,
            show(_find(predicted, path)),
            show(_find(run, path)),
            format_percent(_find(error, path), sign=True),
        )
        for label, path, show in _RUN_QUANTITIES
    ]


def run_facts(run: Record) -> list[tuple[str, str]]:
    """What a run did beside its rates: requests, tokens, the bound's queries, spreads."""
    requests = f"{run.get('num_completed', 0):,} of {run.get('num_requests', 0):,} completed"
    if failed := run.get("num_failed"):
        requests += f", {failed:,} failed"
    rows = [
        ("requests", requests),
        ("tokens", f"{run.get('input_tokens', 0):,} in, {run.get('output_tokens', 0):,} out"),
    ]
    if run.get("latency_bound_length_s") is not None:
        worst = format_seconds(run.get("latency_bound_length_max_s"))
        mean_s = run["latency_bound_length_s"]
        known = "latency_bound_s" in run
        mean = bound_text(mean_s, run["latency_bound_s"]) if known else format_seconds(mean_s)
        text = f"mean {mean}, worst {worst}"
        rows.append((f"latency of {run.get('num_probes', 0)} probes", text))
    spreads = [
        f"{phase} {format_percent(run[f'{phase}_stage_spread'])}"
        for phase in ("encode", "decode")
        if run.get(f"{phase}_stage_spread") is not None
    ]
    rows.append(("stage spread", ", ".join(spreads) or f"{ABSENT} (too few cycles)"))
    return rows


def simulate_title(simulate: Record) -> str:
    """Title of a simulation; says how a replay treats replicas."""
    replicas = (simulate.get("replay") or {}).get("num_replicas", 1)
    if replicas == 1:
        return "Simulated"
    return f"Simulated ({replicas} replicas: requests are dealt to them in turn, and each is replayed)"


SIMULATE_COLUMNS = ("quantity", "steady state", "replay", "difference")


def simulate_rows(simulate: Record) -> list[tuple[str, str, str, str]]:
    """Closed form beside replay; the difference is that of the closed form relative to the replay.

    A replay is finite, so filling and draining lower its throughput below the steady state.
    """
    steady, replay = simulate.get("steady") or {}, simulate.get("replay") or {}
    quantities = (
        ("throughput, seq/s", "throughput_per_s", ("throughput_per_s",), format_number),
        ("throughput, output tok/s", "throughput_tokens_per_s", ("throughput_tokens_per_s",), format_number),
        ("latency at the bound's length", "latency_s", ("latency_bound_length_s",), format_seconds),
        ("latency p50", None, ("latency_s", "p50"), format_seconds),
        ("latency p99", None, ("latency_s", "p99"), format_seconds),
        ("first token, mean", "ttft_s", ("ttft_s", "mean"), format_seconds),
        ("per further token, mean", "tpot_s", ("tpot_s", "mean"), format_seconds),
        ("wall time", None, ("wall_s",), format_seconds),
    )
    rows = []
    for label, key, path, show in quantities:
        closed = steady.get(key) if key else None
        replayed = _find(replay, path)
        difference = ratio_of(closed, replayed)
        rows.append(
            (
                label,
                show(closed),
                show(replayed),
                format_percent(None if difference is None else difference - 1, sign=True),
            )
        )
    return rows


def steady_text(steady: Record) -> str:
    """The closed form that stands beside a run, in one line."""
    if "infeasible" in steady:
        return f"steady state: none, {steady['infeasible']}"
    return (
        f"steady state, without filling and draining: {throughput_text(steady)}, "
        f"latency at the bound's length {format_seconds(steady.get('latency_s'))}"
    )


def _find(record: Record, path: Sequence[str]) -> Any:
    value: Any = record
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


RUN_COLUMNS = ("quantity", "predicted", "measured", "error")

_RUN_QUANTITIES = (
    ("throughput, seq/s", ("throughput_per_s",), format_number),
    ("throughput, output tok/s", ("throughput_tokens_per_s",), format_number),
    ("latency p50", ("latency_s", "p50"), format_seconds),
    ("latency p99", ("latency_s", "p99"), format_seconds),
    ("latency at the bound's length", ("latency_bound_length_s",), format_seconds),
    ("first token, mean", ("ttft_s", "mean"), format_seconds),
    ("per further token, mean", ("tpot_s", "mean"), format_seconds),
    ("wall time", ("wall_s",), format_seconds),
)
