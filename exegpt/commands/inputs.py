"""Requests of a job and the length distribution they are planned with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.errors import ConfigError, DistributionError
from exegpt.settings import Arrival, Job, NormalLengths, WorkloadKind
from exegpt.workload.history import default_history, read_history
from exegpt.workload.lengths import RequestLengths, clip_outputs, independent, reject_long_inputs
from exegpt.workload.pmf import FloatArray, empirical_pmf, fixed_pmf, truncated_normal_pmf
from exegpt.workload.prompts import Prompt, default_prompts, read_prompts
from exegpt.workload.requests import Request, poisson_arrivals, sample_requests, trace_arrivals
from exegpt.workload.traces import read_pairs

logger = logging.getLogger(__name__)

DEFAULT_NUM_REQUESTS = 128

# Where no limit is set, answers to prompts stop here: the main job then ends within minutes on two CPU
# cores, and one answer in three ends by itself before.
DEFAULT_PROMPT_OUTPUT_TOKENS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Lengths to plan with and requests to run.

    `eos_token_ids` is empty where lengths are forced. `forced` says whether they are.
    """

    lengths: RequestLengths
    requests: tuple[Request, ...]
    eos_token_ids: frozenset[int]
    max_output_tokens: int


def make_inputs(job: Job) -> Inputs:
    """Lengths and requests of a job.

    Raises
    ------
    ConfigError
        If the workload's files cannot be read, or its lengths do not fit the model's window.
    """
    if job.workload.kind is WorkloadKind.prompts:
        return _prompts(job)
    if job.runner.ignore_eos is False:
        raise ConfigError(
            f"runner.ignore_eos=false: the requests of workload={job.workload.name} are random tokens "
            "of sampled "
            "lengths, which no end of sequence ends; leave it null, or use workload=prompts"
        )
    lengths, arrivals = _lengths(job)
    limit = job.runner.max_output_tokens or lengths.max_output
    lengths = _fit_window(clip_outputs(lengths, limit), job)
    rng = np.random.default_rng(job.seed)
    count = job.workload.num_requests or DEFAULT_NUM_REQUESTS
    requests = sample_requests(
        lengths, count, rng, vocab_size=job.model.vocab_size, arrivals_s=_arrivals(job, arrivals, count, rng)
    )
    return Inputs(
        lengths=lengths,
        requests=tuple(requests),
        eos_token_ids=frozenset(),
        max_output_tokens=lengths.max_output,
    )


def _arrivals(job: Job, trace: FloatArray | None, count: int, rng: np.random.Generator) -> FloatArray | None:
    match job.workload.arrival:
        case Arrival.closed:
            return None
        case Arrival.poisson:
            assert job.workload.rate_per_s is not None
            return poisson_arrivals(job.workload.rate_per_s, count, rng)
        case Arrival.trace:
            return trace_arrivals(trace, count)


def _lengths(job: Job) -> tuple[RequestLengths, FloatArray | None]:
    workload = job.workload
    match workload.kind:
        case WorkloadKind.fixed:
            assert workload.input_tokens is not None
            assert workload.output_tokens is not None
            name = f"{workload.input_tokens} in, {workload.output_tokens} out"
            return independent(
                fixed_pmf(workload.input_tokens), fixed_pmf(workload.output_tokens), description=name
            ), None
        case WorkloadKind.trace:
            assert workload.path is not None
            trace = read_pairs(
                workload.path, input_column=workload.input_column, output_column=workload.output_column
            )
            return trace.lengths(), trace.arrivals_s
        case _:
            assert workload.input is not None
            assert workload.output is not None
            inputs, input_note = _normal(workload.input)
            outputs, output_note = _normal(workload.output)
            notes = tuple(
                f"{side}: {note}" for side, note in (("input", input_note), ("output", output_note)) if note
            )
            return independent(inputs, outputs, description=workload.name, notes=notes), None


def _normal(settings: NormalLengths) -> tuple[FloatArray, str | None]:
    return truncated_normal_pmf(settings.mean, settings.std, settings.max)


def _fit_window(lengths: RequestLengths, job: Job) -> RequestLengths:
    model, window = job.model, job.model.max_position_embeddings
    if lengths.max_output >= window:
        raise ConfigError(
            f"workload: outputs of up to {lengths.max_output} tokens leave no room for a prompt in the "
            "window of "
            f"{window} tokens of {model.name}. Set runner.max_output_tokens lower."
        )
    try:
        return reject_long_inputs(lengths, window - lengths.max_output)
    except DistributionError as error:
        raise ConfigError(
            f"workload={job.workload.name} on {model.name}, whose window is {window} tokens: {error}"
        ) from error


def _prompts(job: Job) -> Inputs:
    # Imported here: transformers takes seconds to load, and only prompts need it.
    from exegpt.runner.tokenizer import load_tokenizer
    from exegpt.runner.weights import resolve_weights

    prompts = read_prompts(job.workload.path) if job.workload.path else default_prompts()
    count = job.workload.num_requests or len(prompts)
    if count > len(prompts):
        raise ConfigError(
            f"workload.num_requests={count}: {job.workload.path or 'the shipped file'} holds "
            f"{len(prompts)} prompts"
        )
    history, note = (
        read_history(job.workload.output_history) if job.workload.output_history else default_history()
    )
    limit = job.runner.max_output_tokens or min(len(history) - 1, DEFAULT_PROMPT_OUTPUT_TOKENS)
    if limit >= job.model.max_position_embeddings:
        raise ConfigError(
            f"runner.max_output_tokens={limit} leaves no room for a prompt in the window of "
            f"{job.model.max_position_embeddings} tokens of {job.model.name}"
        )
    location = resolve_weights(job.weights, cache_dir=job.profile.cache_dir, report=logger.info)
    tokenizer = load_tokenizer(location, cache_dir=job.profile.cache_dir)
    if tokenizer is None:
        raise ConfigError(
            f"workload=prompts: model.weights={job.weights} comes with no tokenizer; choose weights "
            "that do, or "
            "workload=fixed, trace or one of the tasks"
        )
    token_ids = tokenizer.encode_chat([p.prompt for p in prompts[:count]])
    rng = np.random.default_rng(job.seed)
    arrivals = _arrivals(job, None, count, rng)
    requests = _prompt_requests(job, prompts[:count], token_ids, limit, arrivals)
    served = [r.input_tokens for r in requests if r.error is None]
    if not served:
        raise ConfigError(
            f"workload.path={job.workload.path}: none of its {count} prompts can be served: "
            f"{requests[0].error}"
        )
    lengths = clip_outputs(
        independent(empirical_pmf(served), history, description=job.workload.name, notes=(note,)), limit
    )
    return Inputs(
        lengths=lengths,
        requests=tuple(requests),
        eos_token_ids=frozenset() if job.runner.ignore_eos else tokenizer.eos_token_ids,
        max_output_tokens=limit,
    )


def _prompt_requests(
    job: Job, prompts: Sequence[Prompt], token_ids: list[list[int]], limit: int, arrivals: FloatArray | None
) -> list[Request]:
    window = job.model.max_position_embeddings
    requests = []
    for index, (prompt, ids) in enumerate(zip(prompts, token_ids, strict=True)):
        error = prompt.error
        if error is None and len(ids) >= window:
            error = (
                f"prompt of {len(ids)} tokens is longer than the window of {window} tokens of "
                f"{job.model.name}"
            )
        forced = prompt.output_tokens
        most = min(forced or prompt.max_output_tokens or limit, limit, max(window - len(ids), 1))
        requests.append(
            Request(
                id=index,
                prompt=prompt.prompt,
                token_ids=tuple(ids),
                input_tokens=len(ids),
                max_output_tokens=most,
                forced_output_tokens=most if forced or job.runner.ignore_eos else None,
                arrival_s=float(arrivals[index]) if arrivals is not None else 0.0,
                error=error,
            )
        )
    return requests


def predicted_requests(inputs: Inputs, seed: int) -> list[Request]:
    """The requests of a job with output lengths drawn where the model decides them: what a replay takes."""
    rng = np.random.default_rng(seed)
    served = [r for r in inputs.requests if r.error is None]
    _, outputs = inputs.lengths.sample(rng, len(served))
    return [
        r if r.forced_output_tokens else replace(r, forced_output_tokens=int(min(n, r.max_output_tokens)))
        for r, n in zip(served, outputs, strict=True)
    ]
