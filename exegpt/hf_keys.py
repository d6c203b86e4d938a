"""Checked access to the keys of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exegpt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HfKeys:
    """Checked access to the values of one config; errors name the file and the key."""

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.prefix}{key}{problem}")

    def has(self, key: str) -> bool:
        """Whether `key` is given; null counts as absent, as in transformers."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, f"={value!r} must be an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"={value!r} must be a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, f"={value!r} must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if type(value) is not str or not value:
            raise self.error(key, f"={value!r} must be a name")
        return value

    def only(self, key: str, expected: bool, why: str) -> None:
        """Refuse the config if the flag `key` is given and is not `expected`."""
        if self.flag(key, expected) is not expected:
            found = str(not expected).lower()
            raise self.error(key, f"={found} is not supported ({why}); allowed: {str(expected).lower()}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, " is missing; the model's shape cannot be told without it")
        return value
