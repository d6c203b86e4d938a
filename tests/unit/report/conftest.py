"""A hand-made pipeline run, and a solve record, for the tests of the report."""

import numpy as np
import pytest

from exegpt.events import RequestRecord, StageEvent


def pipeline_run(num_requests=80, batch=4, iterations=3, *, num_stages=2, seed=0):
    """Records and events of one micro-batch that encodes `batch` queries every few iterations."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, size=num_requests)
    records = [RequestRecord(i, 10 + i) for i in range(num_requests)]
    events, active, now, cycle = [], [], 0.0, 0
    waiting = list(records)

    def work(phase, iteration, rows, seconds):
        nonlocal now
        for stage in range(num_stages):
            events.append(
                StageEvent(stage, stage, phase, cycle, iteration, 0, rows, 10 * rows, now, now + seconds)
            )
            now += seconds

    while waiting or active:
        new, waiting = waiting[:batch], waiting[batch:]
        if new:
            for record in new:
                record.encode_start_s = now
            work("encode", 0, len(new), 0.05)
            for record in new:
                record.token_s.append(now)
        active += new
        for iteration in range(1, iterations + 1):
            for record in active:
                if record.output_tokens >= lengths[record.id]:
                    record.finish_reason = "length"
            active = [record for record in active if record.finish_reason is None]
            if active:
                work("decode", iteration, len(active), 0.01 + 0.001 * len(active))
                for record in active:
                    record.token_s.append(now)
        cycle += 1
    return records, events


@pytest.fixture
def served():
    return pipeline_run()


@pytest.fixture
def solve_record():
    rra = {
        "policy": "RRA",
        "knobs": {
            "encode_batch_size": 32,
            "decode_batch_size": 152,
            "decode_iterations": 16,
            "num_micro_batches": 2,
            "tp_size": 2,
            "num_tp_gpus": 4,
        },
        "stages": [
            {"role": "both", "ranks": [0, 1], "layers": [0, 15]},
            {"role": "both", "ranks": [2, 3], "layers": [15, 30]},
        ],
        "throughput_per_s": 12.34,
        "throughput_tokens_per_s": 1580.0,
        "latency_s": 4.2,
        "ttft_s": 0.0421,
        "tpot_s": 0.0312,
        "memory_bytes": [31 * 2**30, 31 * 2**30, 29 * 2**30, 29 * 2**30],
    }
    static = {
        **rra,
        "policy": "STATIC",
        "knobs": {**rra["knobs"], "encode_batch_size": 16, "num_micro_batches": 1},
        "throughput_per_s": 5.1,
    }
    return {
        **rra,
        "status": "ok",
        "latency_bound_s": 5.0,
        "memory_limit_bytes": 48 * 2**30,
        "throughput_upper_per_s": 12.34,
        "gap": 0.0,
        "num_evaluations": 123456,
        "space_size": 2000000,
        "wall_s": 0.42,
        "policies": {"RRA": rra, "WAA_C": {"infeasible": "both sides need 52 GiB [per GPU]"}},
        "baselines": {"STATIC": static},
        "notes": ["inputs are parent parameters"],
        "binding": ["encode_batch_size=32 is the largest searched"],
    }


@pytest.fixture
def infeasible_record():
    return {
        "status": "infeasible",
        "latency_bound_s": 0.5,
        "memory_limit_bytes": 48 * 2**30,
        "num_evaluations": 100,
        "space_size": 100,
        "wall_s": 0.1,
        "reason": "RRA: relax bound.latency_s from 0.5 s to 1.25 s",
        "policies": {"RRA": {"infeasible": "relax bound.latency_s from 0.5 s to 1.25 s"}},
        "baselines": {"STATIC": {"infeasible": "relax bound.latency_s from 0.5 s to 2.5 s"}},
    }
