"""Writes small tables in the layouts of the public ones, and models that fit them."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exegpt.specs import ModelFamily, ModelSpec


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A CSV file (gzipped by name) of equal-keyed rows."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def llama(**changes):
    fields = {
        "name": "small-llama",
        "family": ModelFamily.LLAMA,
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
    }
    return ModelSpec(**{**fields, **changes})
