"""The least GPUs for a model's weights, against trying every placement."""

from __future__ import annotations

from itertools import pairwise

import pytest
from synthetic import tiny_model

from exegpt.simulator.fit import fullest_bytes, least_gpus
from exegpt.simulator.memory import RUNTIME_BYTES, stage_weight_bytes
from exegpt.simulator.placement import make_stages
from exegpt.specs import Dtype


def compositions(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_are_dealt_so_that_the_fullest_gpu_holds_least(num_stages: int, tp_size: int) -> None:
    model = tiny_model(num_layers=6)
    best = min(
        stage_weight_bytes(model, make_stages(counts, tp_size), Dtype.float32).max()
        for counts in compositions(6, num_stages)
    )
    # Replicated norms and biases are dealt as if they were split, which may cost a part of one layer.
    layer = model.layer_parameters * 4 / tp_size
    assert best <= fullest_bytes(model, Dtype.float32, num_stages, tp_size) <= best + layer
    assert fullest_bytes(model, Dtype.float32, 1, 1) == pytest.approx(4 * model.num_parameters, rel=0.2)


def test_least_gpus_falls_as_memory_grows_and_ends_at_one() -> None:
    model = tiny_model(num_layers=8)
    whole = fullest_bytes(model, Dtype.float32, 1, 1)
    needs = [
        least_gpus(model, Dtype.float32, memory_bytes=RUNTIME_BYTES + int(whole * share), gpus_per_node=1)
        for share in (0.3, 0.5, 0.7, 1.0)
    ]
    assert all(later <= earlier for earlier, later in pairwise(needs))
    assert needs[-1] == 1 < needs[0]
    assert least_gpus(model, Dtype.float32, memory_bytes=RUNTIME_BYTES, gpus_per_node=1) is None
