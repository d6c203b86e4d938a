"""Puts benchmarks/ on the import path, last: some of its files are named as packages are."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
