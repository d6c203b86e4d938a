"""The fewest GPUs for a rate, against solving every size by looking at every candidate."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.errors import ConfigError
from exegpt.scheduler.mixture import fewest_by_groups
from exegpt.scheduler.sizing import find_sizing, sizes
from exegpt.scheduler.solve import Problem, resolve_bound, solve
from exegpt.specs import BoundSpec, ClusterSpec, Policy, SolverName
from exegpt.workload.lengths import fixed_pmf, independent

MODEL = synthetic.tiny_model(num_layers=4)
LENGTHS = independent(fixed_pmf(60), fixed_pmf(6))
CLUSTER = ClusterSpec(
    name="test",
    num_nodes=2,
    gpus_per_node=3,
    memory_bytes=2 * 2**30,
    device="test",
    is_local=False,
    price_per_gpu_hour=1.2,
)


def problem_on(cluster, **changes):
    fields = {
        "model": MODEL,
        "profile": synthetic.tiny_profile(MODEL, num_ranks=cluster.num_gpus),
        "cluster": cluster,
        "lengths": LENGTHS,
        "bound": BoundSpec(latency_s=0.5),
        "policies": (Policy.RRA, Policy.WAA),
        "baselines": (),
        "max_encode_batch_size": 8,
        "num_micro_batches": (1, 2),
    }
    return Problem(**{**fields, **changes})


@pytest.fixture(scope="module")
def held():
    """What each size holds, by the exhaustive search."""
    found = {}
    for size in sizes(CLUSTER):
        best = solve(replace(problem_on(size), method=SolverName.exhaustive)).best
        found[size.num_gpus] = best.throughput_per_s if best else 0.0
    return found


def test_sizes_are_parts_of_a_node_then_nodes():
    shapes = [(size.num_nodes, size.gpus_per_node, size.num_gpus) for size in sizes(CLUSTER)]
    assert shapes == [(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 3, 6)]
    assert {size.price_per_gpu_hour for size in sizes(CLUSTER)} == {1.2}


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7, 0.95])
def test_fewest_gpus_against_every_size(held, share):
    rate_per_s = share * max(held.values())
    sizing = find_sizing(problem_on, CLUSTER, rate_per_s)
    expected = min(n for n, rate in held.items() if rate >= rate_per_s)
    assert sizing.chosen.problem.cluster.num_gpus == expected
    assert sizing.chosen.rate_per_s == pytest.approx(held[expected], rel=1e-12)
    for answer in sizing.answers[:-1]:
        assert answer.rate_upper_per_s < rate_per_s
        assert answer.rate_per_s == pytest.approx(held[answer.problem.cluster.num_gpus], rel=1e-12)


def test_the_rate_of_a_schedule_needs_no_more_than_its_gpus(held):
    """A rate that a size just holds is held by it; a little more is not."""
    for num_gpus, rate in held.items():
        fewest = find_sizing(problem_on, CLUSTER, rate).chosen.problem.cluster.num_gpus
        assert fewest == min(n for n, other in held.items() if other >= rate)
        more = find_sizing(problem_on, CLUSTER, rate * (1 + 1e-9)).chosen
        assert more is None or more.problem.cluster.num_gpus != num_gpus


def test_record_of_an_answer(held):
    rate_per_s = 0.9 * held[2]
    record = find_sizing(problem_on, CLUSTER, rate_per_s).record()
    assert (record["num_gpus"], record["num_nodes"], record["gpus_per_node"]) == (2, 1, 2)
    assert record["headroom"] == pytest.approx(1 / 0.9 - 1)
    assert record["cost_per_hour"] == pytest.approx(2.4)
    # 2.4 an hour buy the tokens of an hour at this rate, of 6 output tokens each.
    assert record["cost_per_million_output_tokens"] == pytest.approx(2.4e6 / (3600 * rate_per_s * 6))
    assert [size["num_gpus"] for size in record["sizes"]] == [1, 2]
    assert record["sizes"][0]["throughput_upper_per_s"] < rate_per_s <= record["greatest_rate_per_s"]


def test_a_rate_that_nothing_holds_names_one_that_is_held(held):
    greatest = max(held.values())
    sizing = find_sizing(problem_on, CLUSTER, 2.5 * greatest)
    assert sizing.chosen is None
    assert len(sizing.answers) == 4
    assert "run 3 such clusters side by side" in sizing.reason()
    named = float(sizing.reason().split(" to ")[1].split(",")[0])
    assert greatest * 0.999 < named <= greatest
    assert find_sizing(problem_on, CLUSTER, named).chosen is not None
    record = sizing.record()
    assert "num_gpus" not in record
    assert record["greatest_rate_per_s"] == pytest.approx(greatest, rel=1e-12)


def test_nothing_feasible_at_any_size_says_why():
    sizing = find_sizing(
        lambda size: problem_on(size, bound=BoundSpec(latency_s=1e-6)), CLUSTER, rate_per_s=1.0
    )
    assert sizing.chosen is None
    assert "no size of the cluster has a schedule: RRA: relax bound.latency_s from 1e-06 s" in sizing.reason()
    small = replace(CLUSTER, memory_bytes=1000)
    nowhere = find_sizing(problem_on, small, rate_per_s=1.0)
    assert all(answer.solution is None for answer in nowhere.answers)
    assert "no pipeline of the 6 GPUs" in nowhere.reason()


def test_degrees_and_replicas_asked_for_are_kept_to():
    sizing = find_sizing(lambda size: problem_on(size, tp_sizes=(2,)), replace(CLUSTER, gpus_per_node=2), 1e9)
    assert "solver.tp_sizes=[2]: none of them is possible on 1 GPUs" in sizing.answers[0].reason
    degrees = {s.tp_size for answer in sizing.answers[1:] for s in answer.best.choice.stages}
    assert degrees == {2}
    twice = find_sizing(lambda size: problem_on(size, num_replicas=(2,)), CLUSTER, 1e9)
    found = {a.problem.cluster.num_gpus: a.best and a.best.choice.num_replicas for a in twice.answers}
    assert found == {1: None, 2: 2, 3: None, 6: 2}


def test_ranges_that_no_size_allows_are_refused():
    with pytest.raises(ConfigError, match=r"solver\.tp_sizes: 3 is not possible"):
        problem_on(CLUSTER, tp_sizes=(3,)).check_ranges()


def test_a_quantile_bound_is_resolved_as_solve_does():
    problem = problem_on(replace(CLUSTER, num_nodes=1, gpus_per_node=2), bound_quantile=0.3)
    assert resolve_bound(problem) == solve(problem).bound
    assert resolve_bound(problem_on(CLUSTER)) == BoundSpec(latency_s=0.5)


def test_progress_ends_with_all_sizes(held):
    told = []
    find_sizing(problem_on, CLUSTER, 0.01 * held[1], report=lambda done, total: told.append((done, total)))
    assert told == [(0, 4), (4, 4)]


def packs(groups, gpus_per_node, num_nodes):
    """Whether groups fit into nodes, by trying every node for every part."""
    left = num_nodes - sum(g // gpus_per_node for g in groups if g > gpus_per_node)
    parts = [g for g in groups if g <= gpus_per_node]
    if left < 0:
        return False
    for places in itertools.product(range(left), repeat=len(parts)):
        used = [sum(g for g, at in zip(parts, places, strict=True) if at == node) for node in range(left)]
        if all(total <= gpus_per_node for total in used):
            return True
    return not parts


@pytest.mark.parametrize("seed", range(30))
def test_fewest_by_groups_against_every_mixture(seed):
    rng = np.random.default_rng(seed)
    gpus_per_node, num_nodes = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    possible = [*range(1, gpus_per_node + 1), *(gpus_per_node * n for n in range(2, num_nodes + 1))]
    rates = {n: float(rng.exponential() * n) for n in possible if rng.random() < 0.8}
    total = gpus_per_node * num_nodes
    target = float(rng.uniform(0.2, 1.2)) * total
    mixtures = [
        groups
        for count in range(1, total + 1)
        for groups in itertools.combinations_with_replacement(rates, count)
        if sum(groups) <= total and packs(groups, gpus_per_node, num_nodes)
    ]
    enough = [sum(groups) for groups in mixtures if sum(rates[g] for g in groups) >= target]
    found = fewest_by_groups(rates, gpus_per_node, num_nodes, target)
    if not enough:
        assert found is None
        return
    assert sum(found) == min(enough)
    assert sum(rates[g] for g in found) >= target * (1 - 1e-12)
    assert packs(found, gpus_per_node, num_nodes)


def test_groups_are_named_where_they_save(held):
    # Every GPU holds the same here, alone or with others; sizes of clusters are 1, 2, 3 and 6.
    assert held[6] == pytest.approx(6 * held[1])
    sizing = find_sizing(problem_on, CLUSTER, 3.5 * held[1])
    assert sizing.chosen.problem.cluster.num_gpus == 6
    assert sum(sizing.groups) == 4
    assert sizing.record()["groups"] == list(sizing.groups)
    assert find_sizing(problem_on, CLUSTER, 2.5 * held[1]).groups is None
    assert find_sizing(problem_on, CLUSTER, 7 * held[1]).groups is None
