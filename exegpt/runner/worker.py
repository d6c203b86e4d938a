"""What every rank runs: load its shard, warm up, then follow the controller's plans."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from exegpt.errors import ExeGPTError, ScheduleError
from exegpt.events import StageEvent
from exegpt.policies import make_policy
from exegpt.policies.base import PolicyMachine, TurnMachine
from exegpt.policies.pool import Pool
from exegpt.policies.static_hybrid import StaticHybrid
from exegpt.report.result_file import write_result
from exegpt.runner.controller import STOP, Controller
from exegpt.runner.engine import NewRow, Plan, StageEngine
from exegpt.runner.job import RunJob, read_job
from exegpt.runner.kv_cache import KVCache, PageAllocator
from exegpt.runner.models import StageModel
from exegpt.runner.progress import run_progress
from exegpt.runner.sampling import SamplingSpec
from exegpt.runner.tokenizer import load_tokenizer
from exegpt.runner.transport import DistributedTransport, Transport, start_transport
from exegpt.runner.weights import check_weights, open_weights, resolve_weights
from exegpt.runner.worker_files import ERROR_FILE, MEASURED_FILE, REQUESTS_FILE
from exegpt.schedule import Schedule
from exegpt.specs import Dtype

logger = logging.getLogger(__name__)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch type of the same name."""
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


def build_engine(job: RunJob, transport: Transport, device: torch.device) -> StageEngine:
    """Load this rank's shard of its stage and set up its K/V pages.

    Raises
    ------
    ScheduleError
        If the schedule has another number of ranks than were started.
    """
    schedule = job.schedule
    if transport.world_size != schedule.num_ranks:
        raise ScheduleError(
            f"schedule: its stages name {schedule.num_ranks} ranks, but {transport.world_size} were started; "
            f"start with --num_gpus {schedule.num_ranks} in all"
        )
    groups = [transport.tensor_parallel(stage.ranks) for stage in schedule.stages]
    index = next(i for i, stage in enumerate(schedule.stages) if transport.rank in stage.ranks)
    stage = schedule.stages[index]
    model = StageModel(job.model, stage.layers, groups[index], dtype=torch_dtype(job.dtype), device=device)
    location = resolve_weights(job.weights, cache_dir=job.cache_dir, report=logger.info)
    reader = open_weights(location, job.model, job.seed)
    check_weights(reader, job.model)
    model.load(reader)
    cache = KVCache(
        num_layers=stage.num_layers,
        num_pages=job.num_pages,
        page_size=job.page_size,
        num_kv_heads=max(job.model.num_key_value_heads // stage.tp_size, 1),
        head_dim=job.model.head_dim,
        dtype=model.dtype,
        device=device,
    )
    return StageEngine(
        model,
        cache,
        PageAllocator(job.num_pages, job.page_size),
        stages=schedule.stages,
        stage_index=index,
        transport=transport,
        num_micro_batches=schedule.knobs.num_micro_batches,
        max_rows=job.max_rows,
        sampling=SamplingSpec(temperature=job.sampling.temperature, top_p=job.sampling.top_p, seed=job.seed),
        eos_token_ids=job.eos_token_ids,
    )


def warm_up(engine: StageEngine) -> None:
    """Send one short query per micro-batch through all stages, so that nothing is compiled while serving."""
    # One after another, and no longer than the least pool or window can hold.
    room = min(
        engine.allocator.num_pages * engine.allocator.page_size, engine.model.model.max_position_embeddings
    )
    length = max(min(4, room - 1), 1)
    row = NewRow(
        id=-1,
        input_tokens=length,
        max_output_tokens=min(2, room - length + 1),
        ignore_eos=True,
        token_ids=[0] * length,
    )
    for index in range(len(engine.micro_batches)):
        rows = [[row] if i == index else [] for i in range(len(engine.micro_batches))]
        engine.execute(Plan(cycle=-1, release=[], encode=rows, decode_iterations=3, keep_finished=False))
    engine.events.clear()


def follow(engine: StageEngine, transport: Transport) -> None:
    """Execute the controller's plans until it says stop."""
    while (message := transport.receive_control()) != STOP:
        engine.execute(Plan.from_message(message))


def _machine(schedule: Schedule) -> PolicyMachine:
    machine = make_policy(schedule)
    if isinstance(machine, TurnMachine | StaticHybrid):
        raise ScheduleError(
            f"schedule: policy={schedule.policy.value} is planned and replayed, but workers do not "
            "execute it yet; run RRA or STATIC, or use command=simulate"
        )
    return machine


def serve(
    job: RunJob,
    engine: StageEngine,
    transport: Transport,
    *,
    decode: Callable[[list[int]], str] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Run the job on this rank; rank 0 writes `requests.jsonl` and `measured.json`."""
    warm_up(engine)
    controller = None
    if transport.rank == 0:
        pool = Pool(
            num_micro_batches=job.schedule.knobs.num_micro_batches,
            num_pages=job.num_pages,
            page_size=job.page_size,
        )
        controller = Controller(
            _machine(job.schedule),
            pool,
            engine,
            transport,
            job.requests,
            eos_token_ids=job.eos_token_ids,
            path=job.output_dir / REQUESTS_FILE,
            decode=decode,
            report=report,
        )
        controller.run()
    else:
        follow(engine, transport)
    gathered = transport.gather_objects((engine.events, engine.model.weight_bytes, engine.allocator.num_free))
    if controller is not None:
        write_measured(
            controller, [g[0] for g in gathered], job.output_dir, weight_bytes=[g[1] for g in gathered]
        )


def write_measured(
    controller: Controller, events: list[list[StageEvent]], output_dir: Path, *, weight_bytes: list[int]
) -> None:
    """Write records and events, on the job's clock, for the report."""
    zero = controller.start_s
    shifted = [
        {**asdict(e), "start_s": e.start_s - zero, "end_s": e.end_s - zero}
        for of_rank in events
        for e in of_rank
    ]
    write_result(
        output_dir / MEASURED_FILE,
        {
            "records": [asdict(r) for r in controller.records.values()],
            "events": shifted,
            "weight_bytes": weight_bytes,
        },
    )


def run_rank(job: RunJob, transport: DistributedTransport) -> None:
    """A rank's whole life, from loading to the last file."""
    torch.set_num_threads(job.num_threads)
    started = time.perf_counter()
    engine = build_engine(job, transport, transport.device)
    logger.info("rank %d loaded its shard in %.1f s", transport.rank, time.perf_counter() - started)
    if transport.rank != 0:
        serve(job, engine, transport)
        return
    location = resolve_weights(job.weights, cache_dir=job.cache_dir, report=logger.info)
    tokenizer = load_tokenizer(location, cache_dir=job.cache_dir)
    decode = tokenizer.decode if tokenizer is not None else None
    with run_progress(len(job.requests)) as report:
        serve(job, engine, transport, decode=decode, report=report)


def share_job(job: RunJob | None, transport: DistributedTransport) -> RunJob:
    """Rank 0's job on every rank; requests stay with rank 0."""
    sent = job.without_requests() if job is not None else None
    received = transport.gather_objects(sent)[0]
    return job if job is not None else received


def report_error(error: BaseException, output_dir: Path, rank: int) -> None:
    """Leave a rank's error where the starting process finds it."""
    kind = "user" if isinstance(error, ExeGPTError) else "internal"
    path = output_dir / ERROR_FILE.format(rank=rank)
    path.write_text(f"{kind}\n{type(error).__name__}: {error}\n")


def main(argv: list[str]) -> None:
    """Entry of `deepspeed --module exegpt.runner.worker JOB`."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    path = Path(argv[1])
    transport, environment = start_transport()
    job = None
    try:
        job = share_job(read_job(path) if environment.rank == 0 else None, transport)
        run_rank(job, transport)
        transport.close()
    except ExeGPTError as error:
        report_error(error, path.parent, environment.rank)
        raise SystemExit(2) from error
    except BaseException as error:
        report_error(error, path.parent, environment.rank)
        raise


if __name__ == "__main__":
    main(sys.argv)
