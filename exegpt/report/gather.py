"""A sweep in one table and one plot: merges the `result.json` of its jobs."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from exegpt.errors import ConfigError
from exegpt.report.result_file import write_text
from exegpt.report.units import (
    ABSENT,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    ratio_of,
)

Row = Mapping[str, Any]

_LOG = logging.getLogger(__name__)
_RESULT = "result.json"
# Column -> how it shows in Markdown; the CSV has the plain numbers.
_FIGURES: Mapping[str, Any] = {
    "throughput_per_s": format_number,
    "throughput_tokens_per_s": format_number,
    "cost_per_million_output_tokens": format_number,
    "latency_s": format_seconds,
    "latency_bound_s": format_seconds,
    "encode_batch_size": str,
    "decode_iterations": str,
    "num_micro_batches": str,
    "tp_size": str,
    "ratio_to_static": format_ratio,
    "run_throughput_per_s": format_number,
    "run_latency_p99_s": format_seconds,
    "error_throughput": lambda value: format_percent(value, sign=True),
    "error_latency_p99": lambda value: format_percent(value, sign=True),
}
# Columns that are left out where no job has a figure.
_RUN_FIGURES = ("run_throughput_per_s", "run_latency_p99_s", "error_throughput", "error_latency_p99")
_COST_FIGURES = ("cost_per_million_output_tokens",)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherResult:
    """A merged sweep.

    Attributes
    ----------
    rows : tuple of mappings
        One per job, by job number; keys are `columns`, absent figures None, absent overrides "".
    columns : tuple of str
        `job`, the overrides that vary, `status`, `policy`, figures, `note`.
    varying : tuple of str
        Keys of the overrides that differ between jobs.
    warnings : tuple of str
        Files that could not be read, and why.
    """

    directory: Path
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    varying: tuple[str, ...]
    warnings: tuple[str, ...]
    csv_path: Path
    markdown_path: Path
    plot_path: Path


def gather(directory: Path) -> GatherResult:
    """Merge the jobs of a sweep into `summary.csv`, `summary.md` and `pareto.png` in `directory`.

    A job that ended without a `result.json`, or left a corrupt one, counts as failed.

    Raises
    ------
    ConfigError
        If there is no such directory, it has no `result.json`, or all of them are corrupt.
    """
    from exegpt.report.pareto import write_pareto

    jobs, warnings = _read_jobs(directory)
    varying = _varying([overrides for _, _, overrides in jobs])
    rows = [_row(job, result, overrides, varying) for job, result, overrides in jobs]
    absent = {
        name
        for group in (_RUN_FIGURES, _COST_FIGURES)
        if not any(row[name] is not None for row in rows for name in group)
        for name in group
    }
    figures = [name for name in _FIGURES if name not in absent]
    result = GatherResult(
        directory=directory,
        rows=tuple(rows),
        columns=("job", *varying, "status", "policy", *figures, "note"),
        varying=tuple(varying),
        warnings=tuple(warnings),
        csv_path=directory / "summary.csv",
        markdown_path=directory / "summary.md",
        plot_path=directory / "pareto.png",
    )
    write_text(result.csv_path, _csv(result))
    write_text(result.markdown_path, _markdown(result))
    write_pareto(result.rows, result.varying, result.plot_path)
    return result


_Job = tuple[str, Mapping[str, Any], Mapping[str, str]]


def _read_jobs(directory: Path) -> tuple[list[_Job], list[str]]:
    if not directory.is_dir():
        raise ConfigError(
            f"gather.dir={directory}: no such directory. Name a sweep's directory, as in "
            "gather.dir=outputs/sweeps/2025-01-31_12-00-00."
        )
    jobs: list[_Job] = []
    warnings = []
    found = sorted((path.parent for path in directory.rglob(_RESULT)), key=_by_job(directory))
    if not found:
        raise ConfigError(
            f"gather.dir={directory}: no {_RESULT} in it or below. Every job writes one; run the sweep first "
            "(`python launch.py -m ...`) and name its directory."
        )
    # Jobs of a sweep are numbered directories; one without a result died before it could write it.
    dead = [path for path in directory.iterdir() if path.name.isdecimal() and path.is_dir()]
    for path in sorted(
        {*found, *(p for p in dead if not any(p in f.parents for f in found))}, key=_by_job(directory)
    ):
        job = str(path.relative_to(directory))
        try:
            result = _read_result(path / _RESULT)
        except ConfigError as error:
            warnings.append(str(error))
            result = {"status": "failed", "error": f"{_RESULT} missing or corrupt"}
        jobs.append((job, result, _overrides(path, result)))
    if len(warnings) == len(jobs):
        raise ConfigError(f"gather.dir={directory}: no readable {_RESULT}: " + "; ".join(warnings))
    return jobs, warnings


def _by_job(directory: Path) -> Any:
    def key(path: Path) -> list[tuple[bool, int, str]]:
        parts = path.relative_to(directory).parts
        return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

    return key


def _read_result(path: Path) -> Mapping[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing, so its job ended early; see the log beside it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}); run its job again") from error
    if not isinstance(result, dict) or not isinstance(result.get("status"), str):
        raise ConfigError(f"{path}: expected an object with the key status; run its job again")
    return result


def _overrides(job: Path, result: Mapping[str, Any]) -> Mapping[str, str]:
    """Overrides by key; of a job without result those that Hydra noted."""
    texts = result.get("overrides")
    noted = job / ".hydra" / "overrides.yaml"
    if texts is None and noted.is_file():
        try:
            texts = yaml.safe_load(noted.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            _LOG.warning("%s: unreadable, so the job's overrides are unknown: %s", noted, error)
    pairs = (str(text).lstrip("+").partition("=") for text in texts or ())
    return {key: value for key, _, value in pairs}


def _varying(overrides: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for mapping in overrides for key in mapping)
    return [key for key in keys if len({mapping.get(key) for mapping in overrides}) > 1]


def _row(job: str, result: Mapping[str, Any], overrides: Mapping[str, str], varying: Sequence[str]) -> Row:
    """One job's columns; planned figures come from `solve`, else from a simulation's closed form."""
    run = result.get("run") or {}
    solve = result.get("solve") or (result.get("simulate") or {}).get("steady") or {}
    knobs = solve.get("knobs") or {}
    static = {**(solve.get("policies") or {}), **(solve.get("baselines") or {})}.get("STATIC") or {}
    planned = {} if result["status"] == "infeasible" else solve
    error = run.get("error") or {}
    return {
        "job": job,
        **{key: overrides.get(key, "") for key in varying},
        "status": result["status"],
        "policy": solve.get("policy") or run.get("policy"),
        "throughput_per_s": planned.get("throughput_per_s"),
        "throughput_tokens_per_s": planned.get("throughput_tokens_per_s"),
        "cost_per_million_output_tokens": planned.get("cost_per_million_output_tokens"),
        "latency_s": solve.get("latency_s"),
        "latency_bound_s": solve.get("latency_bound_s"),
        **{
            name: knobs.get(name)
            for name in ("encode_batch_size", "decode_iterations", "num_micro_batches", "tp_size")
        },
        "ratio_to_static": ratio_of(planned.get("throughput_per_s"), static.get("throughput_per_s")),
        "run_throughput_per_s": run.get("throughput_per_s"),
        "run_latency_p99_s": (run.get("latency_s") or {}).get("p99"),
        "error_throughput": error.get("throughput_per_s"),
        "error_latency_p99": (error.get("latency_s") or {}).get("p99"),
        "note": _note(result, solve),
    }


def _note(result: Mapping[str, Any], solve: Mapping[str, Any]) -> str:
    if result["status"] == "failed":
        return str(result.get("error") or "failed, see its log")
    if result["status"] != "infeasible":
        return ""
    if reason := solve.get("reason"):
        return str(reason)
    policies = (solve.get("policies") or {}).items()
    return "; ".join(f"{name}: {record['infeasible']}" for name, record in policies if "infeasible" in record)


def _csv(result: GatherResult) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, result.columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(result.rows)
    return text.getvalue()


def _markdown(result: GatherResult) -> str:
    lines = ["| " + " | ".join(result.columns) + " |", "|" + " --- |" * len(result.columns)]
    for row in result.rows:
        cells = (_markdown_cell(name, row[name]) for name in result.columns)
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nwarning: {warning}" for warning in result.warnings]
    return "\n".join(lines) + "\n"


def _markdown_cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return ABSENT
    text = str(_FIGURES[name](value)) if name in _FIGURES else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
