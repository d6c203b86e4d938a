"""The frontier of throughput and latency as rows of text and as points of a plot.

Records are `solve` records of `result.json`; only those with a key `frontier` hold one.
"""

from __future__ import annotations

from itertools import pairwise

from exegpt.report.reasons import is_feasible
from exegpt.report.schedule_text import Record, knobs_text
from exegpt.report.units import format_number, format_percent, format_seconds

Points = list[tuple[float, float]]


def frontier_title(solve: Record) -> str:
    """Heading of `frontier_rows`: how much of the frontier is known."""
    search = solve.get("frontier_search") or {}
    if not solve["frontier"]:
        return "Frontier: no schedule under any latency bound"
    gap = search.get("gap")
    left = (
        "under any other bound, the last that meets it"
        if gap == 0
        else f"under a bound between two of them the upper line's loses at most {format_percent(gap)}"
    )
    return f"Frontier: the best schedule under each of {search.get('num_bounds')} latency bounds; {left}"


def frontier_columns(solve: Record) -> tuple[str, ...]:
    """Columns of `frontier_rows`; with a price also the cost of a million output tokens."""
    cost = ("cost/Mtok",) if solve.get("cost_per_hour") is not None else ()
    return ("bound", "latency", "seq/s", "tok/s", *cost, "policy", "knobs")


def frontier_rows(solve: Record) -> list[tuple[str, ...]]:
    """A line per point; `bound` is the loosest under which the schedule is known to be the best."""
    rows = []
    for point in solve["frontier"]:
        bound_s = point["latency_bound_s"]
        cells = {
            "bound": "none" if bound_s is None else format_seconds(bound_s),
            "latency": format_seconds(point["latency_s"]),
            "seq/s": format_number(point["throughput_per_s"]),
            "tok/s": format_number(point["throughput_tokens_per_s"]),
            "cost/Mtok": format_number(point.get("cost_per_million_output_tokens")),
            "policy": point["policy"],
            "knobs": knobs_text(point),
        }
        rows.append(tuple(cells[column] for column in frontier_columns(solve)))
    return rows


def policy_points(solve: Record) -> dict[str, Points]:
    """(tightest bound met, throughput) of each policy's own answers, by rising bound."""
    policies = (solve.get("frontier_search") or {}).get("policies") or {}
    return {
        name: [(point["least_bound_s"], point["throughput_per_s"]) for point in points]
        for name, points in policies.items()
    }


def open_steps(solve: Record) -> list[tuple[float, float, float, float]]:
    """(bound from, to, throughput below, above) of each stretch of bounds between points.

    Between them the highest throughput is at least that below and at most that above.
    """
    points = solve["frontier"]
    return [
        (
            before["latency_bound_s"],
            after["least_bound_s"],
            before["throughput_per_s"],
            after["throughput_per_s"],
        )
        for before, after in pairwise(points)
    ]


def rival_points(solve: Record) -> dict[str, tuple[float, float]]:
    """(latency, throughput) of each baseline at its best under the job's own bound."""
    return {
        name: (record["latency_s"], record["throughput_per_s"])
        for name, record in (solve.get("baselines") or {}).items()
        if is_feasible(record)
    }
