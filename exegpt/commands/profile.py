"""`command=profile`, and the profile that other commands need: given, cached or measured."""

from __future__ import annotations

import logging
import os
import shutil
import time
from importlib.metadata import version
from pathlib import Path

from exegpt import __version__
from exegpt.commands.context import Context
from exegpt.profiler.job import MEASURE_MODULE, MeasureJob, write_measure_job
from exegpt.profiler.table import VERSION as PROFILE_VERSION
from exegpt.profiler.table import ProfileKey, ProfileTable, check_key, read_profile, shape_digest
from exegpt.report.tables import profile_table
from exegpt.runner.launcher import launch

logger = logging.getLogger(__name__)


def profile_key(context: Context) -> ProfileKey:
    """What a profile for this job must have been measured for."""
    job, cluster = context.job, context.cluster
    return ProfileKey(
        model=job.model.name,
        shape=shape_digest(job.model),
        dtype=context.dtype.value,
        device=cluster.device,
        num_ranks=cluster.num_gpus,
        software=", ".join(
            (
                f"torch {version('torch')}",
                f"exegpt {__version__}",
                f"kernels {_kernels()}",
                f"page_size {job.runner.page_size}",
                f"profile {PROFILE_VERSION}",
            )
        ),
    )


def _kernels() -> str:
    """What the kernels will be built with; without a compiler they fall back to torch and cost more."""
    forced = os.environ.get("EXEGPT_KERNELS", "auto")
    return f"{forced} ({'with' if shutil.which('c++') or shutil.which('g++') else 'without'} compiler)"


def cached_path(context: Context) -> Path:
    """Where the profile of this job is kept."""
    job, key = context.job, profile_key(context)
    return job.profile.cache_dir / "profiles" / f"{job.model.name}-{key.dtype}-{key.digest()}.json"


def find_profile(context: Context) -> tuple[ProfileTable | None, Path]:
    """The profile of this job, named or cached, with its path; None if it has yet to be measured there.

    Raises
    ------
    ProfileError
        If the profile is corrupt, or of another model, dtype or device.
    """
    named = context.job.profile.path
    if named is not None:
        table = read_profile(named)
        check_key(table.key, profile_key(context), source=str(named))
        return table, named
    path = cached_path(context)
    if path.exists() and not context.job.profile.refresh:
        table = read_profile(path)
        check_key(table.key, profile_key(context), source=str(path))
        logger.info("profile: %s (cached)", path)
        return table, path
    return None, path


def load_profile(context: Context) -> tuple[ProfileTable, Path]:
    """The profile of this job: the one named, else the cached one, else a new measurement.

    Raises
    ------
    ProfileError
        If the profile named is corrupt, or of another model, dtype or device.
    """
    table, path = find_profile(context)
    if table is None:
        _measure(context, path)
        table = read_profile(path)
    return table, path


def measure_job(context: Context, path: Path) -> MeasureJob:
    """The measurement of this job's model on this job's ranks; ConfigError if the runtime cannot run it."""
    job = context.job
    job.model.require_runnable()
    return MeasureJob(
        model=job.model,
        key=profile_key(context),
        page_size=job.runner.page_size,
        num_threads=context.num_threads,
        budget_s=job.profile.budget_s,
        memory_bytes=context.cluster.memory_bytes,
        gpus_per_node=context.cluster.gpus_per_node,
        path=path,
    )


def _measure(context: Context, path: Path) -> None:
    handed = context.output_dir / "measure.pkl"
    write_measure_job(measure_job(context, path), handed)
    try:
        launch(
            MEASURE_MODULE,
            [str(handed)],
            num_ranks=context.cluster.num_gpus,
            output_dir=context.output_dir,
            num_threads=context.num_threads,
            num_nodes=context.cluster.num_nodes,
            device_type=context.cluster.device_type,
            hostfile=context.job.runner.hostfile,
        )
    finally:
        handed.unlink(missing_ok=True)


def profile_record(table: ProfileTable, path: Path, wall_s: float) -> dict[str, object]:
    """The `profile` record of result.json."""
    return {
        "path": str(path),
        "points": table.num_points(),
        "wall_s": wall_s,
        "measured_s": table.measured_s,
        "tp_sizes": sorted(table.layers),
        "device": table.key.device,
        "dtype": table.key.dtype,
        "notes": list(table.notes),
        "limits": {
            name: {axis: grid.limit(i) for i, axis in enumerate(grid.axis_names)}
            for name, grid in table.grids().items()
        },
    }


def profile(context: Context) -> None:
    """Measure (or find) the profile and say what it covers."""
    started = time.perf_counter()
    table, path = load_profile(context)
    result = context.write("ok", {"profile": profile_record(table, path, time.perf_counter() - started)})
    profile_table(result["profile"], context.console)
