"""Readers of request traces: input and output lengths, and arrival times where there are any."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exegpt.errors import TraceError
from exegpt.workload.files import KEY, file_kind, json_lines, parse_json, read_bytes, read_text
from exegpt.workload.lengths import RequestLengths, independent, joint
from exegpt.workload.pmf import FloatArray, IntArray
from exegpt.workload.servegen import MAX_TOKENS, average_windows


@dataclass(frozen=True, slots=True)
class Layout:
    """Column names of a known trace format. `arrival_unit_s` is None for wall-clock times."""

    name: str
    input_column: str
    output_column: str
    arrival_column: str | None = None
    arrival_unit_s: float | None = 1.0


LAYOUTS = (
    Layout("Azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP", None),
    Layout("Mooncake", "input_length", "output_length", "timestamp", 1e-3),
    Layout("Etalon", "num_prefill_tokens", "num_decode_tokens"),
    Layout("LLMServingSim", "input_toks", "output_toks", "arrival_time"),
    Layout("input_tokens and output_tokens", "input_tokens", "output_tokens", "arrival_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceLengths:
    """What a trace says about its requests.

    Attributes
    ----------
    pairs : int array, shape (n, 2), or None
        Input and output tokens in order of arrival; None if the file holds distributions only.
    input_pmf, output_pmf : float arrays or None
        The distributions of such a file.
    arrivals_s : float array, shape (n,), or None
        Arrival times in s from the first, rising.
    description : str
    notes : tuple of str
        Rows left out, and why.
    """

    pairs: IntArray | None = None
    input_pmf: FloatArray | None = None
    output_pmf: FloatArray | None = None
    arrivals_s: FloatArray | None = None
    description: str
    notes: tuple[str, ...] = ()

    def lengths(self) -> RequestLengths:
        """The trace as a length distribution, joint where pairs are known."""
        if self.pairs is not None:
            return joint(self.pairs, description=self.description, notes=self.notes)
        assert self.input_pmf is not None
        assert self.output_pmf is not None
        return independent(self.input_pmf, self.output_pmf, description=self.description, notes=self.notes)


def read_pairs(
    path: Path, *, input_column: str | None = None, output_column: str | None = None
) -> TraceLengths:
    """Read a trace: CSV, JSONL, JSON or Parquet by its name, each also with .gz appended.

    Parameters
    ----------
    path : Path
    input_column, output_column : str or None
        Columns with the numbers of tokens; None for a known layout (`LAYOUTS`, or ServeGen's windowed
        distributions). Arrival times are read only where all columns are those of a known layout.

    Raises
    ------
    TraceError
        If the file cannot be read as a trace, or a length is no whole number from 0 to 10,000,000.

    Notes
    -----
    Rows with 0 input or 0 output tokens are requests that failed or were cancelled. They are left
    out, and a note gives their number.
    """
    if (input_column is None) != (output_column is None):
        raise TraceError("workload.input_column and workload.output_column: set both, or neither")
    kind = file_kind(path)
    match kind:
        case ".csv":
            places, rows = _csv_rows(path)
        case ".jsonl" | ".ndjson":
            places, rows = _json_rows(path, json_lines(path, read_text(path)))
        case ".json":
            data = parse_json(path, read_text(path))
            if isinstance(data, dict):
                return _from_windows(path, data)
            if not isinstance(data, list):
                raise TraceError(f"{KEY}={path}: expected a list of requests or ServeGen's windows")
            places, rows = _json_rows(path, [(f"item {n}", value) for n, value in enumerate(data, start=1)])
        case ".parquet":
            places, rows = _parquet_rows(path)
        case _:
            raise TraceError(
                f"{KEY}={path}: unknown kind of file {kind!r}; "
                "known: .csv, .jsonl, .json, .parquet, each also with .gz"
            )
    if not rows:
        raise TraceError(f"{KEY}={path}: has a header, but no rows")
    columns = [column for column in rows[0] if column is not None]
    layout = _find_layout(path, columns, input_column, output_column)
    return _from_rows(path, layout, places, rows)


def _from_windows(path: Path, data: dict[str, Any]) -> TraceLengths:
    windows = average_windows(data, source=f"{KEY}={path}")
    left_out = len(data) - windows.num_windows
    return TraceLengths(
        input_pmf=windows.input_pmf,
        output_pmf=windows.output_pmf,
        description=f"{path.name}: {windows.num_windows} ServeGen windows, input and output independent",
        notes=(f"{left_out} of {len(data)} windows are empty and are left out",) if left_out else (),
    )


def _csv_rows(path: Path) -> tuple[Sequence[str], list[Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    places: list[str] = []
    rows: list[Mapping[str, Any]] = []
    try:
        for row in reader:
            places.append(f"line {reader.line_num}")
            rows.append(row)
    except csv.Error as error:
        raise TraceError(f"{KEY}={path}, line {reader.line_num}: not CSV: {error}") from None
    return places, rows


def _json_rows(path: Path, items: Iterable[tuple[str, Any]]) -> tuple[Sequence[str], list[Mapping[str, Any]]]:
    places: list[str] = []
    rows: list[Mapping[str, Any]] = []
    for place, value in items:
        if not isinstance(value, dict):
            raise TraceError(f"{KEY}={path}, {place}: expected an object, found {type(value).__name__}")
        places.append(place)
        rows.append(value)
    return places, rows


def _parquet_rows(path: Path) -> tuple[Sequence[str], list[Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise TraceError(
            f"{KEY}={path}: reading Parquet needs pyarrow: `pip install pyarrow`, or convert the file to CSV"
        ) from None
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(read_bytes(path)))
    except (pyarrow.ArrowException, OSError) as error:
        raise TraceError(f"{KEY}={path}: not a Parquet file, or corrupt: {error}") from error
    rows = table.to_pylist()
    return [f"row {n}" for n in range(1, len(rows) + 1)], rows


def _find_layout(
    path: Path, columns: list[str], input_column: str | None, output_column: str | None
) -> Layout:
    for layout in LAYOUTS:
        wanted = (layout.input_column, layout.output_column)
        if set(wanted) <= set(columns) and (input_column or wanted[0], output_column or wanted[1]) == wanted:
            return layout
    if (
        input_column is not None
        and output_column is not None
        and {input_column, output_column} <= set(columns)
    ):
        return Layout(f"{input_column} and {output_column}", input_column, output_column)
    present = ", ".join(repr(name)[:40] for name in columns[:20])
    missing = [name for name in (input_column, output_column) if name is not None and name not in columns]
    problem = f"no column {missing[0]!r}" if missing else "no known columns of input and output lengths"
    raise TraceError(
        f"{KEY}={path}: {problem}; present: {present}. "
        "Set workload.input_column and workload.output_column to two of them."
    )


def _from_rows(
    path: Path, layout: Layout, places: Sequence[str], rows: list[Mapping[str, Any]]
) -> TraceLengths:
    lengths = np.array(
        [
            [_tokens(path, place, row, column) for column in (layout.input_column, layout.output_column)]
            for place, row in zip(places, rows, strict=True)
        ],
        dtype=np.int64,
    )
    arrivals = _arrivals(path, layout, places, rows)
    kept: NDArray[np.bool_] = np.all(lengths > 0, axis=1)
    notes: tuple[str, ...] = ()
    if not kept.all():
        left_out = int((~kept).sum())
        if left_out == len(kept):
            raise TraceError(
                f"{KEY}={path}: every row has 0 input or 0 output tokens; nothing is left to plan for"
            )
        notes = (
            f"{left_out} of {len(kept)} rows have 0 input or 0 output tokens (no answer) and are left out",
        )
        lengths = lengths[kept]
    if arrivals is not None:
        arrivals = arrivals[kept]
        order = np.argsort(arrivals, kind="stable")
        lengths, arrivals = lengths[order], arrivals[order] - arrivals[order[0]]
    return TraceLengths(
        pairs=lengths,
        arrivals_s=arrivals,
        description=f"{path.name}: {len(lengths)} requests, columns of {layout.name}",
        notes=notes,
    )


def _tokens(path: Path, place: str, row: Mapping[str, Any], column: str) -> int:
    raw = row.get(column)
    try:
        if raw is None or isinstance(raw, bool):
            raise ValueError
        value = float(raw)
        if not value.is_integer():
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        shown = "nothing" if raw is None or raw == "" else repr(raw)[:40]
        raise TraceError(
            f"{KEY}={path}, {place}: {column} is {shown}, expected a whole number of tokens"
        ) from None
    if not 0 <= value <= MAX_TOKENS:
        raise TraceError(f"{KEY}={path}, {place}: {column} is {raw}, allowed are 0 to {MAX_TOKENS} tokens")
    return int(value)


def _arrivals(
    path: Path, layout: Layout, places: Sequence[str], rows: list[Mapping[str, Any]]
) -> FloatArray | None:
    """Arrival times in s from an arbitrary zero; None if the trace has none."""
    column = layout.arrival_column
    if column is None or column not in rows[0]:
        return None
    times = np.empty(len(rows))
    first: np.datetime64 | None = None
    for index, (place, row) in enumerate(zip(places, rows, strict=True)):
        raw = row.get(column)
        try:
            if layout.arrival_unit_s is not None:
                times[index] = float(raw) * layout.arrival_unit_s  # type: ignore[arg-type]
            else:
                # numpy takes all digits of a second but no zone; a trace keeps to one zone.
                stamp = np.datetime64(re.sub(r"(Z|[+-]\d\d:?\d\d)$", "", str(raw).strip()), "ns")
                first = stamp if first is None else first
                times[index] = (stamp - first) / np.timedelta64(1, "s")
        except (TypeError, ValueError):
            times[index] = np.nan
        if not np.isfinite(times[index]):
            raise TraceError(f"{KEY}={path}, {place}: {column} is {raw!r}, expected a time of arrival")
    return times
