"""Output lengths seen before: a histogram that plans prompts whose answers nobody can know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from exegpt.errors import TraceError
from exegpt.workload.files import parse_json, read_text
from exegpt.workload.pmf import FloatArray

VERSION = 1


def history_text(output_tokens: Sequence[int], *, note: str) -> str:
    """A history file's content: how often each output length was seen, and where."""
    lengths, counts = np.unique(np.asarray(output_tokens, dtype=np.int64), return_counts=True)
    data = {
        "version": VERSION,
        "note": note,
        "counts": {str(n): int(c) for n, c in zip(lengths.tolist(), counts.tolist(), strict=True)},
    }
    return json.dumps(data, indent=1) + "\n"


def read_history(path: Path) -> tuple[FloatArray, str]:
    """Pmf of output lengths (index = tokens) and where it was measured.

    Raises
    ------
    TraceError
        If the file is none, or counts nothing.
    """
    key = "workload.output_history"
    return _from_data(path, parse_json(path, read_text(path, key=key), key=key))


def default_history() -> tuple[FloatArray, str]:
    """The shipped history: measured with the default model on the shipped prompts."""
    return read_history(Path(str(resources.files("exegpt.workload") / "data" / "output_history.json")))


def _from_data(path: Path, data: Any) -> tuple[FloatArray, str]:
    counts = data.get("counts") if isinstance(data, dict) and data.get("version") == VERSION else None
    try:
        pairs = {int(length): int(count) for length, count in (counts or {}).items()}
    except (TypeError, ValueError, AttributeError):
        pairs = {}
    if not pairs or min(pairs) < 1 or min(pairs.values()) < 0 or sum(pairs.values()) == 0:
        raise TraceError(
            f"workload.output_history={path}: expected version {VERSION} and `counts`, a mapping of "
            "output tokens "
            "(at least 1) to how often they were seen"
        )
    pmf = np.zeros(max(pairs) + 1)
    pmf[list(pairs)] = list(pairs.values())
    return pmf / pmf.sum(), f"output lengths: {data.get('note', path)}"
