"""Puts the helpers of the distributed tests on the import path: the same cases run here on CUDA."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dist"))
