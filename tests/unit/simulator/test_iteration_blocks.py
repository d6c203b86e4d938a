"""Cycles in blocks of iterations against every iteration by itself."""

import numpy as np
import pytest
import synthetic

from exegpt.simulator import iteration_blocks
from exegpt.simulator.placement import make_stages
from exegpt.simulator.steady import Choice, SteadyState
from exegpt.specs import Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import truncated_normal_pmf

MODEL = synthetic.tiny_model()
LENGTHS = independent(truncated_normal_pmf(128, 81, 256)[0], truncated_normal_pmf(128, 68, 320)[0])


@pytest.mark.parametrize(("counts", "m"), [((8,), 1), ((4, 4), 2)])
def test_blocks_cost_what_their_iterations_cost(counts, m, monkeypatch):
    choice = Choice(policy=Policy.RRA, stages=make_stages(counts, 1), num_micro_batches=m)
    knobs = np.array([40, 40, 40, 40]), np.array([8, 60, 150, 300])
    blocks = SteadyState(MODEL, synthetic.tiny_profile(MODEL), LENGTHS).estimate(choice, *knobs)
    monkeypatch.setattr(iteration_blocks, "SINGLE_ITERATIONS", 1000)
    each = SteadyState(MODEL, synthetic.tiny_profile(MODEL), LENGTHS).estimate(choice, *knobs)
    # Costs are linear in a block but where they bend, at the points of the table.
    assert blocks.throughput_per_s[0] == pytest.approx(each.throughput_per_s[0], rel=1e-12)
    assert blocks.throughput_per_s == pytest.approx(each.throughput_per_s, rel=2e-3)
    assert blocks.latency_s == pytest.approx(each.latency_s, rel=5e-3)
