"""Measured tables as columns: CSV, gzipped CSV or Parquet, checked; every error names the file."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exegpt.errors import ProfileError
from exegpt.profiler.grid import FloatArray

SUFFIXES = (".csv.gz", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Columns:
    """One table; columns of text or of numbers, all of one length.

    Attributes
    ----------
    path : Path
        For messages.
    values : mapping of str to array
    """

    path: Path
    values: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def require(self, *names: str) -> None:
        """ProfileError unless all columns are there: the file is another one."""
        missing = [name for name in names if name not in self.values]
        if missing:
            raise ProfileError(
                f"{self.path}: lacks the column {missing[0]!r}, so it is not the table it is taken for; "
                f"it has {', '.join(list(self.values)[:12])}"
            )

    def text(self, name: str) -> NDArray[np.str_]:
        """A column as text."""
        self.require(name)
        return np.asarray(self.values[name]).astype(str)

    def numbers(self, name: str, *, may_be_empty: bool = False) -> FloatArray:
        """A column of finite numbers that are not negative (NaN where empty cells are allowed)."""
        self.require(name)
        try:
            raw = self.values[name]
            if raw.dtype.kind in "US":
                raw = np.where(raw == "", "nan", raw)
            column = np.asarray(raw, dtype=np.float64)
        except ValueError:
            raise ProfileError(f"{self.path}: column {name!r} holds text where numbers belong") from None
        wrong = np.isinf(column) | (column < 0)
        if not may_be_empty:
            wrong |= np.isnan(column)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ProfileError(
                f"{self.path}: column {name!r} holds {column[row]} in data row {row + 1}; times and sizes "
                "must be finite and not negative. Mend or drop that row."
            )
        return column

    def where(self, rows: NDArray[np.bool_]) -> Columns:
        """The rows that are chosen."""
        return Columns(self.path, {name: column[rows] for name, column in self.values.items()})


def find_table(directory: Path, stem: str) -> Path | None:
    """The file `stem` with one of the known suffixes, if it is there."""
    found = [
        directory / f"{stem}{suffix}" for suffix in SUFFIXES if (directory / f"{stem}{suffix}").is_file()
    ]
    return found[0] if found else None


def need_table(directory: Path, stem: str) -> Path:
    """As `find_table`; ProfileError if there is none."""
    path = find_table(directory, stem)
    if path is None:
        raise ProfileError(f"{directory}: no {stem}.csv, {stem}.csv.gz or {stem}.parquet in it")
    return path


def read_columns(path: Path) -> Columns:
    """Read a table whole.

    Raises
    ------
    ProfileError
        If the file is missing, empty, damaged or not a table.
    """
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(f"{path}: not a readable table: {error}") from error
    if len(rows) < 2:
        raise ProfileError(f"{path}: holds no rows")
    return Columns(path, _split(path, rows))


def _split(path: Path, rows: Sequence[Sequence[str]]) -> dict[str, NDArray[Any]]:
    header, body = rows[0], rows[1:]
    for number, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise ProfileError(
                f"{path}: line {number} has {len(row)} cells, the header {len(header)}; is the file whole?"
            )
    cells = np.asarray(body)
    return {name: cells[:, index] for index, name in enumerate(header)}


def _read_parquet(path: Path) -> Columns:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ProfileError(
            f"{path}: Parquet needs pyarrow: pip install 'exegpt[parquet]', or convert the file to CSV"
        ) from None
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ProfileError(f"{path}: not a readable table: {error}") from error
    if table.num_rows == 0:
        raise ProfileError(f"{path}: holds no rows")
    return Columns(
        path, {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}
    )
