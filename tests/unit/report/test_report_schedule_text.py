import pytest

from exegpt.report.memory_rows import memory_columns, memory_rows, memory_title
from exegpt.report.reasons import limit_name, limit_text, reason_rows
from exegpt.report.schedule_text import knobs_text, pipelines_text, stage_texts

GIB = 2**30


def pipeline(*shapes, role="both", rank=0):
    """Stages of (degree, layers)."""
    stages, layer = [], 0
    for degree, layers in shapes:
        ranks = list(range(rank, rank + degree))
        stages.append({"role": role, "ranks": ranks, "layers": [layer, layer + layers]})
        rank, layer = rank + degree, layer + layers
    return stages


@pytest.mark.parametrize(
    ("shapes", "texts"),
    [
        ([(8, 96)], "1 stage, encode and decode: ranks 0-7 layers 0-95"),
        ([(1, 15), (1, 15)], "2 stages, encode and decode: ranks 0-1 layers 0-29 (15 each)"),
        (
            [(1, 27), (1, 27), (1, 26)],
            "3 stages, encode and decode: ranks 0-1 layers 0-53 (27 each) | rank 2 layers 54-79",
        ),
        (
            [(1, 4), (2, 4), (2, 4)],
            "3 stages, encode and decode: rank 0 layers 0-3 | ranks 1-4 layers 4-11 (2 groups of 2, 4 each)",
        ),
    ],
)
def test_equal_stages_are_one_text(shapes, texts):
    assert stage_texts(pipeline(*shapes)) == [texts]


def test_sides_have_their_own_pipelines():
    stages = pipeline((1, 5), (1, 5), role="encode") + pipeline((4, 10), role="decode", rank=2)
    assert pipelines_text({"stages": stages}) == "encode 2 x TP 1, decode TP 4"
    knobs = {"num_encode_instances": 3, "num_decode_instances": 2}
    text = pipelines_text({"stages": stages, "knobs": knobs})
    assert text == "encode 3 of (2 x TP 1), decode 2 of TP 4"
    assert len(stage_texts(stages)) == 2


KNOBS = {
    "encode_batch_size": 8,
    "decode_batch_size": 40,
    "decode_iterations": 1,
    "num_micro_batches": 2,
    "tp_size": 1,
    "num_tp_gpus": 2,
}


@pytest.mark.parametrize(
    ("policy", "further", "text"),
    [
        ("RRA", {"decode_iterations": 16}, "B_E 8, B_D 40, N_D 16, m 2, 2 x TP 1"),
        ("WAA", {}, "B_E 8, B_D 40, m 2, 2 x TP 1"),
        ("STATIC", {}, "batch 8, m 2, 2 x TP 1"),
        ("STATIC_HYBRID", {"encode_micro_batches": 4}, "batch 8, m 2, encode m 4, 2 x TP 1"),
        ("ITERATION", {}, "B_E 8, slots 40, m 2, 2 x TP 1"),
        ("CHUNKED", {"token_budget": 512}, "slots 40, m 2, budget 512, 2 x TP 1"),
    ],
)
def test_knobs_are_those_that_a_policy_has(policy, further, text):
    record = {"policy": policy, "knobs": {**KNOBS, **further}, "stages": pipeline((1, 5), (1, 5))}
    assert knobs_text(record) == text


def test_knobs_say_the_pipeline_where_stages_are_unknown():
    knobs = {**KNOBS, "encode_gpus": 4, "decode_tp_size": 2, "num_decode_tp_gpus": 4}
    text = knobs_text({"policy": "WAA", "knobs": knobs, "num_replicas": 2})
    assert text == "B_E 8, B_D 40, m 2, TP 1, encode GPUs 4, decode TP 2, decode TP GPUs 4, 2 replicas"


def test_memory_is_told_by_use_for_gpus_that_are_alike():
    record = {
        "memory_bytes": [5 * GIB, 5 * GIB, 6 * GIB],
        "memory_parts_bytes": {"weights": [3 * GIB] * 3, "kv": [2 * GIB, 2 * GIB, 3 * GIB]},
        "memory_limit_bytes": 8 * GIB,
        "num_replicas": 2,
    }
    assert memory_columns(record) == ("GPUs", "weights", "K/V", "total", "free", "of limit")
    assert memory_rows(record) == [
        ("ranks 0-1", "3.00", "2.00", "5.00", "3.00", "62.5 %"),
        ("rank 2", "3.00", "3.00", "6.00", "2.00", "75.0 %"),
    ]
    assert memory_title(record) == "Memory per GPU, GiB (limit 8.00), of one replica"
    assert memory_rows({"memory_bytes": [1]}) == []


def stopped(rate, further_rate, breaks=None, roomier=None):
    further = {
        "batch": 9,
        "throughput_per_s": further_rate,
        "throughput_with_more_memory_per_s": roomier,
        "breaks": breaks or {},
    }
    return {"policy": "RRA", "throughput_per_s": rate, "next_batch": further}


@pytest.mark.parametrize(
    ("record", "name", "text"),
    [
        (
            stopped(2.0, 2.1, {"latency_s": {"value": 10.1, "limit": 10.0}}),
            "latency",
            "limited by latency (B_E 9 needs 1.0 % more than 10.0 s)",
        ),
        (
            stopped(2.0, 2.1, {"memory": {"value": 11 * GIB, "limit": 10 * GIB}}),
            "memory",
            "limited by memory (B_E 9 needs 10.0 % more than 10.0 GiB)",
        ),
        (
            stopped(2.0, 2.1, {"latency_s": {"value": 10.000001, "limit": 10.0}}),
            "latency",
            "limited by latency (B_E 9 needs under 0.1 % more than 10.0 s)",
        ),
        (
            stopped(2.0, 0.0, {"profile": {"value": None, "limit": None}}),
            "profile",
            "limited by the profile: B_E 9 lies beyond it",
        ),
        (
            stopped(2.0, 1.9),
            "none",
            "limited by no constraint: B_E 9 meets them all and serves 1.90 seq/s",
        ),
        (
            stopped(2.0, 1.9, roomier=2.2),
            "memory",
            "limited by memory: a tenth more of it would serve 2.20 seq/s",
        ),
        (
            stopped(2.0, 2.1),
            "range",
            "limited by the range searched: B_E 9 meets all constraints and would serve more",
        ),
        ({"policy": "RRA", "throughput_per_s": 2.0}, None, None),
    ],
)
def test_what_stops_a_larger_batch(record, name, text):
    assert (limit_name(record), limit_text(record)) == (name, text)


def test_reasons_set_the_winner_beside_the_next_and_the_best_baseline():
    winner = stopped(2.0, 1.9)
    policies = {"RRA": winner, "WAA": {**stopped(1.6, 0.0, {"profile": {}}), "policy": "WAA"}}
    solve = {**winner, "policies": policies, "baselines": {"STATIC": {"throughput_per_s": 1.0}}}
    texts = [text for _, text in reason_rows(solve)]
    assert texts[0] == "1.25x of WAA, the runner-up; 2.00x of STATIC, the best baseline"
    assert texts[1].startswith("RRA is limited by no constraint")
    assert texts[2].startswith("WAA is limited by the profile")
    alone = {**solve, "policies": {"RRA": winner, "WAA": {"infeasible": "too large"}}}
    assert reason_rows(alone)[0][1].startswith("the only policy with a schedule")
    assert reason_rows({**solve, "status": "infeasible"}) == []
