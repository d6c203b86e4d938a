"""Models of the runtime: one pipeline stage on one rank, in plain tensor operations."""

from exegpt.runner.models.layers import DecoderLayer, Rotation
from exegpt.runner.models.parallel import TensorParallel
from exegpt.runner.models.stage import StageModel

__all__ = ["DecoderLayer", "Rotation", "StageModel", "TensorParallel"]
