"""A schedule in a line: its knobs in the paper's symbols, its pipelines, its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from exegpt.report.units import ABSENT

Record = Mapping[str, Any]

_SYMBOLS = {
    "encode_batch_size": "B_E",
    "decode_batch_size": "B_D",
    "decode_iterations": "N_D",
    "token_budget": "budget",
    "num_micro_batches": "m",
    "encode_micro_batches": "encode m",
    "tp_size": "TP",
    "num_tp_gpus": "TP GPUs",
    "encode_gpus": "encode GPUs",
    "decode_tp_size": "decode TP",
    "num_decode_tp_gpus": "decode TP GPUs",
    "num_encode_instances": "encode instances",
    "num_decode_instances": "decode instances",
}
# What the stages say better, where they are known.
_PLACEMENT = (
    "tp_size",
    "num_tp_gpus",
    "encode_gpus",
    "decode_tp_size",
    "num_decode_tp_gpus",
    "num_encode_instances",
    "num_decode_instances",
)
# Policies whose batch is all that they have of B_E, B_D and N_D; it decodes until its longest query ends.
_STATIC = ("STATIC", "STATIC_HYBRID")
# The batch that a policy is searched over, by its symbol; others have B_E.
_BATCHES = {"STATIC": "batch", "STATIC_HYBRID": "batch", "ITERATION": "slots", "CHUNKED": "slots"}


def batch_symbol(policy: str) -> str:
    """What the batch of a policy is called in `knobs_text`."""
    return _BATCHES.get(policy, "B_E")


def knobs_text(record: Record) -> str:
    """The knobs of a schedule in the paper's symbols: `B_E 32, B_D 152, N_D 16, m 2, 2 x TP 2`.

    The last says the pipeline: two stages of two GPUs each. Without stages in the record its knobs do.
    """
    knobs, policy = dict(record.get("knobs") or {}), str(record.get("policy"))
    symbols = dict(_SYMBOLS)
    if policy != "RRA":
        knobs.pop("decode_iterations", None)
    if policy in _STATIC:
        knobs.pop("decode_batch_size", None)
        symbols["encode_batch_size"] = "batch"
    if policy in ("ITERATION", "CHUNKED"):
        symbols["decode_batch_size"] = "slots"
    if policy == "CHUNKED":
        knobs.pop("encode_batch_size", None)
    pipelines = pipelines_text(record)
    if pipelines:
        for name in _PLACEMENT:
            knobs.pop(name, None)
    elif knobs.get("tp_size") == 1:
        knobs.pop("num_tp_gpus", None)
    replicas = record.get("num_replicas", 1)
    parts = [f"{symbols.get(key, key)} {value}" for key, value in knobs.items() if value is not None]
    parts += [pipelines] if pipelines else []
    return ", ".join(parts + ([f"{replicas} replicas"] if replicas > 1 else [])) or ABSENT


def pipelines_text(record: Record) -> str:
    """Degrees of the stages of each pipeline: `2 x TP 4`, or `encode 5 x TP 1, decode 3 x TP 1`."""
    stages, knobs = record.get("stages") or (), record.get("knobs") or {}
    texts = []
    for role, group in groupby(stages, key=lambda stage: stage.get("role")):
        degrees = [len(stage["ranks"]) for stage in group]
        runs = [(degree, len(list(run))) for degree, run in groupby(degrees)]
        text = " + ".join(
            f"TP {degree}" if count == 1 else f"{count} x TP {degree}" for degree, count in runs
        )
        instances = knobs.get(f"num_{role}_instances") or 1
        if instances > 1:
            text = f"{instances} of ({text})" if len(degrees) > 1 else f"{instances} of {text}"
        texts.append(text if role == "both" else f"{role} {text}")
    return ", ".join(texts)


def stage_texts(stages: Sequence[Record]) -> list[str]:
    """A text per pipeline, equal stages in one: `3 stages, decode: ranks 5-6 layers 0-53 (27 each) | ..`."""
    texts = []
    for role, group in groupby(stages, key=lambda stage: stage.get("role")):
        members = list(group)
        runs = [list(run) for _, run in groupby(members, key=_shape)]
        count = "1 stage" if len(members) == 1 else f"{len(members)} stages"
        purpose = "encode and decode" if role == "both" else str(role)
        texts.append(f"{count}, {purpose}: " + " | ".join(map(_run_text, runs)))
    return texts


def _shape(stage: Record) -> tuple[int, int]:
    """Degree and number of layers: what makes two stages of a pipeline equal."""
    first, end = stage["layers"]
    return len(stage["ranks"]), end - first


def _run_text(run: Sequence[Record]) -> str:
    """Consecutive equal stages by their ranks and layers."""
    degree, num_layers = _shape(run[0])
    text = ranks_text([rank for stage in run for rank in stage["ranks"]])
    text += f" layers {run[0]['layers'][0]}-{run[-1]['layers'][1] - 1}"
    if len(run) == 1:
        return text
    groups = "" if degree == 1 else f"{len(run)} groups of {degree}, "
    return f"{text} ({groups}{num_layers} each)"


def ranks_text(ranks: Sequence[int]) -> str:
    """Consecutive ranks: `rank 3`, `ranks 0-7`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
