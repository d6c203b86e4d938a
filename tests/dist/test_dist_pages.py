"""Small page pools on one rank in this process: who is put back, and that nothing of it can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from exegpt.policies import make_policy
from exegpt.policies.base import PolicyMachine, Query, Step, View
from exegpt.policies.pool import Pool
from exegpt.policies.rra import RRA
from exegpt.report.result_file import read_requests
from exegpt.runner.controller import Controller
from exegpt.runner.engine import NewRow, Plan, StageEngine
from exegpt.runner.job import RunJob
from exegpt.runner.transport import LocalTransport
from exegpt.runner.worker import build_engine, serve, warm_up
from exegpt.schedule import Knobs, Schedule, Stage
from exegpt.settings import SamplingSettings
from exegpt.specs import Dtype, ModelFamily, ModelSpec, Policy
from exegpt.workload.requests import Request

MODEL = ModelSpec(
    name="least",
    family=ModelFamily.LLAMA,
    num_hidden_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    vocab_size=32,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


SEEDS = range(16)


@dataclass
class Recorder:
    """A policy that keeps what it decided."""

    machine: PolicyMachine
    steps: list[Step] = field(default_factory=list)

    def next_step(self, view: View) -> Step | None:
        step = self.machine.next_step(view)
        if step is not None:
            self.steps.append(step)
        return step


def make_job(
    directory: Path,
    requests: Sequence[Request],
    *,
    policy: Policy = Policy.RRA,
    batch: int = 4,
    iterations: int = 1,
    micro_batches: int = 1,
    pages: int = 400,
    page_size: int = 1,
    eos_token_ids: frozenset[int] = frozenset(),
) -> RunJob:
    directory.mkdir()
    knobs = Knobs(
        encode_batch_size=batch,
        decode_batch_size=batch,
        decode_iterations=iterations,
        num_micro_batches=micro_batches,
        tp_size=1,
        num_tp_gpus=1,
    )
    stages = (Stage(role="both", ranks=(0,), layers=(0, 1)),)
    return RunJob(
        model=MODEL,
        schedule=Schedule(model=MODEL.name, policy=policy, knobs=knobs, stages=stages),
        weights="random",
        cache_dir=directory,
        seed=3,
        dtype=Dtype.float32,
        # Random weights as small as these repeat one token unless they draw.
        sampling=SamplingSettings(temperature=1.0),
        num_pages=pages,
        page_size=page_size,
        max_rows=len(requests) + micro_batches,
        num_threads=1,
        eos_token_ids=eos_token_ids,
        requests=tuple(requests),
        output_dir=directory,
    )


def make_engine(job: RunJob) -> StageEngine:
    torch.set_num_threads(1)
    return build_engine(job, LocalTransport(), torch.device("cpu"))


def assert_nothing_is_held(engine: StageEngine) -> None:
    engine.allocator.check()
    assert engine.allocator.num_free == engine.allocator.num_pages
    assert [len(batch.rows) for batch in engine.micro_batches] == [0] * len(engine.micro_batches)
    assert not any(batch.sampled or batch.received for batch in engine.micro_batches)


def tokens_of(job: RunJob) -> dict[int, list[int]]:
    """Serve the job; output tokens by request."""
    engine = make_engine(job)
    serve(job, engine, LocalTransport())
    assert_nothing_is_held(engine)
    lines = read_requests(job.output_dir / "requests.jsonl")
    assert all(line["status"] == "ok" for line in lines)
    return {line["id"]: line["token_ids"] for line in lines}


def decided(job: RunJob) -> list[Step]:
    """Serve the job; the steps that its policy decided on."""
    engine = make_engine(job)
    knobs = job.schedule.knobs
    machine = Recorder(make_policy(job.schedule))
    pool = Pool(num_micro_batches=knobs.num_micro_batches, num_pages=job.num_pages, page_size=job.page_size)
    Controller(
        machine,
        pool,
        engine,
        LocalTransport(),
        job.requests,
        eos_token_ids=job.eos_token_ids,
        path=job.output_dir / "requests.jsonl",
    ).run()
    assert_nothing_is_held(engine)
    return machine.steps


def crowded(seed: int, directory: Path) -> RunJob:
    """A random job whose pool holds its largest request and little more."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(int(rng.integers(3, 12))):
        inputs, outputs = int(rng.integers(1, 8)), int(rng.integers(1, 25))
        requests.append(
            Request(
                id=i,
                input_tokens=inputs,
                token_ids=tuple(rng.integers(0, MODEL.vocab_size, inputs).tolist()),
                max_output_tokens=outputs,
                forced_output_tokens=outputs if i % 3 else None,
            )
        )
    page_size = int(rng.integers(1, 4))
    largest = max(-(-(r.input_tokens + r.max_output_tokens - 1) // page_size) for r in requests)
    return make_job(
        directory,
        requests,
        policy=Policy.STATIC if seed % 4 == 3 else Policy.RRA,
        batch=int(rng.integers(1, 8)),
        iterations=int(rng.integers(1, 6)),
        micro_batches=int(rng.integers(1, 4)),
        pages=largest + int(rng.integers(0, 6)),
        page_size=page_size,
        eos_token_ids=frozenset({1, 2}),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crowded_pool_changes_no_token(seed: int, tmp_path: Path) -> None:
    job = crowded(seed, tmp_path / "crowded")
    roomy = replace(job, num_pages=400, output_dir=tmp_path / "roomy")
    roomy.output_dir.mkdir()
    assert tokens_of(job) == tokens_of(roomy)


def test_a_step_that_puts_back_encodes_nobody_and_keeps_no_finished_rows(tmp_path: Path) -> None:
    """The engine relies on it: a released row leaves in the decode phase, after the encoding."""
    steps = [step for seed in SEEDS for step in decided(crowded(seed, tmp_path / str(seed)))]
    put_back = [step for step in steps if step.preempt]
    assert not any(step.num_encoded or step.keep_finished for step in put_back)
    assert all(len(set(step.preempt)) == len(step.preempt) for step in put_back)
    assert len(put_back) > len(SEEDS), "the pools are not crowded"
    assert max(len(step.preempt) for step in put_back) > 1, "no step puts back two at once"


def test_as_many_are_put_back_as_pages_are_missing() -> None:
    """Four rows of a page a token, 12 pages; after one more iteration they would hold 5, 5, 5 and 3."""
    pool = Pool(num_micro_batches=2, num_pages=12, page_size=1)
    for query_id, input_tokens in enumerate((3, 3, 3, 1)):
        pool.arrive(Query(query_id, input_tokens, 9))
    policy = RRA(encode_batch_size=4, decode_iterations=2)
    pool.begin(Step(encode=((0, 1), (2, 3)), decode_iterations=1))
    for query_id in range(4):
        assert pool.receive(query_id, finished=False)
    # 18 less 3 are too many still; less 5 more they fit.
    step = policy.next_step(pool)
    assert step == Step(encode=((), ()), decode_iterations=1, preempt=(3, 2))
    pool.begin(step)
    assert [(q.id, q.input_tokens, q.max_output_tokens) for q in pool.waiting] == [(2, 4, 8), (3, 2, 8)]
    assert pool.surplus(1) == ()


def test_rows_leave_when_all_end_while_room_is_made(tmp_path: Path) -> None:
    """Draining finds that everyone has ended: no query is left to plan for, but the ranks hold rows."""
    prompt, limit = (5, 6, 7, 8), 20
    requests = [
        Request(id=i, input_tokens=len(prompt), token_ids=prompt, max_output_tokens=limit) for i in range(2)
    ]
    said = tokens_of(make_job(tmp_path / "endless", requests))
    num_together = 0
    for at in range(4, limit - 1):
        ends = {said[0][at], said[1][at]}
        if ends & {*said[0][:at], *said[1][:at]}:
            continue
        num_together += 1
        # Both rows fill this pool with the token before their last.
        for pages in range(len(prompt) + limit - 1, 2 * (len(prompt) + at) + 2):
            job = make_job(tmp_path / f"{at}-{pages}", requests, pages=pages, eos_token_ids=frozenset(ends))
            assert tokens_of(job) == {i: tokens[: at + 1] for i, tokens in said.items()}
    assert num_together > 1


@pytest.mark.parametrize("pages", [1, 2, 3, 5])
def test_warming_up_fits_the_smallest_pool(pages: int, tmp_path: Path) -> None:
    outputs = min(pages, 2)
    request = Request(
        id=0, input_tokens=1, token_ids=(4,), max_output_tokens=outputs, forced_output_tokens=outputs
    )
    job = make_job(tmp_path / "job", [request], pages=pages, micro_batches=3)
    engine = make_engine(job)
    warm_up(engine)
    assert_nothing_is_held(engine)
    assert not engine.events
    assert len(tokens_of(replace(job))[0]) == outputs


def new_row(query_id: int, tokens: int = 4) -> NewRow:
    return NewRow(
        id=query_id, input_tokens=tokens, max_output_tokens=6, ignore_eos=True, token_ids=[3] * tokens
    )


def test_the_engine_refuses_to_release_and_encode_one_query_at_once(tmp_path: Path) -> None:
    engine = make_engine(make_job(tmp_path / "job", [], micro_batches=4))
    plan = Plan(
        cycle=0, release=[], encode=[[new_row(7)], [], [], []], decode_iterations=1, keep_finished=False
    )
    engine.execute(plan)
    with pytest.raises(AssertionError, match=r"\[7\] come and go in one plan"):
        engine.execute(replace(plan, release=[7]))


@pytest.mark.parametrize("keep_finished", [False, True])
def test_released_rows_leave_and_the_others_go_on(keep_finished: bool, tmp_path: Path) -> None:
    engine = make_engine(make_job(tmp_path / "job", [], micro_batches=4))
    received: dict[int, int] = {0: 0, 1: 0}

    def count(_: int, ids: list[int], tokens: object, at_s: float) -> None:
        for query_id in ids:
            received[query_id] += 1

    engine.on_tokens = count
    first = Plan(
        cycle=0,
        release=[],
        encode=[[], [new_row(0), new_row(1)], [], []],
        decode_iterations=2,
        keep_finished=keep_finished,
    )
    engine.execute(first)
    engine.execute(replace(first, cycle=1, release=[1], encode=[[]] * 4, decode_iterations=9))
    assert received == {0: 6, 1: 3}
    assert_nothing_is_held(engine)
