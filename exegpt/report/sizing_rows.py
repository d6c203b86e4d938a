"""How many GPUs a rate needs, as rows of text; only `solve` records with a key `sizing` say so."""

from __future__ import annotations

from exegpt.report.reasons import is_feasible
from exegpt.report.schedule_text import Record, knobs_text
from exegpt.report.units import ABSENT, format_number, format_percent, format_seconds


def sizing_title(sizing: Record) -> str:
    """Heading of `sizing_rows`: the answer, or that there is none."""
    rate = f"{sizing['rate_per_s']:g} requests/s"
    if sizing.get("num_gpus") is None:
        return f"No size of the cluster holds {rate} within the bounds"
    return (
        f"Fewest GPUs for {rate}: {sizing['num_gpus']}, with {format_percent(sizing['headroom'])} headroom; "
        "every smaller size is proven to hold less"
    )


def sizing_facts(sizing: Record) -> list[str]:
    """What else there is to know: costs at the rate, and groups of different sizes that need fewer GPUs."""
    facts = []
    if sizing.get("cost_per_million_output_tokens") is not None:
        cost = format_number(sizing["cost_per_million_output_tokens"])
        hour = format_number(sizing.get("cost_per_hour"))
        facts.append(f"at this rate {cost} per million output tokens ({hour} per hour)")
    if groups := sizing.get("groups"):
        facts.append(
            f"independent groups of {' + '.join(map(str, groups))} = {sum(groups)} GPUs, each with its "
            "size's own schedule and its share of the requests, would hold it too"
        )
    return facts


def sizing_columns(sizing: Record) -> tuple[str, ...]:
    """Columns of `sizing_rows`; with a price also the cost of an hour."""
    priced = any(size.get("cost_per_hour") is not None for size in sizing["sizes"])
    return ("GPUs", "nodes", "holds seq/s", "latency", *(("cost/h",) if priced else ()), "policy", "knobs")


def sizing_rows(sizing: Record) -> list[tuple[str, ...]]:
    """A line per size with the greatest rate that it holds, or why it has no schedule."""
    rows = []
    for size in sizing["sizes"]:
        feasible = is_feasible(size)
        cells = {
            "GPUs": str(size["num_gpus"]),
            "nodes": f"{size['num_nodes']} x {size['gpus_per_node']}",
            "holds seq/s": format_number(size.get("throughput_per_s")),
            "latency": format_seconds(size.get("latency_s")),
            "cost/h": format_number(size.get("cost_per_hour")),
            "policy": size["policy"] if feasible else ABSENT,
            "knobs": knobs_text(size) if feasible else f"none: {size['infeasible']}",
        }
        rows.append(tuple(cells[column] for column in sizing_columns(sizing)))
    return rows
