"""Figure 11: throughput and latency when output lengths are not those that were planned for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from exegpt.report.units import format_number, format_seconds
from exegpt.scheduler.solve import solve
from paper.drift_claims import claims
from paper.drift_plots import margin_plot, throughput_plot
from paper.drift_rows import DRIFTS, FACTORS, Drift, Row, Served
from paper.drift_settings import (
    BOUNDED,
    EXPERIMENT,
    TASK,
    Replayed,
    Setting,
    adapted_shares,
    first_feasible,
    own_margin,
    replayed,
)
from paper.report import Place, Section, table
from paper.scenarios import RRA, WAA, Scenario, problem

MARGIN = 0.15
MEANS = [Drift("mean", factor) for factor in FACTORS]
INTRODUCTION = """\
OPT-13B on four A40, task T. `old` is the schedule for the planned lengths, evaluated in closed form under
the drifted ones: its batch B_E, its N_D and its placement are held, the pool is what then follows, up to
memory. SLA (a) is on the 99th percentile of the drifted lengths, (b) on the query that was the 99th
percentile when planned ({length} tokens). A margin is the least per cent, up to 40, by which the planning
bound must be tighter for its schedule to meet the bound under the drift (`-`: more). `own` is by how much
the old schedule's latency alone asks for; the search may need less where its next schedule is much faster.
Skews are those of skew normals with the planned mean and deviation."""


def section(place: Place, console: Console) -> Section:
    """Tables and plots of every drift under a bound, and without."""
    num_steps = 4 * len(DRIFTS) + 2 * len(MEANS) + 1
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("drift", total=num_steps)

        def done() -> None:
            progress.advance(task)

        rra, waa = (first_feasible(n, p, BOUNDED, done) for n, p in (("RRA", RRA), ("WAA", WAA)))
        free = [first_feasible(n, p, ("none",), done) for n, p in (("RRA", RRA), ("WAA", WAA))]
        again = {s.name: replayed(s, MEANS, done) for s in (rra, waa)}
        price = prices((rra, waa))
        done()
    margin_plot((rra, waa), place)
    throughput_plot((rra, waa), place)
    body = [
        INTRODUCTION.format(length=rra.problem.lengths.output_percentile(99)).replace("\n", " "),
        place.link("drift-margin.png", "margins by drift"),
        place.link("drift-throughput.png", "throughput by drift"),
        *(bounded_text(s) for s in (rra, waa)),
        "### Without a bound\n\n" + free_table(free),
        "### Replayed\n\nA running system holds what the schedule's file holds: RRA admits B_E queries a "
        "cycle while K/V pages last; WAA also holds the room of its decode pool, so under longer outputs its "
        "pool does not grow as in closed form: fewer queries enter, and they end sooner.\n\n"
        + replay_table(again),
        f"### Planning for drift\n\n`solver.drift_margin={MARGIN}` bounds the latency for mean and deviation "
        f"off by {MARGIN:.0%} either way, alone and together, under (a).\n\n"
        + table(["policy", "bound", "seq/s without", "seq/s with", "given up"], price, right=(1, 2, 3, 4)),
    ]
    return Section(
        title="Figure 11: drift of the output lengths",
        claims=claims(rra, waa, free, again["WAA"]),
        body="\n\n".join(body),
    )


def prices(settings: Sequence[Setting]) -> list[list[object]]:
    """What planning for a drift of `MARGIN` costs each policy: a row per setting and paper bound."""
    rows: list[list[object]] = []
    for policies, setting in zip((RRA, WAA), settings, strict=True):
        for bound in (*BOUNDED, "none"):
            given = problem(Scenario(experiment=EXPERIMENT, task=TASK, bound=bound), policies)
            found = solve(replace(given, baselines=(), drift_margin=MARGIN))
            assert found.margins is not None
            record = found.margins.record(found.best)
            cost = record["cost"]
            rows.append(
                [
                    setting.name,
                    format_seconds(found.bound.latency_s),
                    format_number(record["throughput_without_per_s"]),
                    format_number(found.best.throughput_per_s if found.best else None),
                    "-" if cost is None else f"{cost:.1%}",
                ]
            )
    return rows


def bounded_text(setting: Setting) -> str:
    """Heading and table of a policy under its bound."""
    best = setting.best
    knobs = f"B_E {best.batch}" + (f", N_D {best.extent}" if setting.name == "RRA" else "")
    head = (
        f"### {setting.name}, bound {format_seconds(setting.problem.bound.latency_s)} ({setting.bound})\n\n"
        f"The old schedule: {best.choice.policy.value}, {knobs}, {format_number(best.throughput_per_s)} "
        f"seq/s, {format_seconds(best.latency_s)}."
    )
    header = ["drift", "old seq/s", "re-optimised", "(a)", "(b)", "margin (a)", "(b)", "own (a)", "own (b)"]
    shares = adapted_shares(setting) if setting.name == "RRA" else []
    rows = [_row(setting, r) for r in setting.rows]
    if shares:
        header.append("new N_D alone")
        rows = [
            [*row, format_number(r.adapted.throughput_per_s) if r.adapted else "-"]
            for row, r in zip(rows, setting.rows, strict=True)
        ]
    return f"{head}\n\n{table(header, rows, right=range(1, len(header)))}"


def _row(setting: Setting, row: Row) -> list[object]:
    return [
        row.drift,
        _throughput(row.old),
        format_number(row.new.throughput_per_s if row.new else None),
        format_seconds(row.old.latency_s),
        format_seconds(row.old.planned_latency_s),
        *("-" if k is None else f"{k}%" for k in (row.margin, row.planned_margin)),
        *(f"{own_margin(setting, row, planned=planned):.0%}" for planned in (False, True)),
    ]


def _throughput(served: Served) -> str:
    return format_number(served.throughput_per_s) if served.fits else "beyond memory"


def free_table(settings: Sequence[Setting]) -> str:
    """Throughput of the old and the re-optimised schedule without a bound."""
    header = ["drift", *(f"{s.name} {what}" for s in settings for what in ("old", "re-optimised"))]
    rows = [
        [
            drift,
            *(
                cell
                for s in settings
                for r in [s.row(drift.moment, drift.value)]
                for cell in (_throughput(r.old), format_number(r.new.throughput_per_s if r.new else None))
            ),
        ]
        for drift in DRIFTS
    ]
    return table(header, rows, right=range(1, 5))


def replay_table(again: dict[str, list[Replayed]]) -> str:
    """Closed form and replay of the old schedules."""
    rows = [
        [
            name,
            r.drift,
            *(format_number(x) for x in (r.steady_per_s, r.replayed_per_s)),
            *(format_seconds(x) for x in (r.steady_latency_s, r.replayed_latency_s)),
        ]
        for name, found in again.items()
        for r in found
    ]
    header = ["policy", "drift", "closed form seq/s", "replayed", "closed form (a)", "replayed (a)"]
    return table(header, rows, right=range(2, 6))
