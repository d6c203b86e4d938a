"""The RRA rows of the paper's Table 6 (OPT-13B, task S, one stage of four GPUs), with `counting: paper`."""

import numpy as np
import pytest
import synthetic

from exegpt.simulator.placement import make_stages
from exegpt.simulator.steady import Choice, SteadyState, estimate_one
from exegpt.specs import Counting, Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import truncated_normal_pmf

MODEL = synthetic.tiny_model(num_layers=1)
LENGTHS = independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0])
# The times that the table's two figures of a row imply. N_D = 13: 4 cycles + T_E + 11 T_D = 10.23 s, and
# a cycle of 52 / 25.23 s. N_D = 7: S99 = 63 = 9 * 7, so 9 whole cycles whatever T_E is; it is taken in
# proportion to the batch.
ROWS = (
    # batch, N_D, T_E, T_D, sequences/s, latency
    (52, 13, 1.572, 0.0376, 25.23, 10.23),
    (49, 7, 1.572 * 49 / 52, (49 / 26.15 - 1.572 * 49 / 52) / 7, 26.15, 16.87),
)


@pytest.mark.parametrize(("batch", "n_d", "encode_s", "decode_s", "throughput", "latency"), ROWS)
def test_rows_of_table_6(batch, n_d, encode_s, decode_s, throughput, latency):
    profile = synthetic.constant_profile(MODEL, encode_s, decode_s)
    steady = SteadyState(MODEL, profile, LENGTHS, counting=Counting.paper)
    assert steady.bound_output_tokens == 63
    choice = Choice(policy=Policy.RRA, stages=make_stages((1,), 1), num_micro_batches=1)
    found = estimate_one(steady, choice, batch, n_d)
    # Both figures are printed with two decimals.
    assert found["throughput_per_s"] == pytest.approx(throughput, abs=0.01)
    assert found["latency_s"] == pytest.approx(latency, abs=0.012)


def test_pool_of_the_published_formula():
    profile = synthetic.constant_profile(MODEL, 1.0, 0.1)
    steady = SteadyState(MODEL, profile, LENGTHS, counting=Counting.paper)
    choice = Choice(policy=Policy.RRA, stages=make_stages((1,), 1), num_micro_batches=1)
    pools = steady.estimate(choice, np.array([52, 49]), np.array([13, 7])).decode_batch_size
    # B_E over the sum of P_D(U), which is 0.397 and 0.242 for lengths rounded up.
    assert pools == pytest.approx([52 / 0.397, 49 / 0.242], rel=0.005)
