"""WAA and DISAGGREGATED: the closed form against a long replay of the same policy on the same profile."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import synthetic
from test_closed_form import LENGTHS as INDEPENDENT
from test_closed_form import make_requests

from exegpt.policies.waa import Sides
from exegpt.profiler.grid import make_grid
from exegpt.schedule import Stage
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.memory import num_kv_pages
from exegpt.simulator.replay_sides import replay_sides
from exegpt.simulator.steady import Choice, SteadyState
from exegpt.simulator.transfer import make_transfer
from exegpt.specs import Policy
from exegpt.workload.lengths import joint
from exegpt.workload.requests import Request, with_probes

pytestmark = pytest.mark.sweep

MODEL = synthetic.tiny_model()
COUNTS = {1: (8,), 2: (4, 4), 3: (3, 3, 2), 4: (2, 2, 2, 2)}
MIB = 2**20


def correlated():
    """Outputs of 0.4 to 0.9 of the input."""
    rng = np.random.default_rng(5)
    inputs = np.clip(rng.lognormal(4.3, 0.6, 600).astype(int), 8, 500)
    outputs = np.clip((inputs * rng.uniform(0.4, 0.9, 600)).astype(int), 1, 300)
    return joint(np.column_stack([inputs, outputs]))


LENGTHS = {**INDEPENDENT, "correlated": correlated()}


def steep_profile():
    """Decode attention that rises faster than its context: the drain has a peak."""
    profile = synthetic.tiny_profile(MODEL)
    axes = [synthetic.QUERIES, synthetic.CONTEXTS]
    mesh = np.meshgrid(*axes, indexing="ij")
    grids = {
        t: make_grid(
            f"tp{t}.decode_attention",
            ("queries", "context_tokens"),
            axes,
            (1e-6 * mesh[0] + 1e-9 * mesh[1] ** 1.5) / t,
        )
        for t in (1, 2)
    }
    return replace(
        profile, layers={t: replace(c, decode_attention=grids[t]) for t, c in profile.layers.items()}
    )


PROFILES = {
    "plain": synthetic.tiny_profile(MODEL),
    "fast encode": synthetic.tiny_profile(MODEL, linear_s=3e-5),
    "slow sampling": synthetic.tiny_profile(MODEL, linear_s=2e-5, overhead_s=1e-3, head_s=2e-2),
    "steep": steep_profile(),
}


def make_stages(encode, encode_tp, decode, decode_tp):
    stages, rank = [], 0
    for role, counts, tp_size in (("encode", encode, encode_tp), ("decode", decode, decode_tp)):
        layer = 0
        for count in counts:
            ranks = tuple(range(rank, rank + tp_size))
            stages.append(Stage(role=role, ranks=ranks, layers=(layer, layer + count)))
            rank, layer = rank + tp_size, layer + count
    return tuple(stages)


def draw(rng, limit):
    """A random configuration that is limited as asked; None if it is not, or no case for a mean pool.

    With a pool of two encode batches or less, what counts is when a batch comes, not the mean pool. If
    drain and inflow are within a tenth of each other, a pool takes thousands of queries to settle.
    """
    policy = Policy.DISAGGREGATED if rng.random() < 0.25 else Policy.WAA
    instances, encode, decode = (1, 1), *rng.integers(1, 5, size=2).tolist()
    if policy is Policy.DISAGGREGATED:
        instances, encode, decode = (int(rng.integers(1, 4)), int(rng.integers(1, 3))), 1, 1
    profile = {"encode": "plain", "memory": rng.choice(["plain", "fast encode", "slow sampling"])}
    choice = Choice(
        policy=policy,
        stages=make_stages(COUNTS[encode], rng.integers(1, 3), COUNTS[decode], rng.integers(1, 3)),
        num_micro_batches=int(rng.choice([1, 2, 4])),
        num_encode_instances=instances[0],
        num_decode_instances=instances[1],
    )
    lengths, batch = str(rng.choice(["S", "T", "correlated"])), int(rng.integers(4, 17))
    case = (lengths, str(profile.get(limit, "steep")), choice, batch)
    least = int(rng.integers(60, 250))
    for memory in [np.inf] if limit != "memory" else 512 * MIB + np.geomspace(4, 400, 60) * MIB:
        steady, found, inflow = balance(*case, memory)
        if found.decode_limits[0] == (limit != "encode") and found.pool[0] > (
            least if limit == "memory" else 2 * batch
        ):
            near = not 0.9 < steady.peak / inflow.per_s[0] < 1.1
            return (*case, float(memory)) if near and found.pool[0] < 600 else None
    return None


class Found(SteadyState):
    """The closed form, with the highest drain of the pipeline looked at last."""

    peak = np.inf


def balance(lengths, profile, choice, batch, memory):
    steady = Found(MODEL, PROFILES[profile], LENGTHS[lengths], memory_bytes=memory)
    form = steady._form(choice.policy)
    size = np.asarray([float(batch)])
    inflow = form._inflow(choice, size)
    pools = form.pools.of(choice.decode_stages, choice.num_micro_batches)
    with np.errstate(invalid="ignore"):
        found = form._balance(pools, inflow, size)
    steady.peak = found.per_s[0] if found.decode_limits[0] else pools.drain_per_s.max()
    return steady, found, inflow


@cache
def cases():
    rng = np.random.default_rng(11)
    wanted = {"encode": 8, "memory": 6, "decode": 4}
    drawn = []
    for limit, count in wanted.items():
        found = []
        while len(found) < count:
            case = draw(rng, limit)
            if case is not None:
                found.append((limit, *case))
        drawn += found
    return drawn


def requests_of(lengths, count):
    if LENGTHS[lengths].pairs is None:
        return make_requests(LENGTHS[lengths], count)
    # All pairs again and again, in random order: little sampling noise.
    pairs, rng = LENGTHS[lengths].pairs, np.random.default_rng(3)
    blocks = [rng.permutation(pairs) for _ in range(-(-count // len(pairs)))]
    inputs, outputs = np.concatenate(blocks)[:count].T
    return [
        Request(
            id=i, input_tokens=int(inputs[i]), max_output_tokens=320, forced_output_tokens=int(outputs[i])
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("index", range(18))
def test_throughput_and_latency_are_those_of_a_long_replay(index):
    limit, lengths, profile, choice, batch, memory = cases()[index]
    steady = SteadyState(MODEL, PROFILES[profile], LENGTHS[lengths], memory_bytes=memory)
    predicted = steady.estimate(choice, np.asarray([batch]), np.asarray([1]))
    room = round(float(predicted.decode_batch_size[0]))
    pages = 10**7
    if np.isfinite(memory):
        assert predicted.memory.total_bytes.max() <= memory
        pages = num_kv_pages(
            MODEL,
            choice.decode_stages,
            PROFILES[profile].dtype,
            memory_bytes=int(memory),
            page_size=16,
            encode_tokens=0.0,
            decode_queries=room / choice.num_micro_batches,
        )
    # Ten generations of the pool, a few hundred batches.
    count = min(max(10 * room * choice.num_decode_instances, 200 * batch, 2500), 4000)
    requests = requests_of(lengths, count)
    # Few long probes, so that the mean length changes by half a per cent at most.
    every = 600 if lengths == "correlated" else 250
    probed = with_probes(requests, count // every, steady.bound_output_tokens, np.random.default_rng(1))
    probes = {new.id for new, old in zip(probed, requests, strict=True) if new is not old}
    costs = [
        StageCosts(PROFILES[profile], MODEL, stage_shapes(s))
        for s in (choice.encode_stages, choice.decode_stages)
    ]
    weighed = choice.policy is not Policy.DISAGGREGATED
    result = replay_sides(
        Sides(
            encode_batch_size=batch,
            decode_room=room,
            mean_input_tokens=LENGTHS[lengths].mean_input if weighed else None,
        ),
        *costs,
        make_transfer(PROFILES[profile], MODEL, choice.policy, choice.encode_stages, choice.decode_stages),
        probed,
        num_micro_batches=choice.num_micro_batches,
        num_pages=pages,
        page_size=16,
        num_encode_instances=choice.num_encode_instances,
        num_decode_instances=choice.num_decode_instances,
    )
    starts = np.sort([r.encode_start_s for r in result.records])
    first, last = int(0.3 * count), int(0.85 * count)
    throughput = (last - first) / (starts[last] - starts[first])
    latencies = [
        r.finish_s - r.encode_start_s for r in result.records if r.id in probes and first < r.id < last
    ]
    assert len(latencies) >= 2
    # A pool that decoding limits drains as fast as the sample's queries, probes included, are long.
    planned = steady.completion.mean_iterations
    drawn = np.mean([r.forced_output_tokens - 1 for r in probed])
    expected = predicted.throughput_per_s[0] * (1.0 if limit == "encode" else planned / drawn)
    # What is left: batches are ragged and pools vary, while costs are read at their means.
    assert expected == pytest.approx(throughput, rel=0.02)
    assert predicted.latency_s[0] == pytest.approx(np.mean(latencies), rel=0.03)
