"""Data sheets of GPUs: what the maker states, and how much of it kernels reach.

The stated numbers (memory, bandwidth, peak rates, links) come from public data sheets, each named
in the YAML file beside the number. The efficiencies are few parameters with a meaning, the same
for every card; `benchmarks/calibrate.py` fits them to measured tables, and a sheet names the tables
behind it. See `roofline` for the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from exegpt.errors import ConfigError
from exegpt.profiler.efficiency import Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between GPUs, or of a GPU with host memory.

    Attributes
    ----------
    kind : str
        What it is, for reports.
    bandwidth_bytes_per_s : float
        Per GPU and direction, as stated.
    latency_s : float
        Of a message without content between two neighbours.
    step_s : float
        What each further rank adds to an all-reduce.
    bandwidth_fraction : float
        Share of the bandwidth that long messages reach.
    ramp_s, ramp_bytes : float
        What a large all-reduce takes to get going, and the length at which half of that is reached.
    all_reduce : float
        Time of a byte that an all-reduce carries relative to one of a plain message.
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    step_s: float
    bandwidth_fraction: float
    ramp_bytes: float
    ramp_s: float
    all_reduce: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSheet:
    """One kind of GPU.

    Attributes
    ----------
    name : str
        As sheets are named, and as profiles name their device.
    memory_bytes : int
    memory_bandwidth_bytes_per_s, peak_flops_per_s, peak_float32_flops_per_s : float
        `peak_flops_per_s` is that of dense 16-bit products summed in 32 bits.
    num_multiprocessors : int
    kernel_launch_s : float
        Host time to issue one kernel: a chain of shorter kernels takes this long each.
    iteration_s, query_s : float
        Host time of a stage's bookkeeping per micro-batch, and per query in it.
    intra_node, inter_node, host : Link
        Within a node, between nodes, and to host memory.
    efficiency : Efficiency
    calibrated_on : tuple of str
        Measured tables behind the efficiencies; empty: uncalibrated.
    borrowed : mapping of str to str
        Operators without a table of this card, with the sheet whose efficiency they have.
    driver_names : tuple of str
        What nvidia-smi calls the card; empty: it is recognised on no machine.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    peak_float32_flops_per_s: float
    num_multiprocessors: int
    kernel_launch_s: float
    iteration_s: float
    query_s: float
    intra_node: Link
    inter_node: Link
    host: Link
    efficiency: Efficiency
    calibrated_on: tuple[str, ...] = ()
    borrowed: Mapping[str, str] = field(default_factory=dict)
    driver_names: tuple[str, ...] = ()

    @property
    def is_calibrated(self) -> bool:
        """Whether any measured table of this card stands behind the sheet."""
        return bool(self.calibrated_on)

    @property
    def label(self) -> str:
        """What results that rest on this sheet must say about it."""
        lenders = sorted(set(self.borrowed.values()))
        if len(lenders) == 1 and len(self.borrowed) == len(fields(Efficiency)):
            lent = f"efficiencies as {lenders[0]}"
        else:
            lent = ", ".join(f"{operator} as {sheet}" for operator, sheet in self.borrowed.items())
        if not self.is_calibrated:
            return f"{self.name}: uncalibrated" + (f" ({lent})" if lent else "")
        count = len(self.calibrated_on)
        calibrated = f"{self.name}: calibrated on {count} measured table{'s' if count > 1 else ''}"
        return calibrated + (f"; uncalibrated: {lent}" if lent else "")


def sheet_names() -> list[str]:
    """Names of the sheets in the package, without the template `custom.yaml`."""
    files = resources.files("exegpt.profiler").joinpath("sheets").iterdir()
    names = [f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")]
    return sorted(name for name in names if name != "custom")


def sheet_of_card(driver_name: str) -> GpuSheet | None:
    """The sheet of the package whose card the driver calls so; None if there is none."""
    for sheet in map(read_sheet, sheet_names()):
        if driver_name in sheet.driver_names:
            return sheet
    return None


def read_sheet(name_or_path: str | Path) -> GpuSheet:
    """Read a sheet of the package by name, or a file by its path (with a slash or `.yaml`).

    Raises
    ------
    ConfigError
        If there is no such sheet, or the file has an unknown, missing or impossible value.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"GPU sheet {path}: cannot be read ({error}). Sheets by name: {', '.join(sheet_names())}"
            ) from error
    elif text in sheet_names():
        content = resources.files("exegpt.profiler").joinpath(f"sheets/{text}.yaml").read_text("utf-8")
    else:
        raise ConfigError(
            f"no GPU sheet {text!r}; there are {', '.join(sheet_names())}. For another card copy "
            "custom.yaml from exegpt/profiler/sheets, fill it in and name its path."
        )
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"GPU sheet {text}: not YAML: {error}") from error
    return _record(GpuSheet, values, f"GPU sheet {text}", "")


_T = TypeVar("_T")

# Parts of a cost that a card may lack; everything else must be above zero.
_MAY_BE_ZERO = frozenset(
    "fixed_s tile_tokens idle_wave depth query_tile key_tile softmax_width serial cached_bytes step_s ramp_s "
    "ramp_bytes kernel_launch_s iteration_s query_s latency_s".split()
)
_OPTIONAL = frozenset(("calibrated_on", "borrowed", "driver_names"))
# Below 1 a cost could fall as its size grows, which the solver's bounds exclude.
_AT_LEAST_ONE = frozenset(("overlap", "cached_speed"))


def _record(kind: type[_T], values: Any, source: str, prefix: str) -> _T:
    """An instance of a dataclass of numbers, texts and further dataclasses; errors name file and key."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: {prefix.rstrip('.') or 'the file'} must be a mapping of keys to values")
    hints = get_type_hints(kind)
    assert is_dataclass(kind)
    required = [f.name for f in fields(kind) if f.name not in _OPTIONAL]
    unknown = sorted(str(key) for key in values if key not in hints)
    if unknown:
        raise ConfigError(f"{source}: unknown key {prefix}{unknown[0]}; allowed: {', '.join(hints)}")
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{source}: {prefix}{missing[0]} is missing; custom.yaml describes every key")
    read = {str(name): _value(hints[name], values[name], source, prefix + name) for name in values}
    return kind(**read)


def _value(kind: Any, value: Any, source: str, key: str) -> Any:
    if is_dataclass(kind):
        return _record(kind, value, source, f"{key}.")  # type: ignore[arg-type]
    if kind is str:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{source}: {key}={value!r} must be a name")
        return value
    if kind in (int, float):
        return kind(_number(value, source, key))
    if key in ("calibrated_on", "driver_names"):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            meaning = "table names (empty: uncalibrated)" if key == "calibrated_on" else "names"
            raise ConfigError(f"{source}: {key} must be a list of {meaning}")
        return tuple(value)
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise ConfigError(f"{source}: {key} must map operators to the sheet they are borrowed from")
    unknown = [operator for operator in value if operator not in get_type_hints(Efficiency)]
    if unknown:
        allowed = ", ".join(get_type_hints(Efficiency))
        raise ConfigError(f"{source}: {key}.{unknown[0]} is no operator; allowed: {allowed}")
    return dict(value)


def _number(value: Any, source: str, key: str) -> float:
    # YAML 1.1 takes 1e-6 for text, since it has no point; float() reads both.
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
    may_be_zero = key.rpartition(".")[2] in _MAY_BE_ZERO
    if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
        least = "at least 0" if may_be_zero else "above 0"
        raise ConfigError(f"{source}: {key}={value!r} must be a finite number {least}")
    if key.rpartition(".")[2] in _AT_LEAST_ONE and number < 1:
        raise ConfigError(f"{source}: {key}={value!r} must be at least 1")
    return number
