"""ServeGen data sets: length distributions per window of time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exegpt.errors import TraceError
from exegpt.workload.pmf import FloatArray

# Above this a "length" is a time stamp or an id: no model's window comes near.
MAX_TOKENS = 10_000_000
SIDES = ("input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Mean distributions of `num_windows` windows; float arrays of shape (max + 1,)."""

    input_pmf: FloatArray
    output_pmf: FloatArray
    num_windows: int


def average_windows(data: Mapping[str, Any], *, source: str) -> Windows:
    """Average the windows of a ServeGen data set, each with the same weight.

    Parameters
    ----------
    data : mapping
        Window start to `input_tokens` and `output_tokens`, each a mapping of length to probability or
        a string of one, `{112: 0.25, 114: 0.75}`. Windows without requests are left out.
    source : str
        Key and file, for messages.

    Raises
    ------
    TraceError
        If a window is not of this form, its probabilities do not sum to 1 within 1e-6, or all are empty.
    """
    used: list[tuple[dict[int, float], ...]] = []
    for window, content in data.items():
        if not isinstance(content, dict) or not set(SIDES) <= set(content):
            raise TraceError(
                f"{source}: key {window[:40]!r} holds no input_tokens and output_tokens. A JSON file is "
                "a list of requests or an object of ServeGen windows; one request a line goes into .jsonl."
            )
        masses = tuple(_masses(content[side], f"{source}, window {window!r}, {side}") for side in SIDES)
        if all(masses):
            used.append(masses)
    if not used:
        raise TraceError(f"{source}: no window has any requests")
    input_pmf, output_pmf = (_average([masses[side] for masses in used]) for side in (0, 1))
    return Windows(input_pmf, output_pmf, len(used))


def _average(windows: list[dict[int, float]]) -> FloatArray:
    pmf = np.zeros(max(max(masses) for masses in windows) + 1)
    for masses in windows:
        values = np.fromiter(masses.values(), dtype=np.float64)
        pmf[list(masses)] += values / values.sum()
    return pmf / len(windows)


def _masses(content: Any, where: str) -> dict[int, float]:
    """Probability by length of one side of a window; empty if it had no requests."""
    if isinstance(content, str):
        try:
            # The keys are bare numbers, which JSON wants quoted.
            content = json.loads(re.sub(r"(\d+)\s*:", r'"\1":', content))
        except (json.JSONDecodeError, RecursionError) as error:
            raise TraceError(f"{where}: expected probabilities by length: {error}") from None
    if not isinstance(content, dict):
        raise TraceError(f"{where}: expected probabilities by length, found {type(content).__name__}")
    masses: dict[int, float] = {}
    for key, value in content.items():
        if not (key.isascii() and key.isdigit() and 1 <= int(key) <= MAX_TOKENS):
            raise TraceError(f"{where}: length {key!r} is no whole number from 1 to {MAX_TOKENS}")
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise TraceError(f"{where}: the probability of {key} tokens is {value!r}, must lie in [0, 1]")
        masses[int(key)] = float(value)
    total = sum(masses.values())
    if masses and abs(total - 1) > 1e-6:
        raise TraceError(f"{where}: probabilities sum to {total:.9g}, not to 1")
    return masses
