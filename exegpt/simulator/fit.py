"""How many GPUs one copy of a model's weights needs."""

from __future__ import annotations

import numpy as np

from exegpt.simulator.memory import RUNTIME_BYTES, stage_weight_bytes
from exegpt.simulator.placement import deal_layers, make_stages
from exegpt.specs import Dtype, ModelSpec


def least_gpus(model: ModelSpec, dtype: Dtype, *, memory_bytes: int, gpus_per_node: int) -> int | None:
    """Least number of GPUs that hold the weights, one pipeline of equal tensor-parallel groups.

    Parameters
    ----------
    model : ModelSpec
    dtype : Dtype
    memory_bytes : int
        Of one GPU; the runtime's fixed share goes off it.
    gpus_per_node : int
        Groups stay inside a node.

    Returns
    -------
    int or None
        None if not even a GPU per layer and degree holds its share. K/V and activations come on top.
    """
    fitting = []
    for tp_size in model.tp_sizes(gpus_per_node):
        # Weights of the fullest stage fall as stages are added, so the first that fits is the least.
        for num_stages in range(1, model.num_hidden_layers + 1):
            if fullest_bytes(model, dtype, num_stages, tp_size) + RUNTIME_BYTES <= memory_bytes:
                fitting.append(num_stages * tp_size)
                break
    return min(fitting, default=None)


def fullest_bytes(model: ModelSpec, dtype: Dtype, num_stages: int, tp_size: int) -> int:
    """Weight bytes on the fullest GPU where layers are dealt so that it holds as little as can be."""
    ends = np.zeros(num_stages)
    ends[0] += model.embedding_parameters
    ends[-1] += model.head_parameters / tp_size
    layer = [model.layer_parameters / tp_size] * num_stages
    counts = deal_layers(model.num_hidden_layers, layer, ends.tolist())
    return int(stage_weight_bytes(model, make_stages(counts, tp_size), dtype).max())
