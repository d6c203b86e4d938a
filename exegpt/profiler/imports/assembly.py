"""Puts measured operators and, where a sheet is given, formulas for the rest into one profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from exegpt.errors import ProfileError
from exegpt.profiler.analytic import (
    MAX_QUERIES,
    MAX_TOKENS,
    analytic_costs,
    analytic_host_copy,
    analytic_send,
)
from exegpt.profiler.grid import FloatArray, Grid, make_grid
from exegpt.profiler.imports.reach import continued
from exegpt.profiler.provenance import formula_kind
from exegpt.profiler.sheet import GpuSheet
from exegpt.profiler.table import LAYER_OPERATORS, LayerCosts, ProfileKey, ProfileTable, shape_digest
from exegpt.specs import Dtype, ModelSpec

# Making a table isotone is reported where it moves times long enough to matter by more than this.
BENT, BENT_FROM_S = 0.1, 5e-5
FORMULA = "formula"
# A decode table whose K/V would have to be read this much faster than memory can did not read it from memory.
IMPOSSIBLE_SPEED = 1.3


@dataclass(slots=True)
class Measured:
    """Operators that tables gave, by degree, with where each came from.

    Attributes
    ----------
    source : str
        Which tables, for the profile's key and messages.
    grids : dict of int to dict of str to Grid
    origins : dict of str to str
        Grid name (`tp1.linear`) to what the note says about it.
    remarks : dict of str to str
        Grid name to what its provenance adds to `measured (SOURCE)`, e.g. `interpolated`.
    """

    source: str
    grids: dict[int, dict[str, Grid]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    send: Grid | None = None

    def add(
        self,
        tp_size: int,
        operator: str,
        axes: Sequence[ArrayLike],
        times: FloatArray,
        origin: str,
        *,
        remark: str = "",
    ) -> None:
        """Take an operator's times; the grid makes them isotone and says how far it moved them."""
        names = ("bytes",) if operator == "all_reduce" else LAYER_OPERATORS[operator]
        grid = make_grid(f"tp{tp_size}.{operator}", names, axes, times)
        moved = np.abs(grid.values_s - times)[times > BENT_FROM_S] / times[times > BENT_FROM_S]
        if moved.size and moved.max() > BENT:
            origin += f", fell in places and was made isotone, by up to {moved.max():.0%}"
        self.grids.setdefault(tp_size, {})[operator] = grid
        self.origins[grid.name] = origin
        if remark:
            self.remarks[grid.name] = remark

    def continue_by(self, formula: Grid, grid: Grid) -> Grid:
        """A measured table, continued by the formula where that reaches further, which its remark says."""
        longer, said = continued(grid, formula)
        if said:
            before = self.remarks.get(grid.name)
            self.remarks[grid.name] = f"{before}, {said}" if before else said
        return longer


def mean_by(points: ArrayLike, times: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Distinct points in order, with the median of the times measured at each."""
    distinct, index, counts = np.unique(
        np.asarray(points, dtype=np.float64), return_inverse=True, return_counts=True
    )
    groups = np.split(times[np.argsort(index, kind="stable")], np.cumsum(counts)[:-1])
    return distinct, np.array([np.median(group) for group in groups])


def decode_grid(
    queries: FloatArray, contexts: FloatArray, times: FloatArray
) -> tuple[tuple[FloatArray, FloatArray], FloatArray]:
    """A rectangular table from decode steps measured at some (queries, summed context) points.

    Each batch size is interpolated along its own contexts. Where a batch size was not measured that far, the
    next larger one stands for it, which can only be dearer; below its shortest context, that one does.
    """
    sizes = np.unique(queries)
    axis = np.unique(contexts)
    if len(axis) > 64:
        # Sums of many batch sizes hardly differ: keep about 64, evenly spread over the magnitudes.
        wanted = np.geomspace(axis[0], axis[-1], 64)
        axis = np.unique(axis[np.abs(np.log(axis[:, None] / wanted[None, :])).argmin(axis=0)])
    table = np.full((len(sizes), len(axis)), np.nan)
    for row, size in enumerate(sizes):
        own, own_times = mean_by(contexts[queries == size], times[queries == size])
        table[row] = np.interp(axis, own, own_times, right=np.nan)
    for row in range(len(sizes) - 2, -1, -1):
        table[row] = np.where(np.isnan(table[row]), table[row + 1], table[row])
    # What no batch size reached ends the table.
    reached = ~np.isnan(table).any(axis=0)
    return (sizes, axis[reached]), table[:, reached]


def impossible_decode(
    sheet: GpuSheet | None, model: ModelSpec, tp_size: int, contexts: FloatArray, times: FloatArray
) -> str:
    """Why decode times cannot be of K/V in the card's memory; empty if they can, or without a sheet."""
    if sheet is None:
        return ""
    moved = contexts * model.kv_bytes_per_token(Dtype.bfloat16, 1, tp_size)
    large = moved > 4 * sheet.efficiency.elementwise.cached_bytes
    if not large.any():
        return ""
    speed = float(np.median(moved[large] / times[large]) / sheet.memory_bandwidth_bytes_per_s)
    if speed <= IMPOSSIBLE_SPEED:
        return ""
    return f"its table reads K/V {speed:.1f} times as fast as the card's memory can"


def check_wanted(model: ModelSpec, dtype: Dtype, source: str) -> None:
    """ProfileError unless these tables are of the wanted kind: decoder-only, no experts, 16 bits."""
    if model.is_encoder_decoder or model.num_experts:
        kind = f"{model.num_experts} experts" if model.num_experts else "an encoder"
        raise ProfileError(
            f"{source}: {model.name} has {kind}, for which these tables are not imported; use an analytic "
            "profile"
        )
    if dtype.num_bytes != 2:
        raise ProfileError(f"{source}: its times are of 16-bit types, but the dtype wanted is {dtype.value}")


def assemble(
    measured: Measured,
    model: ModelSpec,
    sheet: GpuSheet | None,
    *,
    dtype: Dtype,
    num_ranks: int,
    device: str | None,
    gpus_per_node: int | None = None,
) -> ProfileTable:
    """The profile: measured operators, the rest from the sheet.

    Public tables of messages are of two GPUs of one node; a cluster of several takes the sheet's formula for
    the link between nodes instead.

    Raises
    ------
    ProfileError
        If operators are missing and no sheet is given, or nothing names the device.
    """
    name = device or (sheet.name if sheet else None)
    if name is None:
        raise ProfileError(f"{measured.source}: say which device it was measured on, or give its GPU sheet")
    layers = {
        tp_size: _complete(measured, tp_size, model, sheet, dtype, num_ranks)
        for tp_size in sorted(measured.grids)
    }
    if not layers:
        raise ProfileError(f"{measured.source}: no degree of tensor parallelism in it fits {model.name}")
    spans_nodes = gpus_per_node is not None and num_ranks > gpus_per_node
    if spans_nodes:
        measured.send = None
        measured.origins.pop("send", None)
    send = measured.send
    if sheet is not None:
        formula = analytic_send(model, sheet, dtype, MAX_TOKENS, spans_nodes=spans_nodes)
        send = formula if send is None else measured.continue_by(formula, send)
    if send is None:
        raise ProfileError(_lacking(measured.source, "send"))
    table = ProfileTable(
        key=ProfileKey(
            model=model.name,
            shape=shape_digest(model),
            dtype=dtype.value,
            device=name,
            num_ranks=num_ranks,
            software=f"imported from {measured.source}",
        ),
        layers=layers,
        send=send,
        host_copy=None if sheet is None else analytic_host_copy(model, sheet, dtype, MAX_TOKENS),
        measured_s=0.0,
        notes=_notes(measured, layers, sheet),
    )
    return replace(table, provenance=_provenance(measured, table, sheet))


def _provenance(measured: Measured, table: ProfileTable, sheet: GpuSheet | None) -> dict[str, str]:
    project = measured.source.partition(",")[0]
    found = {}
    for name in table.grids():
        degree, _, operator = name.rpartition(".")
        if (operator == "send" and measured.send is not None) or (
            degree and operator in measured.grids[int(degree.removeprefix("tp"))]
        ):
            remark = measured.remarks.get(name)
            found[name] = f"measured ({project})" + (f", {remark}" if remark else "")
        else:
            assert sheet is not None
            found[name] = formula_kind(sheet, name)
    return found


def _notes(measured: Measured, layers: Mapping[int, LayerCosts], sheet: GpuSheet | None) -> tuple[str, ...]:
    """Which files operators came from, or why not; those of one origin together."""
    names = [
        f"tp{tp_size}.{operator}"
        for tp_size, costs in layers.items()
        for operator in (*LAYER_OPERATORS, "all_reduce")
        if getattr(costs, operator) is not None
    ]
    by_origin: dict[str, list[str]] = {}
    for name in [*names, "send"]:
        # Provenance says which tables are plain formula.
        if name in measured.origins:
            by_origin.setdefault(measured.origins[name], []).append(name)
    notes = [f"imported from {measured.source}"]
    if sheet is not None:
        notes.append(f"formulas: {sheet.label}")
    return (*notes, *(f"{origin}: {', '.join(found)}" for origin, found in by_origin.items()))


def _complete(
    measured: Measured,
    tp_size: int,
    model: ModelSpec,
    sheet: GpuSheet | None,
    dtype: Dtype,
    num_ranks: int,
) -> LayerCosts:
    found = dict(measured.grids[tp_size])
    wanted = [*LAYER_OPERATORS, *(["all_reduce"] if tp_size > 1 else [])]
    missing = [operator for operator in wanted if operator not in found]
    if sheet is None:
        if missing:
            raise ProfileError(_lacking(measured.source, f"tp{tp_size}.{missing[0]}"))
        return LayerCosts(**{operator: found[operator] for operator in wanted})
    formula = analytic_costs(
        model,
        sheet,
        tp_size,
        dtype=dtype,
        max_tokens=MAX_TOKENS,
        max_queries=MAX_QUERIES,
        max_context_tokens=max(
            num_ranks * sheet.memory_bytes // model.kv_bytes_per_token(dtype),
            model.max_position_embeddings,
        ),
    )
    for operator in wanted:
        grid = getattr(formula, operator)
        found[operator] = measured.continue_by(grid, found[operator]) if operator in found else grid
    return LayerCosts(**{operator: found[operator] for operator in wanted})


def _lacking(source: str, operator: str) -> str:
    return (
        f"{source}: lacks {operator}; give the card's GPU sheet (exegpt/profiler/sheets), and formulas "
        "fill in what was not measured"
    )


def origin(kind: str, *paths: Path) -> str:
    """`measured (mlp.csv.gz)`."""
    return f"{kind} ({', '.join(path.name for path in paths)})"


def nearest(wanted: Mapping[str, float], known: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The known shape whose sizes differ least from the wanted one's, by ratio."""
    return min(
        known, key=lambda shape: sum(abs(np.log((shape[k] + 1e-9) / (wanted[k] + 1e-9))) for k in wanted)
    )
