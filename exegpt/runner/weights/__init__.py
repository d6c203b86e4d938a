"""Weights of a model, read shard by shard: from safetensors, from GGUF, or drawn at random.

`resolve_weights` turns what the user named into files, `open_weights` opens them behind
`WeightReader`, and `check_weights` compares every tensor's shape with the model before anything is
read. torch is imported by the first read, so a planner can ask for a shape without paying for it.
"""

from exegpt.runner.weights.gguf_config import gguf_model_spec
from exegpt.runner.weights.gguf_weights import GgufWeights
from exegpt.runner.weights.location import WeightsLocation, resolve_weights
from exegpt.runner.weights.opening import open_weights
from exegpt.runner.weights.random_weights import RandomWeights
from exegpt.runner.weights.reader import WeightReader, check_weights, tensor_shapes
from exegpt.runner.weights.safetensors_weights import SafetensorsWeights

__all__ = [
    "GgufWeights",
    "RandomWeights",
    "SafetensorsWeights",
    "WeightReader",
    "WeightsLocation",
    "check_weights",
    "gguf_model_spec",
    "open_weights",
    "resolve_weights",
    "tensor_shapes",
]
