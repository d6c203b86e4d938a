"""What the steps of one command share."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from exegpt.commands.hardware import (
    Hardware,
    absent_reason,
    catalogued_cluster,
    choose_dtype,
    detect_hardware,
    make_cluster,
    threads_per_rank,
)
from exegpt.commands.inputs import Inputs, make_inputs
from exegpt.errors import ConfigError
from exegpt.profiler.sheet import GpuSheet, read_sheet, sheet_of_card
from exegpt.report.result_file import write_result
from exegpt.settings import Job
from exegpt.specs import ClusterSpec, Dtype

logger = logging.getLogger(__name__)

VERSION = 1
RESULT_FILE = "result.json"
SCHEDULE_FILE = "schedule.yaml"
REPORT_FILE = "report.html"
TRACE_FILE = "trace.json"


@dataclass(slots=False)
class Context:
    """A job with its directory, and what is found out about machine and workload on first use.

    Attributes
    ----------
    job : Job
    output_dir : Path
        Everything is written here.
    overrides : sequence of str
        As given on the command line, for result.json.
    console : Console
        Results go to its stdout.
    """

    job: Job
    output_dir: Path
    overrides: Sequence[str]
    console: Console
    started_s: float = field(default_factory=time.perf_counter)

    @cached_property
    def hardware(self) -> Hardware:
        """Devices of this machine."""
        return detect_hardware(self.job.cluster.device)

    @cached_property
    def sheet(self) -> GpuSheet | None:
        """Data sheet of the GPUs: the one named, else that of this machine's; None if it has none."""
        named = self.job.cluster.gpu
        if named is None:
            return sheet_of_card(self.hardware.name) if self.hardware.device_type == "cuda" else None
        try:
            return read_sheet(named)
        except ConfigError as error:
            raise ConfigError(f"cluster.gpu={named}: {error}") from error

    @cached_property
    def cluster(self) -> ClusterSpec:
        """The ranks that the job may use."""
        if self.job.cluster.gpu is None:
            return make_cluster(self.job.cluster, self.hardware)
        assert self.sheet is not None
        return catalogued_cluster(self.job.cluster, self.sheet)

    @cached_property
    def dtype(self) -> Dtype:
        """Element type of the run."""
        hardware = self.hardware if self.job.cluster.gpu is None else None
        return choose_dtype(self.job.runner.dtype, hardware)

    def absent_devices(self) -> str | None:
        """Why the cluster's devices are not this machine's; None if they are, as far as can be seen here."""
        if self.cluster.is_local:
            return None
        assert self.sheet is not None
        return absent_reason(self.cluster, self.sheet, self.hardware)

    def require_devices(self, purpose: str) -> None:
        """Raise ConfigError unless the cluster's devices are this machine's; `purpose` is what needs them."""
        if reason := self.absent_devices():
            raise ConfigError(
                f"cluster.gpu={self.job.cluster.gpu}: {purpose} needs the GPUs themselves, and {reason}. "
                "Plan with command=solve or simulate and profile.source=analytic, or choose cluster=local"
            )

    @cached_property
    def num_threads(self) -> int:
        """CPU threads of each rank."""
        return threads_per_rank(self.cluster, self.hardware)

    @cached_property
    def inputs(self) -> Inputs:
        """Lengths and requests."""
        return make_inputs(self.job)

    def check_files(self, *, weights: bool) -> None:
        """Read what the user named, so that a mistake in it shows before minutes go into measuring.

        Raises
        ------
        ConfigError
            If workload files, or with `weights` the weights, are missing, corrupt or of another model; with
            `weights` also if the runtime has no layers of the model's kind.
        """
        if weights:
            self.job.model.require_runnable()
        assert self.inputs.requests
        if not weights or self.job.weights == "random":
            return
        # Imported here: a planner of random weights needs no reader of files.
        from exegpt.runner.weights import check_weights, open_weights, resolve_weights

        location = resolve_weights(self.job.weights, cache_dir=self.job.profile.cache_dir, report=logger.info)
        check_weights(open_weights(location, self.job.model, self.job.seed), self.job.model)

    def describe(self) -> dict[str, Any]:
        """The head of a report: what was asked, on what."""
        job, cluster, lengths = self.job, self.cluster, self.inputs.lengths
        return {
            "model": f"{job.model.name} ({self.dtype.value}, weights {job.weights})",
            "cluster": f"{cluster.num_nodes} x {cluster.gpus_per_node} x {cluster.device}",
            "workload": (
                f"{job.workload.name}: {lengths.mean_input:.0f} in, {lengths.mean_output:.0f} out on average"
            ),
            "bound": self._describe_bound(),
        }

    def _describe_bound(self) -> str:
        bound, quantile = self.job.bound, self.job.bound_quantile
        given = [
            f"{name} {value:g} s"
            for name, value in (("latency", bound.latency_s), ("ttft", bound.ttft_s), ("tpot", bound.tpot_s))
            if math.isfinite(value)
        ]
        if quantile is not None:
            given.append(f"latency at the {quantile:.0%} quantile of the static baseline's")
        return ", ".join(given) or "none"

    def write(self, status: str, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Write result.json and return it."""
        result = {
            "version": VERSION,
            "status": status,
            "command": self.job.command.value,
            "overrides": list(self.overrides),
            "wall_s": time.perf_counter() - self.started_s,
            **sections,
        }
        write_result(self.output_dir / RESULT_FILE, result)
        return result
