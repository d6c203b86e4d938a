"""Where each cost of a profile comes from, operator by operator.

A kind is `measured` (here), `measured (SOURCE)` or `formula (SHEET, calibrated|uncalibrated)`; after a comma
stands what was done to it: interpolated between measured sizes, or made isotone and by how much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from exegpt.profiler.grid import Grid
from exegpt.profiler.sheet import GpuSheet
from exegpt.profiler.table import ProfileTable

MEASURED = "measured"
UNKNOWN = "unknown"

# Relative changes below this are the rounding of clocks; they are not worth a word.
TOLD_REPAIR = 0.005

# Which of a sheet's efficiencies an operator's formula rests on, the one that dominates it first.
_EFFICIENCIES: Mapping[str, tuple[str, ...]] = {
    "linear": ("matmul", "elementwise"),
    "encode_linear": ("matmul", "elementwise"),
    "head": ("matmul", "elementwise"),
    "embed": ("elementwise",),
    "encode_attention": ("encode_attention",),
    "decode_attention": ("decode_attention",),
    "cross_attention": ("decode_attention",),
}
# Collectives and messages rest on a link, which is fitted only where a table of them stands behind the sheet.
_LINK_TABLES = ("nccl", "all_reduce", "send_recv", "p2p")
_LINK_OPERATORS = ("all_reduce", "send")


def formula_kind(sheet: GpuSheet, grid_name: str) -> str:
    """`formula (SHEET, calibrated)`; uncalibrated where no table of the card stands behind the operator."""
    operator = grid_name.rpartition(".")[2]
    if operator in _LINK_OPERATORS:
        fitted = any(part in table for table in sheet.calibrated_on for part in _LINK_TABLES)
    else:
        # Overheads and host copies are the host's, the same for every card, and so never fitted to one.
        used = _EFFICIENCIES.get(operator, ())
        fitted = sheet.is_calibrated and bool(used) and used[0] not in sheet.borrowed
        if fitted and (lent := [name for name in used if name in sheet.borrowed]):
            return f"formula ({sheet.name}, calibrated), {lent[0]} as {sheet.borrowed[lent[0]]}"
    return f"formula ({sheet.name}, {'calibrated' if fitted else 'uncalibrated'})"


def formula_provenance(grid_names: Iterable[str], sheet: GpuSheet) -> dict[str, str]:
    """Provenance of a profile that comes from a sheet alone."""
    return {name: formula_kind(sheet, name) for name in grid_names}


def provenance_of(table: ProfileTable) -> dict[str, str]:
    """Where each of the profile's tables comes from, repairs included; `unknown` in files that do not say.

    Parameters
    ----------
    table : ProfileTable

    Returns
    -------
    dict of str to str
        Name as in `grids()`, e.g. `tp1.linear`, to its kind and what was done to it.
    """
    # Files from before provenance was written hold what this program's own ranks measured.
    silent = MEASURED if table.key.software.startswith("torch ") else UNKNOWN
    return {name: table.provenance.get(name, silent) + _repair(grid) for name, grid in table.grids().items()}


def _repair(grid: Grid) -> str:
    if grid.repaired < TOLD_REPAIR:
        return ""
    return f", made isotone by up to {grid.repaired:.0%}"


def provenance_summary(table: ProfileTable) -> list[str]:
    """One line per kind: `formula (h200, calibrated): linear, head at TP 1, 2, 4, 8`.

    Repairs are left to a line of their own, which names the largest.
    """
    by_kind: dict[str, dict[str, list[str]]] = {}
    for name, text in provenance_of(table).items():
        degree, _, operator = name.rpartition(".")
        kind = text.split(", made isotone")[0]
        by_kind.setdefault(kind, {}).setdefault(operator, []).append(degree.removeprefix("tp"))
    lines = [f"costs {kind}: {_operators(found)}" for kind, found in by_kind.items()]
    worst = max(table.grids().items(), key=lambda item: item[1].repaired)
    if worst[1].repaired >= TOLD_REPAIR:
        count = sum(grid.repaired >= TOLD_REPAIR for grid in table.grids().values())
        lines.append(
            f"costs that fell as sizes grew were made isotone in {count} tables, at most {worst[0]} by "
            f"{worst[1].repaired:.0%}"
        )
    return lines


def _operators(found: Mapping[str, list[str]]) -> str:
    """Operators of the same degrees together."""
    by_degrees: dict[tuple[str, ...], list[str]] = {}
    for operator, degrees in found.items():
        by_degrees.setdefault(tuple(degrees), []).append(operator)
    texts = []
    for sizes, operators in by_degrees.items():
        at = f" at TP {', '.join(sizes)}" if any(sizes) else ""
        texts.append(", ".join(operators) + at)
    return "; ".join(texts)
