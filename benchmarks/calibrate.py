"""Fits the efficiencies of GPU sheets to measured public tables, and says how far off they are.

Each table is split by whole shapes: a shape is what stays fixed in a sweep (both sizes of a weight matrix,
the heads of an attention); where a table knows one shape only, whole sweeps of batch size or cached length,
or whole blocks of tokens. A random half of them (seeded by the table's name) fits, the other half is held
out, and the errors are those of the held-out half with the parameters that the sheets ship.

    python benchmarks/calibrate.py                  errors of every card, as the sheets are
    python benchmarks/calibrate.py --fit a100-80    fit anew: parameter block of the sheet, and its errors
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from calibration_llama import CARDS, LINKS
from calibration_tables import Points
from numpy.typing import NDArray
from scipy.optimize import least_squares

from exegpt.profiler import roofline
from exegpt.profiler.efficiency import Efficiency
from exegpt.profiler.grid import FloatArray
from exegpt.profiler.sheet import GpuSheet, Link, read_sheet

OPERATORS = tuple(field.name for field in fields(Efficiency))
LINK_PARAMETERS = ("latency_s", "step_s", "bandwidth_fraction", "ramp_bytes", "ramp_s", "all_reduce")

# Start of every fit, and where a weak prior draws parameters that the tables do not tell; with limits.
START: Mapping[str, tuple[float, float, float]] = {
    "fixed_s": (4e-6, 1e-7, 1e-4),
    "peak_fraction": (0.8, 0.2, 1.2),
    "bandwidth_fraction": (0.85, 0.2, 1.0),
    "tile_tokens": (32, 0.1, 256),
    "idle_wave": (0.1, 1e-3, 3),
    "depth": (100, 0.1, 2000),
    "overlap": (3, 1, 8),
    "cached_bytes": (4e7, 1e6, 2e8),
    "cached_speed": (1.5, 1, 8),
    "norm": (1.4, 0.3, 6),
    "activation": (1.1, 0.3, 6),
    "rotation": (1.15, 0.3, 6),
    "query_tile": (64, 0.1, 256),
    "key_tile": (128, 0.1, 1024),
    "softmax_width": (32, 1, 256),
    "serial": (0.8, 0.05, 4),
    "latency_s": (1e-5, 1e-6, 2e-4),
    "step_s": (2e-6, 1e-8, 1e-4),
    "ramp_bytes": (3e5, 1e3, 1e8),
    "ramp_s": (1e-5, 1e-7, 1e-3),
    "all_reduce": (1.2, 0.8, 3),
}

# Short times matter little to a plan and jump with the kernel chosen: they weigh this much less.
SHORT_S, SHORT_WEIGHT = 50e-6, 0.2
MAX_FIT_POINTS = 3000
# Each table counts as so many points; the prior as one point that is off by a factor of e.
TABLE_WEIGHT, PRIOR_WEIGHT = 2500.0, 1.0


def held_out(points: Points) -> NDArray[np.bool_]:
    """Which points belong to the half of the shapes that fits nothing."""
    shapes = np.unique(points.shape)
    order = np.random.default_rng(zlib.crc32(points.table.encode())).permutation(len(shapes))
    return np.isin(points.shape, shapes[order[: len(shapes) // 2]])


def predict(sheet: GpuSheet, points: Points, rows: NDArray[Any], link: str = "") -> FloatArray:
    """The formula's times at some of the points."""
    inputs = {name: values[rows] for name, values in points.inputs.items()}
    if points.operator in ("all_reduce", "send_recv"):
        return _link_times(getattr(sheet, link), points.operator, inputs)
    if points.operator == "elementwise":
        times = np.empty(len(inputs["kind"]))
        for kind in np.unique(inputs["kind"]):
            chosen = inputs["kind"] == kind
            times[chosen] = roofline.elementwise_s(
                sheet, inputs["moved_bytes"][chosen], kind, inputs["num_kernels"][chosen]
            )
        return times
    function = getattr(roofline, f"{points.operator}_s")
    return np.asarray(function(sheet, **inputs))


def _link_times(link: Link, operator: str, inputs: Mapping[str, NDArray[Any]]) -> FloatArray:
    if operator == "send_recv":
        return roofline.point_to_point_s(link, inputs["message_bytes"])
    times = np.empty(len(inputs["message_bytes"]))
    for ranks in np.unique(inputs["num_ranks"]):
        chosen = inputs["num_ranks"] == ranks
        times[chosen] = roofline.all_reduce_s(link, inputs["message_bytes"][chosen], int(ranks))
    return times


def fit(sheet: GpuSheet, tables: Sequence[Points], part: str) -> GpuSheet:
    """The sheet with the parameters of one operator or link that fit its tables best."""
    is_link = part in ("intra_node", "inter_node")
    names = (
        LINK_PARAMETERS if is_link else tuple(f.name for f in fields(type(getattr(sheet.efficiency, part))))
    )
    start, low, high = (np.log([START[name][i] for name in names]) for i in range(3))
    samples = []
    for points in tables:
        rows = np.flatnonzero(~held_out(points))
        rows = np.random.default_rng(0).permutation(rows)[:MAX_FIT_POINTS]
        weight = np.where(points.seconds[rows] > SHORT_S, 1.0, SHORT_WEIGHT)
        samples.append((points, rows, weight * np.sqrt(TABLE_WEIGHT / np.sum(weight**2))))

    def with_parameters(logs: FloatArray) -> GpuSheet:
        values = {name: float(np.exp(x)) for name, x in zip(names, logs, strict=True)}
        if is_link:
            return replace(sheet, **{part: replace(getattr(sheet, part), **values)})
        changed = replace(getattr(sheet.efficiency, part), **values)
        return replace(sheet, efficiency=replace(sheet.efficiency, **{part: changed}))

    def residuals(logs: FloatArray) -> FloatArray:
        candidate = with_parameters(logs)
        errors = [
            w * np.log(predict(candidate, points, rows, part) / points.seconds[rows])
            for points, rows, w in samples
        ]
        return np.concatenate([*errors, PRIOR_WEIGHT * (logs - start)])

    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, max_nfev=200)
    return with_parameters(found.x)


def errors(sheet: GpuSheet, tables: Sequence[Points], link: str = "") -> Iterator[str]:
    """A Markdown row per table: held-out points above 50 us, median, 90th percentile and bias."""
    for points in tables:
        rows = np.flatnonzero(held_out(points) & (points.seconds > SHORT_S))
        part = f"{link} {points.operator}" if link else points.operator
        head = f"| {sheet.name} | {part} | {points.table} | {points.split_by} | {len(rows)} |"
        if len(rows) == 0:
            yield f"{head} | | | no point is long enough |"
            continue
        off = predict(sheet, points, rows, link) / points.seconds[rows] - 1
        median, high = np.quantile(np.abs(off), (0.5, 0.9))
        note = f"not fitted: {points.doubt}" if points.doubt else ("" if median <= 0.15 else "missed")
        yield f"{head} {median:.1%} | {high:.1%} | {np.median(off):+.1%} | {note} |"


def main() -> None:
    """Print errors, or fit and print parameters as well."""
    args = parse_args()
    root = args.data / "profiles"
    print("| card | operator | table | split by | points | median | p90 | bias | |")
    print("|---|---|---|---|---|---|---|---|---|")
    blocks = []
    for name in args.cards or CARDS:
        sheet = read_sheet(name)
        tables = CARDS[name](root)
        links = {link: load(root) for (card, link), load in LINKS.items() if card == name}
        if args.fit:
            for part in OPERATORS:
                usable = [p for p in tables if p.operator == part and not p.doubt]
                sheet = fit(sheet, usable, part) if usable else sheet
            for link, measured in links.items():
                usable = [p for p in measured if not p.doubt]
                sheet = fit(sheet, usable, link) if usable else sheet
            blocks.append(parameter_block(sheet, links))
        for row in errors(sheet, tables):
            print(row)
        for link, measured in links.items():
            for row in errors(sheet, measured, link):
                print(row)
    print("\n".join(["", *blocks]))


def parameter_block(sheet: GpuSheet, links: Mapping[str, object]) -> str:
    """What a fit found, as YAML for the sheet."""
    found: dict[str, Any] = {"efficiency": asdict(sheet.efficiency)}
    for link in links:
        values = asdict(getattr(sheet, link))
        found[link] = {name: values[name] for name in LINK_PARAMETERS}
    rounded = _rounded(found)
    return f"# {sheet.name}\n{yaml.safe_dump(rounded, sort_keys=False)}"


def _rounded(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _rounded(value) for name, value in values.items()}
    return float(f"{values:.3g}")


def parse_args() -> argparse.Namespace:
    """Cards, where the tables are, and whether to fit."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cards", nargs="*", help=f"of {', '.join(CARDS)}; default all")
    parser.add_argument("--fit", action="store_true", help="fit anew and print the parameters")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("EXEGPT_DATA", beside)))
    args = parser.parse_args()
    unknown = [name for name in args.cards if name not in CARDS]
    if unknown:
        parser.error(f"no measured tables of {unknown[0]}; there are some of {', '.join(CARDS)}")
    return args


if __name__ == "__main__":
    main()
