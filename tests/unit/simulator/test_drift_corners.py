"""The latency of a schedule inside a drift is no worse than at the drift's rim."""

import itertools

import numpy as np
import pytest
import synthetic

from exegpt.simulator.choice import Choice
from exegpt.simulator.placement import make_stages
from exegpt.simulator.steady import SteadyState
from exegpt.specs import Policy
from exegpt.workload.drift import drift_corners, drifted
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import truncated_normal_pmf

MODEL = synthetic.tiny_model()
PROFILE = synthetic.tiny_profile(MODEL)
TASKS = {
    "S": independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0]),
    "T": independent(truncated_normal_pmf(128, 81, 256)[0], truncated_normal_pmf(128, 68, 320)[0]),
}
BATCHES, ITERATIONS = (
    a.ravel() for a in np.meshgrid([2, 7, 16], [2, 3, 5, 8, 13, 21, 34, 55, 89], indexing="ij")
)


def latencies(lengths, counts, m):
    steady = SteadyState(MODEL, PROFILE, lengths)
    choice = Choice(policy=Policy.RRA, stages=make_stages(counts, 1), num_micro_batches=m)
    most = max(steady.completion.max_iterations, 1)
    return steady.estimate(choice, BATCHES, np.minimum(ITERATIONS, most)).latency_s


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("counts", "m"), [((8,), 1), ((4, 4), 2)])
@pytest.mark.parametrize("margin", [0.05, 0.15])
def test_latency_is_worst_at_the_rim(task, counts, m, margin):
    lengths = TASKS[task]
    rim = np.max([latencies(c, counts, m) for c in drift_corners(lengths, margin)], axis=0)
    # What the profile does not cover at the rim is no schedule.
    known = np.isfinite(rim)
    assert np.count_nonzero(known) > 15
    factors = np.linspace(1 - margin, 1 + margin, 5)
    for mean, std in itertools.product(factors, factors):
        inside = latencies(drifted(lengths, mean=mean, std=std), counts, m)[known]
        worst = int(np.argmax(inside / rim[known]))
        assert inside[worst] <= rim[known][worst] * (1 + 1e-9), (
            mean,
            std,
            BATCHES[known][worst],
            ITERATIONS[known][worst],
        )
