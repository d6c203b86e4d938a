"""Costs worked out by hand from price, GPUs and tokens."""

from dataclasses import replace

import pytest
import synthetic

from exegpt.scheduler.cost import cost_per_hour, token_costs
from exegpt.scheduler.solve import Problem, solve
from exegpt.specs import BoundSpec, Policy
from exegpt.workload.lengths import fixed_pmf, independent

LENGTHS = independent(fixed_pmf(300), fixed_pmf(100))
PRICED = replace(synthetic.tiny_cluster(num_gpus=4), price_per_gpu_hour=1.8)


def test_costs_by_hand():
    assert cost_per_hour(PRICED) == pytest.approx(7.2)
    # 7.2 an hour are 0.002 a second; 5 queries of 100 output tokens a second make 4e-6 a token.
    costs = token_costs(PRICED, LENGTHS, throughput_per_s=5.0)
    assert costs["cost_per_million_output_tokens"] == pytest.approx(4.0)
    # Of 400 tokens in all each costs a quarter of that.
    assert costs["cost_per_million_tokens"] == pytest.approx(1.0)


def test_nothing_is_said_without_a_price():
    unpriced = replace(PRICED, price_per_gpu_hour=None)
    assert cost_per_hour(unpriced) is None
    assert token_costs(unpriced, LENGTHS, throughput_per_s=5.0) == {}


@pytest.mark.parametrize("price", [None, 3.6])
def test_every_schedule_of_an_answer_has_its_cost(price):
    model = synthetic.tiny_model()
    problem = Problem(
        model=model,
        profile=synthetic.tiny_profile(model),
        cluster=replace(synthetic.tiny_cluster(), price_per_gpu_hour=price),
        lengths=LENGTHS,
        bound=BoundSpec(),
        policies=(Policy.RRA, Policy.WAA),
        baselines=(Policy.STATIC,),
        max_encode_batch_size=8,
        num_micro_batches=(1,),
    )
    record = solve(problem).record()
    schedules = [record, *record["policies"].values(), *record["baselines"].values()]
    assert len(schedules) == 4
    # Two GPUs at 3.6 an hour are 0.002 a second.
    assert record["cost_per_hour"] == (None if price is None else pytest.approx(7.2))
    for schedule in schedules:
        expected = None if price is None else 0.002 / schedule["throughput_tokens_per_s"] * 1e6
        assert schedule.get("cost_per_million_output_tokens") == (expected and pytest.approx(expected))
