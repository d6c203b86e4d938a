"""What the memory of every GPU of the chosen schedule is for, as rows of text."""

from __future__ import annotations

from itertools import groupby

from exegpt.report.schedule_text import Record, ranks_text
from exegpt.report.units import ABSENT, format_number, format_percent, ratio_of

_GIB = 2**30
# Names in files, and what they are called here.
_PARTS = {"weights": "weights", "kv": "K/V", "activations": "activations", "runtime": "runtime"}


def memory_columns(solve: Record) -> tuple[str, ...]:
    """Columns of `memory_rows`; empty for a record that does not say what its memory is for."""
    parts = solve.get("memory_parts_bytes") or {}
    if not parts or not solve.get("memory_bytes"):
        return ()
    return ("GPUs", *(_PARTS.get(name, name) for name in parts), "total", "free", "of limit")


def memory_title(solve: Record) -> str:
    """Heading of `memory_rows`."""
    limit = solve.get("memory_limit_bytes")
    title = "Memory per GPU, GiB" + ("" if limit is None else f" (limit {format_number(limit / _GIB)})")
    return title + (", of one replica" if solve.get("num_replicas", 1) > 1 else "")


def memory_rows(solve: Record) -> list[tuple[str, ...]]:
    """A line per run of GPUs whose memory is the same as far as three digits show."""
    if not memory_columns(solve):
        return []
    parts, limit = solve["memory_parts_bytes"], solve.get("memory_limit_bytes")
    lines = []
    for rank, total in enumerate(solve["memory_bytes"]):
        used = [part[rank] for part in parts.values()]
        free = ABSENT if limit is None else format_number((limit - total) / _GIB)
        cells = (*(format_number(value / _GIB) for value in (*used, total)), free)
        lines.append((rank, (*cells, format_percent(ratio_of(total, limit)))))
    rows = []
    for cells, run in groupby(lines, key=lambda line: line[1]):
        rows.append((ranks_text([rank for rank, _ in run]), *cells))
    return rows
