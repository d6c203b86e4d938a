"""Reading the files a user names, with errors that name the key and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exegpt.errors import TraceError

KEY = "workload.path"


def file_kind(path: Path) -> str:
    """The file's kind by its name: its last suffix in lower case, .gz left aside.

    Raises
    ------
    TraceError
        If there is no such file, or it is a directory.
    """
    if path.is_dir():
        raise TraceError(f"{KEY}={path}: is a directory; name a file in it")
    if not path.exists():
        raise TraceError(f"{KEY}={path}: no such file (paths count from the directory of the launch)")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_bytes(path: Path, *, key: str = KEY) -> bytes:
    """Content of `path`, unpacked if its name ends in .gz; messages name `key`.

    Raises
    ------
    TraceError
        If it is empty, unreadable, or a broken gzip file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{key}={path}: cannot be read: {error.strerror}") from error
    if path.suffix.lower() == ".gz" and data:
        try:
            data = gzip.decompress(data)
        except EOFError:
            raise TraceError(f"{key}={path}: the gzip file is truncated; fetch it again") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{key}={path}: not a gzip file, or corrupt: {error}") from error
    if not data:
        raise TraceError(f"{key}={path}: the file is empty")
    return data


def read_text(path: Path, *, key: str = KEY) -> str:
    """Content of `path` as text; TraceError also for what is no UTF-8 text."""
    try:
        # Spreadsheets write a byte order mark; utf-8-sig drops it.
        text = read_bytes(path, key=key).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise TraceError(f"{key}={path}: not UTF-8 text (byte {error.start} is {byte:#04x})") from None
    if "\0" in text:
        raise TraceError(f"{key}={path}: a binary file, not text")
    if not text.strip():
        raise TraceError(f"{key}={path}: the file is empty")
    return text


def json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Place (`line 3`) and value of every line that is not blank; TraceError names a broken line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", parse_json(path, line, number)


def parse_json(path: Path, text: str, first_line: int = 1, *, key: str = KEY) -> Any:
    """The JSON value in `text`; TraceError names the line, counted from `first_line`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise TraceError(f"{key}={path}, line {line}: not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise TraceError(f"{key}={path}, line {first_line}: JSON nested too deeply") from None
