"""Cycles in blocks of iterations against every iteration by itself."""

import numpy as np
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.simulator import iteration_blocks
from exegpt.simulator.iteration_blocks import IterationBlocks
from exegpt.simulator.placement import make_stages
from exegpt.simulator.steady import Choice, SteadyState
from exegpt.specs import Counting, Policy
from exegpt.workload.completion import Completion
from exegpt.workload.lengths import independent, joint
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


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    low=st.integers(1, 150),
    width=st.integers(0, 60),
    where=st.floats(0, 1),
    counting=st.sampled_from(list(Counting)),
    separate=st.booleans(),
)
def test_least_blocks_are_below_those_of_every_n_d(outputs, low, width, where, counting, separate):
    lengths = joint(np.column_stack([np.arange(1, len(outputs) + 1), outputs]))
    completion = Completion(lengths, counting)
    most = max(completion.max_iterations, 1)
    blocks = IterationBlocks(completion, most, separate_inputs=separate)
    least = blocks.least(np.array([low]), np.array([low + width]))
    n_d = low + round(where * width)
    own = blocks.of(np.array([n_d]))
    count = int((own.weights[0] > 0).sum())
    held = np.stack([own.active[0], own.context[0], own.inputs[0]], axis=-1)[:count]
    for i in np.flatnonzero(least.weights[0]):
        assert least.weights[0, i] <= own.weights[0, i]
        assert (least.inner[0, i] <= held[i] * (1 + 1e-12)).all()
    assert (least.last[0] <= held[count - 1] * (1 + 1e-12)).all()
    assert (least.every[0] <= (held[-1] if width == 0 or low >= most else held.min(0)) * (1 + 1e-12)).all()
    # What is left out are the iterations that only some of the N_D have.
    assert least.weights[0].sum() + 1 == min(low, most)


def test_one_n_d_has_its_own_blocks():
    blocks = IterationBlocks(Completion(LENGTHS), 319)
    own, least = blocks.of(np.array([150])), blocks.least(np.array([150]), np.array([150]))
    count = int((own.weights[0] > 0).sum())
    np.testing.assert_array_equal(least.weights[0, : count - 1], own.weights[0, : count - 1])
    np.testing.assert_array_equal(least.inner[0, : count - 1, 1], own.context[0, : count - 1])
    np.testing.assert_array_equal(least.last[0], least.every[0])
    assert least.last[0, 0] == own.active[0, count - 1]
