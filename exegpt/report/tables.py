"""Tables for the terminal, 100 columns wide, on stdout unless a console is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exegpt.report import frontier_rows as frontier
from exegpt.report import memory_rows as memory
from exegpt.report import rows
from exegpt.report import sizing_rows as sizing
from exegpt.report import solution_rows as solution
from exegpt.report import support_rows as reach
from exegpt.report.schedule_text import Record
from exegpt.report.units import ABSENT, format_number, format_ratio, format_seconds

if TYPE_CHECKING:
    from exegpt.report.gather import GatherResult

WIDTH = 100
_NUM_FIGURES = 6


def solution_table(solve: Record, console: Console | None = None) -> None:
    """Print the answer of the solver.

    The chosen schedule and why it won, or for an infeasible answer the one that comes closest and what to
    relax; what its memory is for; each policy and baseline at its best, or why it has none.
    """
    console = console or Console(width=WIDTH)
    facts = solution.solution_rows(solve) + solution.advice_rows(solve)
    _facts(console, solution.solution_title(solve), facts, alarm=solve.get("status") == "infeasible")
    if used := memory.memory_rows(solve):
        _grid(console, memory.memory_title(solve), memory.memory_columns(solve), used)
    policies, baselines = solution.policy_rows(solve), solution.baseline_rows(solve)
    if policies or baselines:
        columns, title = solution.policy_columns(solve), solution.policy_title(solve)
        _grid(console, title, columns, policies + baselines, text=("limit",), line_after=len(policies))


def frontier_table(solve: Record, console: Console | None = None) -> None:
    """Print the frontier of a `solve` record that has one."""
    if solve.get("frontier") is None:
        return
    console = console or Console(width=WIDTH)
    columns = frontier.frontier_columns(solve)
    _grid(console, frontier.frontier_title(solve), columns, frontier.frontier_rows(solve), text=("policy",))


def sizing_table(solve: Record, console: Console | None = None) -> None:
    """Print what each size of the cluster holds, of a `solve` record for an arrival rate."""
    if (record := solve.get("sizing")) is None:
        return
    console = console or Console(width=WIDTH)
    columns = sizing.sizing_columns(record)
    _grid(console, sizing.sizing_title(record), columns, sizing.sizing_rows(record), text=("policy",))
    for fact in sizing.sizing_facts(record):
        console.print(Text(fact))


def run_table(run: Record, console: Console | None = None) -> None:
    """Print a run: predicted, measured and relative error, then requests, tokens and spreads."""
    console = console or Console(width=WIDTH)
    _grid(console, "Predicted and measured", rows.RUN_COLUMNS, rows.run_rows(run))
    _facts(console, "Run", rows.run_facts(run))


def simulate_table(simulate: Record, console: Console | None = None) -> None:
    """Print a simulation: closed form beside replay."""
    title = rows.simulate_title(simulate)
    _grid(console or Console(width=WIDTH), title, rows.SIMULATE_COLUMNS, rows.simulate_rows(simulate))


def profile_table(profile: Record, console: Console | None = None) -> None:
    """Print what a profile record says, and of each operator where its costs come from and their reach."""
    console = console or Console(width=WIDTH)
    _facts(console, "Profile", reach.profile_rows(profile))
    _operators(console, profile)


def support_table(head: Record, support: Record, console: Console | None = None) -> None:
    """Print what can be planned and run, what is missing, and where costs come from."""
    console = console or Console(width=WIDTH)
    alarm = not support["supported"]
    _facts(console, "Not supported" if alarm else "Supported", reach.support_rows(head, support), alarm=alarm)
    _operators(console, support["profile"] or {})


def _operators(console: Console, profile: Record) -> None:
    if lines := reach.operator_rows(profile):
        _grid(console, "Costs", reach.OPERATOR_COLUMNS, lines, text_columns=4, folding=("up to", "costs"))


def gather_table(result: GatherResult, console: Console | None = None) -> None:
    """Print a line per job of a sweep, the warnings, and where the files are."""
    console = console or Console(width=WIDTH)
    varying = tuple(result.varying)
    short = tuple(key.rpartition(".")[2] for key in varying)
    names = short if len(set(short)) == len(short) else varying
    columns = ("job", *names, "status", "policy", "seq/s", "latency", "bound", "B_E", "N_D", "ratio")
    lines = [
        (
            str(row["job"]),
            *(str(row[key]) for key in varying),
            str(row["status"]),
            str(row["policy"] or ABSENT),
            format_number(row["throughput_per_s"]),
            format_seconds(row["latency_s"]),
            format_seconds(row["latency_bound_s"]),
            str(row["encode_batch_size"] or ABSENT),
            str(row["decode_iterations"] or ABSENT),
            format_ratio(row["ratio_to_static"]),
        )
        for row in result.rows
    ]
    title = f"Sweep {result.directory} (ratio: throughput over that of STATIC)"
    _grid(console, title, columns, lines, text_columns=len(columns) - _NUM_FIGURES, folding=names)
    for warning in result.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for path in (result.csv_path, result.markdown_path, result.plot_path):
        console.print(Text(str(path)), soft_wrap=True)


def _facts(console: Console, title: str, facts: Sequence[tuple[str, str]], *, alarm: bool = False) -> None:
    console.print(Text(title, style="bold red" if alarm else "bold"))
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts:
        # As Text: brackets in names and overrides are not rich's markup.
        table.add_row(Text(label), Text(value))
    console.print(table)


def _grid(
    console: Console,
    title: str,
    columns: Sequence[str],
    lines: Sequence[Sequence[Any]],
    *,
    text_columns: int = 1,
    folding: Sequence[str] = ("knobs",),
    text: Sequence[str] = (),
    line_after: int | None = None,
) -> None:
    console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        is_text = place < text_columns or column in folding or column in text
        table.add_column(
            Text(column),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=column not in folding,
        )
    for at, line in enumerate(lines, 1):
        table.add_row(*(Text(str(cell)) for cell in line), end_section=at == line_after)
    console.print(table)
