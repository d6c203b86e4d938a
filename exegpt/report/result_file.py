"""The files of a job: `result.json`, and `requests.jsonl` with a line per request."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from exegpt.errors import ConfigError, TraceError
from exegpt.events import RequestRecord
from exegpt.report.summary import relative_errors, summarise_run

__all__ = [
    "append_request",
    "plain",
    "read_requests",
    "relative_errors",
    "summarise_run",
    "write_result",
    "write_text",
]

VERSION = 1
_LOG = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """Values that strict JSON can hold.

    numpy scalars and arrays become Python's, enum members their value, paths strings. JSON has no
    infinity and no NaN: both become None, so a missing bound and an unknown figure read as null.

    Raises
    ------
    TypeError
        For any other type.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    match value:
        case Enum():
            return plain(value.value)
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Path():
            return str(value)
        case Mapping():
            return {str(plain(key)): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset() | range():
            items = sorted(value) if isinstance(value, set | frozenset) else value
            return [plain(item) for item in items]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader never sees half of it.

    Raises
    ------
    ConfigError
        If the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: cannot be written ({error.strerror}). Free the place, or set hydra.run.dir elsewhere."
    )


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result.json` atomically as strict JSON, `version` first; see `plain` for infinity and NaN."""
    text = json.dumps(plain({"version": VERSION, **result}), indent=2, allow_nan=False)
    write_text(path, text + "\n")


def append_request(
    path: Path,
    record: RequestRecord,
    *,
    prompt: str | None = None,
    text: str | None = None,
    token_ids: Sequence[int] = (),
) -> None:
    """Append one request's line to `requests.jsonl`; it is in the file when the call returns.

    Parameters
    ----------
    path : Path
        Made if it is not there.
    record : RequestRecord
        The finished or failed request.
    prompt : str, optional
        Without it the line has `prompt_tokens`, their number.
    text : str, optional
        The completion, where a tokenizer is there.
    token_ids : sequence of int
        Ids of the output tokens.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    line: dict[str, Any] = {"id": record.id, "status": record.status, "error": record.error}
    if prompt is None:
        line["prompt_tokens"] = record.input_tokens
    else:
        line["prompt"] = prompt
    line |= {"input_tokens": record.input_tokens, "output_tokens": record.output_tokens}
    if text is not None:
        line["text"] = text
    line |= {
        "token_ids": list(token_ids),
        "arrival_s": record.arrival_s,
        "encode_start_s": record.encode_start_s,
        "first_token_s": record.first_token_s,
        "finish_s": record.finish_s,
        "finish_reason": record.finish_reason,
    }
    text_line = json.dumps(plain(line), allow_nan=False, ensure_ascii=False) + "\n"
    try:
        # Opened for every line: some 20 us against milliseconds per request, and nothing is buffered
        # when the job dies.
        with path.open("a", encoding="utf-8") as file:
            file.write(text_line)
    except OSError as error:
        raise _unwritable(path, error) from error


def read_requests(path: Path) -> list[dict[str, Any]]:
    """The lines of a `requests.jsonl`, in the order of the file.

    A last line without a line end was torn when its job died: it is left out with a warning.

    Raises
    ------
    TraceError
        If the file is missing, or another line is not a JSON object with an `id`.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: cannot be read: {error}. Name a requests.jsonl that a run has written."
        ) from error
    lines = content.split("\n")
    if torn := lines.pop():
        _LOG.warning("%s: last line is torn after %d characters and left out", path, len(torn))
    requests = []
    for number, line in enumerate(lines, start=1):
        try:
            request = json.loads(line)
        except ValueError as error:
            raise TraceError(
                f"{path}, line {number}: not JSON: {error}. Remove the line to go on without it."
            ) from error
        if not isinstance(request, dict) or "id" not in request:
            raise TraceError(
                f"{path}, line {number}: expected an object with the key id, found {line[:60]!r}"
            )
        requests.append(request)
    return requests
