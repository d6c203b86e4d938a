"""`command=profile`, and the profile that other commands need: a file, measured, computed or imported."""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from exegpt import __version__
from exegpt.commands.context import Context
from exegpt.errors import ConfigError
from exegpt.profiler.analytic import analytic_profile
from exegpt.profiler.job import MEASURE_MODULE, MeasureJob, write_measure_job
from exegpt.profiler.provenance import provenance_of
from exegpt.profiler.sheet import GpuSheet, sheet_names
from exegpt.profiler.table import VERSION as PROFILE_VERSION
from exegpt.profiler.table import (
    ProfileKey,
    ProfileTable,
    check_key,
    read_profile,
    shape_digest,
    write_profile,
)
from exegpt.report.tables import profile_table
from exegpt.runner.launcher import launch
from exegpt.settings import ProfileSource

logger = logging.getLogger(__name__)

PROFILE_FILE = "profile.json"


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


def chosen_source(context: Context) -> ProfileSource:
    """What `profile.source` comes to: `measured` (a file, the cache, or a measurement), or what it names."""
    source = context.job.profile.source
    if source is not ProfileSource.auto:
        return source
    if context.job.profile.path is not None or context.cluster.is_local:
        return ProfileSource.measured
    return ProfileSource.analytic


def find_profile(context: Context) -> tuple[ProfileTable | None, Path | None]:
    """The profile of this job with its path; None as table if it has yet to be measured there.

    An analytic profile is computed from its sheet in milliseconds and has no path.

    Raises
    ------
    ProfileError
        If the profile is corrupt, or of another model, dtype or device.
    ConfigError
        If an analytic profile is wanted of a device without a sheet.
    """
    match chosen_source(context):
        case ProfileSource.measured:
            return _find_measured(context)
        case ProfileSource.analytic:
            return _analytic(context), None
        case source:
            return _imported(context, source)


def _find_measured(context: Context) -> tuple[ProfileTable | None, Path]:
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


def _analytic(context: Context) -> ProfileTable:
    cluster, model = context.cluster, context.job.model
    table = analytic_profile(
        model,
        _sheet(context),
        dtype=context.dtype,
        tp_sizes=model.tp_sizes(cluster.gpus_per_node),
        num_ranks=cluster.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
    )
    # A local GPU's profile is of the name that its driver gives, which the sheet knows it by.
    return replace(table, key=replace(table.key, device=cluster.device))


def _sheet(context: Context) -> GpuSheet:
    if context.sheet is None:
        raise ConfigError(
            f"profile.source={chosen_source(context).value}: {context.cluster.device} has no data sheet, "
            f"whose formulas it needs; name the GPU's with cluster.gpu ({', '.join(sheet_names())}, or a "
            "file), or use profile.source=measured"
        )
    return context.sheet


def _imported(context: Context, source: ProfileSource) -> tuple[ProfileTable, Path]:
    # Imported here: reading public tables is no part of most jobs.
    from exegpt.profiler.imports.cache import Import, imported_profile

    job, cluster = context.job, context.cluster
    assert job.profile.path is not None
    wanted = Import(
        source=source,
        directory=job.profile.path,
        model=job.model,
        sheet=_sheet(context),
        dtype=context.dtype,
        gpus_per_node=cluster.gpus_per_node,
        num_ranks=cluster.num_gpus,
        device=cluster.device,
        network=job.profile.network,
        same_shape=job.profile.same_shape,
    )
    table, path = imported_profile(wanted, job.profile.cache_dir, refresh=job.profile.refresh)
    check_key(table.key, profile_key(context), source=str(path))
    return table, path


def load_profile(context: Context) -> tuple[ProfileTable, Path | None]:
    """The profile of this job: the one named, computed or cached, else a new measurement.

    Raises
    ------
    ProfileError
        If the profile named is corrupt, or of another model, dtype or device.
    ConfigError
        If it would have to be measured on devices that are not here.
    """
    table, path = find_profile(context)
    if table is None:
        assert path is not None
        _measure(context, path)
        table = read_profile(path)
    return table, path


def measure_job(context: Context, path: Path) -> MeasureJob:
    """The measurement of this job's model on this job's ranks; ConfigError if the runtime cannot run it."""
    job = context.job
    context.require_devices("measuring a profile")
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


def profile_record(table: ProfileTable, path: Path | None, wall_s: float) -> dict[str, object]:
    """The `profile` record of result.json."""
    return {
        "path": None if path is None else str(path),
        "points": table.num_points(),
        "wall_s": wall_s,
        "measured_s": table.measured_s,
        "tp_sizes": sorted(table.layers),
        "device": table.key.device,
        "dtype": table.key.dtype,
        "notes": list(table.notes),
        "provenance": provenance_of(table),
        "limits": {
            name: {axis: grid.limit(i) for i, axis in enumerate(grid.axis_names)}
            for name, grid in table.grids().items()
        },
    }


def profile(context: Context) -> None:
    """Measure (or find, or compute) the profile and say what it covers and where it comes from."""
    started = time.perf_counter()
    table, path = load_profile(context)
    if path is None:
        path = context.output_dir / PROFILE_FILE
        write_profile(table, path)
    result = context.write("ok", {"profile": profile_record(table, path, time.perf_counter() - started)})
    profile_table(result["profile"], context.console)
