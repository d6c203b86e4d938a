"""Profiles and what is supported, as rows of text; records are those of `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exegpt.report.schedule_text import Record
from exegpt.report.units import ABSENT, format_gib, format_number, format_seconds

OPERATOR_COLUMNS = ("operator", "TP", "up to", "costs")

# Shown by `operator_rows`, one line for all degrees that agree.
_BY_OPERATOR = ("limits", "provenance")


def profile_rows(profile: Record) -> list[tuple[str, str]]:
    """A profile record: a row per key and per note; what it says of single tables is `operator_rows`."""
    rows: list[tuple[str, str]] = []
    for key, value in profile.items():
        label = key.removesuffix("_s").replace("_", " ")
        match value:
            case Mapping() if key in _BY_OPERATOR:
                continue
            case Mapping():
                rows += [(f"{label}: {name}", _value_text(item)) for name, item in value.items()]
            case list() | tuple() if key == "notes":
                rows += [("note", str(note)) for note in value]
            case int() | float() if key.endswith("_s"):
                rows.append((label, format_seconds(value)))
            case _:
                rows.append((label, _value_text(value)))
    return rows


def operator_rows(profile: Record) -> list[tuple[str, str, str, str]]:
    """Where the costs of each operator come from and how far they reach; degrees that agree share a row."""
    provenance = profile.get("provenance") or {}
    degrees: dict[tuple[str, str, str], list[str]] = {}
    for name, limits in (profile.get("limits") or {}).items():
        degree, _, operator = name.rpartition(".")
        key = (operator, _value_text(limits), provenance.get(name, ABSENT))
        degrees.setdefault(key, []).append(degree.removeprefix("tp"))
    return [(name, ", ".join(sizes) or ABSENT, reach, kind) for (name, reach, kind), sizes in degrees.items()]


def support_rows(head: Record, support: Record) -> list[tuple[str, str]]:
    """The answer first, then what it rests on, what is missing and what else to know."""
    rows = [(key, str(value)) for key, value in head.items()]
    rows.append(("planning", "yes" if support["supported"] else "no"))
    rows.append(("running here", "yes" if support["runnable"] else "no"))
    if support["memory"] is not None:
        rows.append(("memory", _memory_text(support["memory"])))
    if support["window"] is not None:
        rows.append(("window", _window_text(support["window"])))
    if (profile := support["profile"]) is not None:
        rows.append(("profile", str(profile.get("path") or f"{profile['source']}, without a file")))
    for label, key in (("missing", "missing"), ("not runnable", "not_runnable"), ("note", "notes")):
        rows += [(label, str(text)) for text in support[key]]
    return rows


def _memory_text(memory: Record) -> str:
    least = memory["least_gpus"]
    needed = f"at least {least}" if least is not None else "more than there are layers"
    return (
        f"{format_gib(memory['weights_bytes'])} of weights; GPUs of {format_gib(memory['memory_bytes'])}: "
        f"needed {needed}, there {memory['num_gpus']}"
    )


def _window_text(window: Record) -> str:
    text = f"{window['tokens']:,} tokens"
    if window.get("longest_input") is not None:
        text += f", requests up to {window['longest_input']:,} in and {window['longest_output']:,} out"
    elif window.get("longest_output") is not None:
        text += f", answers up to {window['longest_output']:,}"
    return text


def _value_text(value: Any) -> str:
    match value:
        case None:
            return ABSENT
        case Mapping():
            return ", ".join(f"{key} {_value_text(item)}" for key, item in value.items())
        case list() | tuple():
            return ", ".join(map(_value_text, value))
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if value.is_integer() else format_number(value)
    return str(value)
