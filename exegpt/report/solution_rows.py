"""What the solver answered, as rows of text: the schedule, its rivals, what to relax."""

from __future__ import annotations

import math
from collections.abc import Sequence

from exegpt.report.reasons import is_feasible, limit_name, reason_rows
from exegpt.report.schedule_text import Record, knobs_text, stage_texts
from exegpt.report.units import (
    ABSENT,
    format_gib,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    ratio_of,
)

_MAX_GPUS_LISTED = 8


def bound_text(value_s: float | None, bound_s: float | None) -> str:
    """A latency beside its bound: `4.20 s of 5.00 s (84.0 %)`."""
    if bound_s is None or math.isinf(bound_s):
        return f"{format_seconds(value_s)} (no bound)"
    share = ratio_of(value_s, bound_s)
    verdict = "" if share is None or share <= 1 else ", above the bound"
    return f"{format_seconds(value_s)} of {format_seconds(bound_s)} ({format_percent(share)}{verdict})"


def memory_text(record: Record) -> str:
    """Memory of the fullest GPU against the limit, and all GPUs where they differ."""
    used = record.get("memory_bytes")
    if used is None:
        return ABSENT
    per_gpu = list(used) if isinstance(used, Sequence) else [used]
    if not per_gpu:
        return ABSENT
    limit = record.get("memory_limit_bytes")
    text = format_gib(max(per_gpu))
    if limit is not None:
        text += f" of {format_gib(limit)} ({format_percent(max(per_gpu) / limit)})"
    if record.get("memory_parts_bytes"):
        # A table of its own says what each holds.
        return text
    each = [format_number(value / 2**30) for value in per_gpu]
    if len(each) > _MAX_GPUS_LISTED:
        text += f"; per GPU from {format_gib(min(per_gpu))}"
    elif len(set(each)) > 1:
        text += f"; per GPU {', '.join(each)} GiB"
    return text


def solution_title(solve: Record) -> str:
    """Heading of `solution_rows`."""
    if solve.get("status") != "infeasible":
        return "Chosen schedule"
    if solve.get("knobs"):
        return "No schedule meets all constraints; the closest"
    return "No schedule meets all constraints"


def solution_rows(solve: Record) -> list[tuple[str, str]]:
    """The chosen schedule, or what comes closest, or the constraints alone: label and value."""
    if not solve.get("knobs"):
        return _constraint_rows(solve) + _margin_rows(solve) + _search_rows(solve)
    rows = [("policy", str(solve.get("policy") or ABSENT)), ("knobs", knobs_text(solve)), *reason_rows(solve)]
    rows += [
        ("stages" if i == 0 else "", text) for i, text in enumerate(stage_texts(solve.get("stages") or ()))
    ]
    rows += [
        ("throughput", throughput_text(solve)),
        ("latency", bound_text(solve.get("latency_s"), solve.get("latency_bound_s"))),
        ("first token", _optional_bound(solve, "ttft")),
        ("per further token", _optional_bound(solve, "tpot")),
        ("memory per GPU", memory_text(solve)),
    ]
    if (text := cost_text(solve)) is not None:
        rows.append(("cost", text))
    return rows + _margin_rows(solve) + _search_rows(solve)


def _margin_rows(solve: Record) -> list[tuple[str, str]]:
    """The margins planned for: what they are, what they have to hold, and the throughput given up."""
    margins = solve.get("margins")
    if not margins:
        return []
    parts = []
    if margins.get("confidence") is not None:
        parts.append(f"latency bound met with a probability of {format_percent(margins['confidence'])}")
    if margins.get("drift_margin"):
        share = format_percent(margins["drift_margin"])
        parts.append(f"mean and deviation of output lengths may be off by {share}")
    rows = [("margins", ", ".join(parts))]
    if worst := margins.get("worst"):
        latency = bound_text(worst.get("latency_s"), solve.get("latency_bound_s"))
        rows.append(("", f"worst case: latency {latency}, memory {format_gib(worst.get('memory_bytes'))}"))
    without = margins.get("throughput_without_per_s")
    if without is None:
        rows.append(("", "no schedule without them either"))
    elif margins.get("cost") is None:
        rows.append(("", f"without them: {format_number(without)} seq/s"))
    else:
        cost = format_percent(margins["cost"])
        rows.append(("", f"cost: {cost} of throughput ({format_number(without)} seq/s without them)"))
    return rows


def _constraint_rows(solve: Record) -> list[tuple[str, str]]:
    labels = (
        ("latency", "latency_bound_s"),
        ("first token", "ttft_bound_s"),
        ("per further token", "tpot_bound_s"),
    )
    rows = [(f"bound on {label}", format_seconds(solve[key])) for label, key in labels if solve.get(key)]
    if solve.get("memory_limit_bytes"):
        rows.append(("memory per GPU", format_gib(solve["memory_limit_bytes"])))
    return rows


def _search_rows(solve: Record) -> list[tuple[str, str]]:
    rows = []
    if solve.get("throughput_upper_per_s") is not None and solve.get("gap") is not None:
        upper = format_number(solve["throughput_upper_per_s"])
        rows.append(("upper bound", f"{upper} seq/s (gap {format_percent(solve['gap'])})"))
    elif solve.get("method") == "paper":
        rows.append(("upper bound", "not proven (solver=paper takes the estimates to be monotonic)"))
    if solve.get("num_evaluations") is not None:
        size = solve.get("space_size")
        total = "" if size is None else f" of {size:,}"
        rows.append(
            (
                "search",
                f"{solve['num_evaluations']:,}{total} candidates in {format_seconds(solve.get('wall_s'))}",
            )
        )
    return rows


def throughput_text(record: Record) -> str:
    """Sequences and output tokens per second."""
    return (
        f"{format_number(record.get('throughput_per_s'))} seq/s, "
        f"{format_number(record.get('throughput_tokens_per_s'))} output tok/s"
    )


def cost_text(record: Record) -> str | None:
    """Cost of a million tokens and of an hour, in the currency of the GPU's price; None without a price."""
    if record.get("cost_per_million_output_tokens") is None:
        return None
    return (
        f"{format_number(record['cost_per_million_output_tokens'])} per million output tokens "
        f"({format_number(record['cost_per_million_tokens'])} with input tokens counted), "
        f"{format_number(record.get('cost_per_hour'))} per hour for all GPUs"
    )


def _optional_bound(record: Record, name: str) -> str:
    bound_s = record.get(f"{name}_bound_s")
    value_s = record.get(f"{name}_s")
    return format_seconds(value_s) if bound_s is None else bound_text(value_s, bound_s)


def advice_rows(solve: Record) -> list[tuple[str, str]]:
    """What the reader should know or do: why there is no schedule, search ranges that bind, notes."""
    rows = []
    for label, key in (("reason", "reason"), ("range that binds", "binding"), ("note", "notes")):
        value = solve.get(key) or ()
        rows += [(label, str(text)) for text in ([value] if isinstance(value, str) else value)]
    return rows


def policy_columns(solve: Record) -> tuple[str, ...]:
    """Columns of `policy_rows`; with a price also the cost of a million output tokens."""
    cost = ("cost/Mtok",) if solve.get("cost_per_hour") is not None else ()
    return ("policy", "seq/s", "tok/s", "latency", "TTFT", *cost, "ratio", "limit", "knobs")


def policy_title(solve: Record) -> str:
    """Heading of `policy_rows`, followed by `baseline_rows`."""
    below = "; below the line, baselines" if solve.get("baselines") else ""
    ratio = "" if solve.get("status") == "infeasible" else " (ratio: chosen throughput over this one's)"
    return f"Policies at their best under the same bound{below}{ratio}"


def policy_rows(solve: Record) -> list[tuple[str, ...]]:
    """Best schedule of each policy, or why it has none, in `policy_columns`; the best comes first.

    The ratio is the chosen throughput over that of the row: what choosing gains. The limit is what stops a
    larger batch: a constraint, `profile`, `range`, or `none` where it would only serve less.
    """
    return _compared(solve, "policies")


def baseline_rows(solve: Record) -> list[tuple[str, ...]]:
    """As `policy_rows`, of the baselines."""
    return _compared(solve, "baselines")


def _compared(solve: Record, group: str) -> list[tuple[str, ...]]:
    columns = policy_columns(solve)
    chosen = None if solve.get("status") == "infeasible" else solve.get("throughput_per_s")
    records = solve.get(group) or {}
    rows: list[tuple[str, ...]] = []
    for name in sorted(records, key=lambda name: -(records[name].get("throughput_per_s") or 0.0)):
        record = {"policy": name, **records[name]}
        if is_feasible(record):
            cells = {
                "policy": name,
                "seq/s": format_number(record["throughput_per_s"]),
                "tok/s": format_number(record.get("throughput_tokens_per_s")),
                "latency": format_seconds(record.get("latency_s")),
                "TTFT": format_seconds(record.get("ttft_s")),
                "cost/Mtok": format_number(record.get("cost_per_million_output_tokens")),
                "ratio": format_ratio(ratio_of(chosen, record["throughput_per_s"])),
                "limit": limit_name(record) or ABSENT,
                "knobs": knobs_text(record),
            }
            rows.append(tuple(cells[column] for column in columns))
        else:
            reason = record.get("infeasible", "no schedule")
            rows.append((name, *[ABSENT] * (len(columns) - 2), f"none: {reason}"))
    return rows
