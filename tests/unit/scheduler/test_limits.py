"""What stops the best candidate is found by looking past it."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.scheduler.solve import Problem, solve
from exegpt.simulator.steady import estimate_one
from exegpt.specs import BoundSpec, Policy
from exegpt.workload.lengths import independent
from exegpt.workload.pmf import truncated_normal_pmf

MODEL = synthetic.tiny_model()
LENGTHS = independent(truncated_normal_pmf(256, 252, 512)[0], truncated_normal_pmf(32, 13, 80)[0])


def problem(**changes):
    fields = {
        "model": MODEL,
        "profile": synthetic.tiny_profile(MODEL),
        "cluster": synthetic.tiny_cluster(),
        "lengths": LENGTHS,
        "bound": BoundSpec(),
        "baselines": (),
        "policies": (Policy.RRA,),
        "num_micro_batches": (1, 2),
    }
    return Problem(**{**fields, **changes})


def result(asked):
    (found,) = solve(asked).policies.values()
    return found


def test_the_constraint_that_the_next_batch_breaks_is_named():
    asked = problem(bound=BoundSpec(latency_s=1.0), max_encode_batch_size=200)
    found = result(asked)
    best, further = found.best, found.further
    assert further.batch == best.batch + 1
    value, limit = further.breaks["latency_s"]
    assert limit == 1.0 < value
    expected = estimate_one(asked.steady(), best.choice, further.batch, best.extent)["latency_s"]
    assert value == pytest.approx(expected)
    assert set(further.record()["breaks"]) == set(further.breaks)


def test_memory_is_named_where_it_stops_the_batch():
    small = synthetic.tiny_cluster(memory_bytes=540 * 2**20)
    found = result(problem(cluster=small))
    assert list(found.further.breaks) == ["memory"]
    value, limit = found.further.breaks["memory"]
    assert limit == small.memory_bytes < value


def test_a_pool_that_memory_sizes_says_so():
    # A decode pool of WAA is no knob: it is as large as memory holds, and here no batch breaks anything.
    memory_bytes = 520 * 2**20
    asked = problem(policies=(Policy.WAA,), cluster=synthetic.tiny_cluster(memory_bytes=memory_bytes))
    found = result(asked)
    assert found.further.breaks == {}
    larger = replace(asked, cluster=synthetic.tiny_cluster(memory_bytes=int(1.1 * memory_bytes)))
    expected = estimate_one(larger.steady(), found.best.choice, found.best.batch, 1)["throughput_per_s"]
    assert found.further.roomier_per_s == pytest.approx(expected)
    assert expected > found.best.throughput_per_s


def test_decode_iterations_that_bind_are_said():
    free = result(problem(bound=BoundSpec(latency_s=1.0), max_encode_batch_size=60))
    bound = problem(bound=BoundSpec(latency_s=1.0), max_encode_batch_size=60, max_decode_iterations=2)
    assert free.best.extent > 2
    assert any("limited by solver.max_decode_iterations" in text for text in result(bound).binding)
    assert not any("max_decode_iterations" in text for text in free.binding)


def test_memory_parts_add_up_for_every_policy():
    policies = tuple(Policy)
    asked = problem(policies=policies, cluster=synthetic.tiny_cluster(4), max_encode_batch_size=24)
    record = solve(asked).record()
    for name, one in record["policies"].items():
        parts = np.asarray(list(one["memory_parts_bytes"].values()))
        assert list(one["memory_parts_bytes"]) == ["weights", "kv", "activations", "runtime"]
        # Each part is rounded down to a byte.
        assert np.abs(parts.sum(0) - one["memory_bytes"]).max() <= len(parts), name


def test_a_baseline_that_is_faster_is_pointed_out():
    asked = problem(policies=(Policy.STATIC,), baselines=(Policy.RRA,), bound=BoundSpec(latency_s=1.0))
    record = solve(asked).record()
    assert record["baselines"]["RRA"]["throughput_per_s"] > record["throughput_per_s"]
    (note,) = [note for note in record["notes"] if "does not compete" in note]
    assert "RRA" in note
    assert "solver.policies=all" in note
    swapped = solve(replace(asked, policies=(Policy.RRA,), baselines=(Policy.STATIC,))).record()
    assert not [note for note in swapped["notes"] if "does not compete" in note]
