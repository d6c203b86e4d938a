"""Why the chosen schedule won, and what stops it and the runner-up."""

from __future__ import annotations

from exegpt.report.schedule_text import Record, batch_symbol
from exegpt.report.units import (
    format_gib,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    ratio_of,
)

_NAMES = {"memory": "memory", "latency_s": "latency", "ttft_s": "first token", "tpot_s": "per token"}


def is_feasible(record: Record) -> bool:
    """Whether a record of a policy holds a schedule rather than a reason why there is none."""
    return "infeasible" not in record and record.get("throughput_per_s") is not None


def limit_name(record: Record) -> str | None:
    """In a word or two what stops a larger batch; None if the record does not say."""
    if (further := record.get("next_batch")) is None:
        return None
    if breaks := further["breaks"]:
        return ", ".join(_NAMES.get(name, name) for name in breaks)
    if further.get("throughput_with_more_memory_per_s") is not None:
        return "memory"
    return "range" if further["throughput_per_s"] > record["throughput_per_s"] else "none"


def limit_text(record: Record) -> str | None:
    """The next larger batch and what it runs into: `B_E 82 would take 0.4 % more than the 21.6 s ..`."""
    if (further := record.get("next_batch")) is None:
        return None
    batch = f"{batch_symbol(str(record.get('policy')))} {further['batch']}"
    if "profile" in further["breaks"]:
        return f"limited by the profile: {batch} lies beyond it"
    broken = [
        f"{_NAMES[name]} ({batch} needs {_excess(name, entry)})" for name, entry in further["breaks"].items()
    ]
    if broken:
        return "limited by " + " and ".join(broken)
    if further["throughput_per_s"] > record["throughput_per_s"]:
        return f"limited by the range searched: {batch} meets all constraints and would serve more"
    if (roomier := further.get("throughput_with_more_memory_per_s")) is not None:
        return f"limited by memory: a tenth more of it would serve {format_number(roomier)} seq/s"
    rate = format_number(further["throughput_per_s"])
    return f"limited by no constraint: {batch} meets them all and serves {rate} seq/s"


def _excess(name: str, entry: Record) -> str:
    """By how much a limit is exceeded; in percent, since both are often equal in three digits."""
    show = format_gib if name == "memory" else format_seconds
    over = ratio_of(entry["value"], entry["limit"])
    percent = "more" if over is None else f"{_percent(over - 1)} more"
    return f"{percent} than {show(entry['limit'])}"


def _percent(share: float) -> str:
    return format_percent(share) if share >= 5e-4 else "under 0.1 %"


def reason_rows(solve: Record) -> list[tuple[str, str]]:
    """Which policy comes next and by how much, what stops the winner, and what stops the next."""
    if solve.get("status") == "infeasible" or not solve.get("policy"):
        return []
    lines = [_standing(solve)]
    if (own := limit_text(solve)) is not None:
        lines.append(f"{solve['policy']} is {own}")
    following = _next_best(solve.get("policies") or {}, solve["policy"])
    if following is not None and (text := limit_text(_named(solve["policies"], following))) is not None:
        lines.append(f"{following} is {text}")
    lines = [line for line in lines if line]
    return [("why" if at == 0 else "", line) for at, line in enumerate(lines)]


def _standing(solve: Record) -> str:
    """The chosen schedule against the next policy and the best baseline."""
    policies, baselines = solve.get("policies") or {}, solve.get("baselines") or {}
    following, best = _next_best(policies, solve["policy"]), _next_best(baselines, None)
    parts = []
    if following is not None:
        parts.append(f"{_gain(solve, policies[following])} of {following}, the runner-up")
    elif len(policies) > 1:
        parts.append("the only policy with a schedule")
    if best is not None:
        parts.append(f"{_gain(solve, baselines[best])} of {best}, the best baseline")
    return "; ".join(parts)


def _gain(solve: Record, other: Record) -> str:
    return format_ratio(ratio_of(solve.get("throughput_per_s"), other["throughput_per_s"]))


def _next_best(records: Record, chosen: str | None) -> str | None:
    rates = {n: r["throughput_per_s"] for n, r in records.items() if n != chosen and is_feasible(r)}
    return max(rates, key=lambda name: rates[name]) if rates else None


def _named(records: Record, name: str) -> Record:
    return {"policy": name, **records[name]}
