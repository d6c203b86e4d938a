"""AIConfigurator's kernel tables: `gemm_perf`, attention and NCCL. Times in ms, 16-bit rows only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from exegpt.errors import ProfileError
from exegpt.profiler.formulas import moving_s, product_shapes
from exegpt.profiler.grid import FloatArray
from exegpt.profiler.imports.assembly import (
    FORMULA,
    Measured,
    assemble,
    check_wanted,
    decode_grid,
    mean_by,
    nearest,
    origin,
)
from exegpt.profiler.imports.columns import SUFFIXES, Columns, read_columns
from exegpt.profiler.provenance import formula_kind
from exegpt.profiler.sheet import GpuSheet
from exegpt.profiler.table import ProfileTable
from exegpt.specs import Dtype, ModelSpec

MS = 1e-3
SIXTEEN_BIT = ("bfloat16", "float16", "half")
# `message_size` counts elements, not bytes: in every collective of both cards a 16-bit message takes as long
# as an 8-bit one of twice the `message_size` (within 5 % in the median), and not as one of the same.
ELEMENT_BYTES = 2


def aiconfigurator_profile(
    directory: Path,
    model: ModelSpec,
    sheet: GpuSheet | None,
    *,
    dtype: Dtype,
    tp_sizes: Sequence[int],
    num_ranks: int,
    device: str | None = None,
    gpus_per_node: int | None = None,
) -> ProfileTable:
    """A profile from AIConfigurator's tables of a device.

    Parameters
    ----------
    directory : Path
        Holds, itself or below, `gemm_perf`, and where there are any `context_attention_perf`,
        `generation_attention_perf` and `nccl_perf`, as Parquet or CSV. Of several frameworks below a system's
        folder (`gemm/vllm/0.24.0`) vLLM's is taken, of several versions the newest.
    model : ModelSpec
        Products of weight sizes between measured ones are interpolated; attention is used where its
        heads were measured.
    sheet : GpuSheet, optional
        Fills what the tables lack; without it they cannot do, since norms and activations are not in them.
    dtype, tp_sizes, num_ranks
        A 16-bit type, the degrees wanted (those whose products lie outside the measured sizes are left out,
        with a note), the GPUs of the cluster planned for.
    device : str, optional
        As the profile names it; default the sheet's name.
    gpus_per_node : int, optional
        With more GPUs than that, messages between stages are costed over the link between nodes.

    Raises
    ------
    ProfileError
        If at every degree a weight lies outside the measured sizes (the nearest is named), or a table is
        damaged or of another card than the sheet.
    """
    tables = _Tables(directory, sheet)
    gemm = tables.read("gemm_perf")
    if gemm is None:
        raise ProfileError(f"{directory}: no gemm_perf.parquet, .csv or .csv.gz in it or below")
    measured = Measured(f"AIConfigurator, {directory}")
    check_wanted(model, dtype, measured.source)
    if sheet is None:
        raise ProfileError(
            f"{directory}: AIConfigurator's tables lack norms, activations and overheads; give the card's "
            "GPU sheet (exegpt/profiler/sheets), and formulas fill them in"
        )
    wrong = [t for t in tp_sizes if t not in model.tp_sizes(t)]
    if wrong:
        raise ProfileError(f"tp_size={wrong[0]} does not divide {model.name}; allowed {model.tp_sizes(64)}")
    products = _Products(gemm.where(np.isin(gemm.text("gemm_dtype"), SIXTEEN_BIT)))
    left_out: dict[int, ProfileError] = {}
    for tp_size in tp_sizes:
        try:
            rows, times, kind = products.layer(model, tp_size)
        except ProfileError as error:
            left_out[tp_size] = error
            continue
        moving = moving_s(model, sheet, tp_size, rows, dtype.num_bytes)
        note = f"products {origin(kind, gemm.path)}, other kernels {FORMULA}"
        remark = f"norms and activations {formula_kind(sheet, 'embed')}"
        remark = f"interpolated between sizes, {remark}" if kind == "interpolated" else remark
        measured.add(tp_size, "linear", (rows,), times + moving, note, remark=remark)
        _encode(tables, model, tp_size, measured)
        _decode(tables, model, tp_size, measured)
        _all_reduce(tables, tp_size, measured)
    if left_out and not measured.grids:
        raise next(iter(left_out.values()))
    table = assemble(
        measured, model, sheet, dtype=dtype, num_ranks=num_ranks, device=device, gpus_per_node=gpus_per_node
    )
    notes = [*tables.chosen, *(f"without tp_size={t}: {error}" for t, error in left_out.items())]
    return replace(table, notes=(*table.notes, *notes))


class _Tables:
    """Tables of a directory, each found and read once; all of them of the sheet's card."""

    def __init__(self, directory: Path, sheet: GpuSheet | None) -> None:
        if not directory.is_dir():
            raise ProfileError(f"{directory}: no such directory; name one that holds AIConfigurator's tables")
        self.directory = directory
        self.cards = sheet.driver_names if sheet else ()
        self.card = sheet.name if sheet else ""
        self.chosen: list[str] = []
        self._read: dict[str, Columns | None] = {}

    def read(self, stem: str) -> Columns | None:
        """The table, None if there is none."""
        if stem not in self._read:
            path = self._find(stem)
            self._read[stem] = None if path is None else self._checked(read_columns(path))
        return self._read[stem]

    def _find(self, stem: str) -> Path | None:
        found = sorted(p for suffix in SUFFIXES for p in self.directory.rglob(f"{stem}{suffix}"))
        if len(found) < 2:
            return found[0] if found else None
        # As the package lays them out: gemm/vllm/0.24.0/gemm_perf.parquet.
        placed = [p for p in found if len(p.relative_to(self.directory).parts) > 2]
        frameworks = {p.parts[-3] for p in placed}
        framework = "vllm" if "vllm" in frameworks else next(iter(frameworks), "")
        if len(placed) < len(found) or (len(frameworks) > 1 and framework != "vllm"):
            listed = ", ".join(str(p.relative_to(self.directory)) for p in found[:4])
            raise ProfileError(
                f"{self.directory}: several tables {stem} ({listed}); name the folder of one of them"
            )
        path = max((p for p in placed if p.parts[-3] == framework), key=lambda p: _version(p.parts[-2]))
        self.chosen.append(f"{stem} is that of {framework} {path.parts[-2]}, of {len(found)} there")
        return path

    def _checked(self, table: Columns) -> Columns:
        if self.cards and "device" in table:
            found = table.text("device")[0]
            if found not in self.cards:
                raise ProfileError(
                    f"{table.path}: measured on {found}, but the sheet {self.card} is of "
                    f"{' or '.join(self.cards)}; set cluster.gpu to the card of the tables, or name others"
                )
        return table


def _version(text: str) -> tuple[tuple[int, str], ...]:
    """For ordering: 0.5.14 after 0.5.6."""
    return tuple((int(n or 0), word) for n, word in re.findall(r"(\d*)([^\d.]*)\.?", text))


class _Products:
    """Measured products as a cube over rows, columns and inner length."""

    def __init__(self, table: Columns) -> None:
        if len(table) == 0:
            raise ProfileError(f"{table.path}: holds no 16-bit rows")
        self.path = table.path
        m, n, k = (table.numbers(name) for name in "mnk")
        self.axes = tuple(np.unique(axis) for axis in (m, n, k))
        self.times = np.full([len(axis) for axis in self.axes], np.nan)
        where = tuple(np.searchsorted(a, v) for a, v in zip(self.axes, (m, n, k), strict=True))
        # Rows may repeat; the fastest is the one without interference.
        order = np.argsort(-table.numbers("latency"))
        self.times[tuple(w[order] for w in where)] = table.numbers("latency")[order] * MS

    def layer(self, model: ModelSpec, tp_size: int) -> tuple[FloatArray, FloatArray, str]:
        """Rows that were measured for all products of a layer, their summed times, and how they came."""
        parts, kinds = [], []
        for name, (n, k) in product_shapes(model, tp_size).items():
            times, exact = self._product(n, k)
            if np.isnan(times).all():
                known = [{"n": float(a), "k": float(b)} for a in self.axes[1] for b in self.axes[2]]
                close = nearest({"n": n, "k": k}, known)
                raise ProfileError(
                    f"{self.path}: the product {name} of {model.name} at tp_size={tp_size} has n={n:g}, "
                    f"k={k:g}, outside what was measured; the nearest is n={close['n']:g}, k={close['k']:g}. "
                    "Plan with the analytic profile of the card, or other degrees."
                )
            parts.append(times)
            kinds.append("measured" if exact else "interpolated")
        total = np.sum(parts, axis=0)
        kept = ~np.isnan(total)
        if not kept.any():
            raise ProfileError(
                f"{self.path}: no number of rows was measured for all products of {model.name}"
            )
        return self.axes[0][kept], total[kept], "interpolated" if "interpolated" in kinds else "measured"

    def _product(self, n: float, k: float) -> tuple[FloatArray, bool]:
        (n0, n1, s), (k0, k1, t) = _bracket(self.axes[1], n), _bracket(self.axes[2], k)
        if min(n0, k0) < 0:
            return np.full(len(self.axes[0]), np.nan), False
        # Times of products are close to bilinear in the sizes of the weight: read and computed in proportion.
        corners = self.times[:, [n0, n0, n1, n1], [k0, k1, k0, k1]]
        weights = np.array([(1 - s) * (1 - t), (1 - s) * t, s * (1 - t), s * t])
        needed = weights > 0
        return np.asarray(corners[:, needed] @ weights[needed]), bool(needed.sum() == 1)


def _bracket(axis: FloatArray, value: float) -> tuple[int, int, float]:
    """Neighbours of a value on an axis, and how far it lies between them; -1 outside."""
    if not axis[0] <= value <= axis[-1]:
        return -1, -1, 0.0
    high = int(np.searchsorted(axis, value))
    if axis[high] == value:
        return high, high, 0.0
    return high - 1, high, float((value - axis[high - 1]) / (axis[high] - axis[high - 1]))


def _attention_rows(
    table: Columns, model: ModelSpec, tp_size: int, operator: str, measured: Measured
) -> Columns | None:
    """Rows of the model's heads without a sliding window; None, with the reason noted, if there are none."""
    path = table.path
    rows = np.isin(table.text("attn_dtype"), SIXTEEN_BIT) & np.isin(table.text("kv_cache_dtype"), SIXTEEN_BIT)
    if "window_size" in table:
        rows &= table.numbers("window_size") == 0
    table = table.where(rows)
    names = ("num_heads", "num_key_value_heads", "head_dim")
    wanted = {
        "num_heads": model.num_attention_heads / tp_size,
        "num_key_value_heads": max(model.num_key_value_heads / tp_size, 1),
        "head_dim": float(model.head_dim),
    }
    shapes = np.stack([table.numbers(name) for name in names], axis=1)
    same = (shapes == np.array([wanted[name] for name in names])).all(axis=1)
    if same.any():
        return table.where(same)
    known = [dict(zip(names, row.tolist(), strict=True)) for row in np.unique(shapes, axis=0)]
    close = (
        ", ".join(f"{name}={value:g}" for name, value in nearest(wanted, known).items()) if known else "none"
    )
    lacks = ", ".join(f"{name}={value:g}" for name, value in wanted.items())
    measured.origins[f"tp{tp_size}.{operator}"] = (
        f"{FORMULA}, because {path.name} has no {lacks}; the nearest is {close}"
    )
    return None


def _encode(tables: _Tables, model: ModelSpec, tp_size: int, measured: Measured) -> None:
    table = tables.read("context_attention_perf")
    rows = table and _attention_rows(table, model, tp_size, "encode_attention", measured)
    if not rows:
        return
    batch, length, seconds = rows.numbers("batch_size"), rows.numbers("isl"), rows.numbers("latency") * MS
    by_batch = {b: mean_by(length[batch == b], seconds[batch == b]) for b in np.unique(batch)}
    # Large batches were not measured at long lengths, where the planner composes them from smaller ones.
    first = by_batch[min(by_batch)][0]
    inside = first[first <= model.max_position_embeddings]
    reach = inside[-1] if len(inside) else first[0]
    kept = [b for b, (lengths, _) in by_batch.items() if lengths[-1] >= reach]
    axis = first[first <= reach]
    values = np.array([np.interp(axis, *by_batch[b]) for b in kept])
    measured.add(tp_size, "encode_attention", (kept, axis), values, origin("measured", rows.path))


def _decode(tables: _Tables, model: ModelSpec, tp_size: int, measured: Measured) -> None:
    table = tables.read("generation_attention_perf")
    rows = table and _attention_rows(table, model, tp_size, "decode_attention", measured)
    if not rows:
        return
    batch, seconds = rows.numbers("batch_size"), rows.numbers("latency") * MS
    contexts = batch * (rows.numbers("isl") + rows.numbers("step"))
    axes, values = decode_grid(batch, contexts, seconds)
    measured.add(tp_size, "decode_attention", axes, values, origin("measured", rows.path))


def _all_reduce(tables: _Tables, tp_size: int, measured: Measured) -> None:
    table = tables.read("nccl_perf")
    if table is None or tp_size == 1:
        return
    rows = (
        (table.text("op_name") == "all_reduce")
        & np.isin(table.text("nccl_dtype"), SIXTEEN_BIT)
        & (table.numbers("num_gpus") == tp_size)
    )
    if rows.any():
        sizes = table.numbers("message_size")[rows] * ELEMENT_BYTES
        points, times = mean_by(sizes, table.numbers("latency")[rows] * MS)
        measured.add(tp_size, "all_reduce", (points,), times, origin("measured", table.path))
