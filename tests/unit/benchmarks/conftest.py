"""Puts benchmarks/ on the import path, whose arithmetic is tested here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
