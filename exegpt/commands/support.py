"""`command=support`: whether a model, cluster and profile can be planned and run, and what is missing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any

from exegpt.commands.context import Context
from exegpt.commands.inputs import DEFAULT_PROMPT_OUTPUT_TOKENS
from exegpt.commands.profile import chosen_source, find_profile, profile_record
from exegpt.errors import ConfigError, ExeGPTError
from exegpt.profiler.table import ProfileTable
from exegpt.report.tables import support_table
from exegpt.settings import WorkloadKind
from exegpt.simulator.fit import least_gpus


@dataclass(slots=True)
class Findings:
    """What was found; `blocked` keeps planning from working, `missing` is what it does without.

    `not_runnable` says why the runtime cannot execute a schedule here, `notes` what else to know.
    """

    blocked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    not_runnable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def support(context: Context) -> None:
    """Say what can be planned and run, print it and write result.json; never measures, never fetches."""
    found = Findings()
    sections = {
        "memory": _memory(context, found),
        "window": _window(context, found),
        "profile": _profile(context, found),
    }
    _run(context, found)
    record = {
        "supported": not found.blocked,
        "runnable": not found.blocked and not found.not_runnable,
        "missing": [*found.blocked, *found.missing],
        "not_runnable": found.not_runnable,
        "notes": found.notes,
        **sections,
    }
    job, cluster = context.job, context.cluster
    head = {
        "model": (
            f"{job.model.name} ({context.dtype.value}, {job.model.num_parameters / 1e9:.3g} B parameters)"
        ),
        "cluster": f"{cluster.num_nodes} x {cluster.gpus_per_node} x {cluster.device}",
        "workload": job.workload.name,
    }
    context.write("ok", {**head, "support": record})
    support_table(head, record, context.console)


def unsupported_record(reason: str) -> dict[str, Any]:
    """The `support` record of a model whose layers cannot be described."""
    return {
        "supported": False,
        "runnable": False,
        "missing": [f"model: {reason}"],
        "not_runnable": [],
        "notes": [],
        "memory": None,
        "window": None,
        "profile": None,
    }


def _memory(context: Context, found: Findings) -> dict[str, Any]:
    """One copy of the weights against the cluster."""
    model, cluster = context.job.model, context.cluster
    least = least_gpus(
        model, context.dtype, memory_bytes=cluster.memory_bytes, gpus_per_node=cluster.gpus_per_node
    )
    weights_bytes = model.num_parameters * context.dtype.num_bytes
    if least is None or least > cluster.num_gpus:
        needed = "more GPUs than it has layers and degrees" if least is None else f"{least} GPUs"
        found.blocked.append(
            f"memory: the weights ({weights_bytes / 2**30:.3g} GiB) need {needed} of "
            f"{cluster.memory_bytes / 2**30:.3g} GiB, and the cluster has {cluster.num_gpus}; raise "
            "cluster.num_nodes or cluster.gpus_per_node, or choose GPUs with more memory"
        )
    return {
        "weights_bytes": weights_bytes,
        "memory_bytes": cluster.memory_bytes,
        "num_gpus": cluster.num_gpus,
        "least_gpus": least,
        "kv_bytes_per_token": model.kv_bytes_per_token(context.dtype),
    }


def _window(context: Context, found: Findings) -> dict[str, Any]:
    """Lengths of the workload against what the model reads and writes at most."""
    job = context.job
    window: dict[str, Any] = {"tokens": job.model.max_position_embeddings}
    if job.workload.kind is WorkloadKind.prompts:
        # Prompts are counted by the model's tokenizer, which is loaded with its weights.
        limit = job.runner.max_output_tokens or DEFAULT_PROMPT_OUTPUT_TOKENS
        found.notes.append("workload=prompts: lengths of prompts are known once its tokenizer is loaded")
        if job.weights == "random":
            found.blocked.append(
                f"workload={job.workload.name}: model.weights=random comes with no tokenizer; choose weights "
                "that do, or another workload (translation, trace, fixed, ...)"
            )
        return {**window, "longest_input": None, "longest_output": limit}
    try:
        lengths = context.inputs.lengths
    except ExeGPTError as error:
        found.blocked.append(str(error))
        return {**window, "longest_input": None, "longest_output": None}
    found.notes += lengths.notes
    return {**window, "longest_input": lengths.max_input, "longest_output": lengths.max_output}


def _profile(context: Context, found: Findings) -> dict[str, Any]:
    """Where costs would come from, and what they lack."""
    source = chosen_source(context).value
    try:
        table, path = find_profile(context)
    except ConfigError as error:
        found.blocked.append(f"profile: {error}")
        return {"source": source}
    if table is None:
        _unmeasured(context, found)
        return {"source": source, "path": None}
    _missing_costs(context, table, found)
    found.notes += table.notes
    return {"source": source, **profile_record(table, path, 0.0)}


def _unmeasured(context: Context, found: Findings) -> None:
    why = context.absent_devices()
    try:
        context.job.model.require_runnable()
    except ConfigError as error:
        why = why or str(error)
    if why:
        found.blocked.append(
            f"profile: none was measured for this job, and it cannot be measured here: {why}; use "
            "profile.source=analytic"
        )
        return
    found.missing.append(
        f"profile: none was measured yet; the first command that needs it measures for about "
        f"{context.job.profile.budget_s:.0f} s"
    )


def _missing_costs(context: Context, table: ProfileTable, found: Findings) -> None:
    allowed = context.job.model.tp_sizes(context.cluster.gpus_per_node)
    lacking = [degree for degree in allowed if degree not in table.layers]
    if lacking:
        found.missing.append(
            f"profile: no costs at tp_size {', '.join(map(str, lacking))}; plans keep to "
            f"{', '.join(map(str, sorted(table.layers)))}"
        )
    wanted = context.job.solver.tp_sizes
    if wanted is not None and not set(wanted) & set(table.layers):
        found.blocked.append(
            f"solver.tp_sizes={list(wanted)}: the profile has none of them, but {sorted(table.layers)}"
        )


def _run(context: Context, found: Findings) -> None:
    """Whether ranks could execute a schedule here."""
    job = context.job
    try:
        job.model.require_runnable()
    except ConfigError as error:
        found.not_runnable.append(str(error))
    if reason := context.absent_devices():
        found.not_runnable.append(f"cluster.gpu={job.cluster.gpu}: {reason}")
    elif context.cluster.num_nodes > 1 and job.runner.hostfile is None:
        found.not_runnable.append(
            f"cluster.num_nodes={context.cluster.num_nodes} needs runner.hostfile, which names the machines"
        )
    if context.cluster.device_type == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
        found.notes.append("no C++ compiler: the CPU kernels fall back to torch's, which are slower")
