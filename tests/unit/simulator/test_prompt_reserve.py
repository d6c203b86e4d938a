"""Micro-batches whose prompts may outgrow the profile are not covered."""

import numpy as np
import synthetic

from exegpt.simulator.placement import make_stages
from exegpt.simulator.serving import Serving
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import fixed_pmf, truncated_normal_pmf

MODEL = synthetic.tiny_model()
STAGES = make_stages((8,), 1)


def covered(input_pmf):
    """Most prompts that the profile covers in a micro-batch."""
    serving = Serving(MODEL, synthetic.tiny_profile(MODEL), independent(input_pmf, fixed_pmf(8)))
    queries = np.arange(1, 600)
    return int(queries[np.isfinite(serving.encode_s(STAGES, queries.astype(float))[:, 0])].max())


def test_prompts_of_one_length_fill_the_profile():
    assert covered(fixed_pmf(256)) == synthetic.TOKENS[-1] / 256


def test_prompts_that_vary_leave_room_for_all_but_one_micro_batch_in_a_thousand():
    pmf, _ = truncated_normal_pmf(256, 252, 512)
    most = covered(pmf)
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(pmf), p=pmf, size=(20000, most)).sum(1)
    beyond = (drawn > synthetic.TOKENS[-1]).mean()
    # A thousandth of 20,000 has a standard error of a fifth; one prompt more or less changes it by a third.
    assert 0.0003 < beyond < 0.002
