"""`report.html`: one self-contained page per job, for a browser in light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from exegpt.events import RequestRecord, StageEvent
from exegpt.report import frontier_rows as frontier
from exegpt.report import memory_rows as memory
from exegpt.report import plots, rows
from exegpt.report import sizing_rows as sizing
from exegpt.report import solution_rows as solution
from exegpt.report.pareto import frontier_plot
from exegpt.report.reasons import is_feasible
from exegpt.report.result_file import plain, write_text
from exegpt.report.spread import MIN_CYCLES
from exegpt.report.summary import is_complete
from exegpt.report.units import format_gib, format_seconds

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5d6670; --page: #fff; --line: #d9dde2;
  --alarm: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa4af; --page: #14181d; --line: #333b44; --alarm: #f2857d; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; } .soft, figcaption { color: var(--soft); }
.alarm { color: var(--alarm); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; } tbody th { font-weight: 500; white-space: nowrap; }
tbody + tbody { border-top: 2px solid var(--soft); }
td.number, th.number { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0 1.6rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .9rem; }
"""


def write_report(
    path: Path,
    result: Mapping[str, Any],
    *,
    events: Sequence[StageEvent] = (),
    records: Sequence[RequestRecord] = (),
    predicted_events: Sequence[StageEvent] | None = None,
    predicted_records: Sequence[RequestRecord] | None = None,
    planned_output_pmf: Sequence[float] | None = None,
) -> None:
    """Write the page of a job: what was asked, what was chosen, what happened.

    Parameters
    ----------
    path : Path
        The HTML file; no other file and no network is needed to read it.
    result : mapping
        As `result.json`. Of its keys `status`, `command`, `error`, `wall_s`, `model`, `cluster`,
        `workload` and `bound` (each text or a mapping) form the head; `solve`, `simulate`,
        `run` and `steady` (the closed form beside a run) are shown where they are.
    events, records : sequences
        Of the run, or of the replay of a simulation; empty without one.
    predicted_events, predicted_records : sequences, optional
        Of the replay made before the run.
    planned_output_pmf : sequence of float, optional
        Planned share of queries by output tokens, from 0.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    body = [_head(result)]
    if solve := result.get("solve"):
        body += _solve(solve)
    if simulate := result.get("simulate"):
        body += [_section("Simulated"), _grid(rows.SIMULATE_COLUMNS, rows.simulate_rows(simulate))]
    if run := result.get("run"):
        bound_s = run.get("latency_bound_s", (solve or {}).get("latency_bound_s"))
        body += [_section("Predicted and measured"), _grid(rows.RUN_COLUMNS, rows.run_rows(run))]
        if steady := result.get("steady"):
            body.append(f'<p class="soft">{escape(rows.steady_text(steady))}</p>')
        body += [_section("Run"), _facts(rows.run_facts({**run, "latency_bound_s": bound_s}))]
    body += _figures(
        plain(result), events, records, predicted_events or (), predicted_records or (), planned_output_pmf
    )
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(result))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )
    write_text(path, page)


def _title(result: Mapping[str, Any]) -> str:
    return f"ExeGPT: {result.get('command', 'report')}"


def _head(result: Mapping[str, Any]) -> str:
    status = str(result.get("status", "ok"))
    facts = [
        (key, _setting(result[key])) for key in ("model", "cluster", "workload", "bound") if result.get(key)
    ]
    if overrides := result.get("overrides"):
        facts.append(("overrides", " ".join(map(str, overrides))))
    if result.get("wall_s") is not None:
        facts.append(("wall time", format_seconds(result["wall_s"])))
    lines = [f"<h1>{escape(_title(result))}</h1>"]
    css = "soft" if status == "ok" else "alarm"
    lines.append(f'<p class="{css}">status: {escape(status)}</p>')
    if error := result.get("error"):
        lines.append(f'<p class="alarm">{escape(str(error))}</p>')
    return "\n".join(lines) + _facts(facts)


def _setting(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(
        f"{key} {_quantity(key, item)}" for key, item in plain(value).items() if item is not None
    )


def _quantity(key: str, value: Any) -> str:
    if isinstance(value, int | float) and key.endswith("_s") and not key.endswith("_per_s"):
        return format_seconds(value)
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return format_gib(value)
    return str(value)


def _solve(solve: Mapping[str, Any]) -> list[str]:
    facts = solution.solution_rows(solve) + solution.advice_rows(solve)
    body = [_section(solution.solution_title(solve)), _facts(facts)]
    if used := memory.memory_rows(solve):
        body += [
            _section("Memory"),
            f'<p class="soft">{escape(memory.memory_title(solve))}</p>',
            _grid(memory.memory_columns(solve), used),
        ]
    policies, baselines = solution.policy_rows(solve), solution.baseline_rows(solve)
    if policies or baselines:
        body += [
            _section("Policies"),
            f'<p class="soft">{escape(solution.policy_title(solve))}</p>',
            _grid(solution.policy_columns(solve), policies, baselines),
        ]
    if record := solve.get("sizing"):
        body += [
            _section("Sizes of the cluster"),
            f"<p>{escape(sizing.sizing_title(record))}</p>",
            _grid(sizing.sizing_columns(record), sizing.sizing_rows(record)),
            *(f"<p>{escape(fact)}</p>" for fact in sizing.sizing_facts(record)),
        ]
    if solve.get("frontier"):
        body += [
            _section("Frontier"),
            f'<p class="soft">{escape(frontier.frontier_title(solve))}</p>',
            _grid(frontier.frontier_columns(solve), frontier.frontier_rows(solve)),
        ]
    return body


def _figures(
    result: Mapping[str, Any],
    events: Sequence[StageEvent],
    records: Sequence[RequestRecord],
    predicted_events: Sequence[StageEvent],
    predicted_records: Sequence[RequestRecord],
    planned_output_pmf: Sequence[float] | None,
) -> list[str]:
    """The plots that the job's data make sense of."""
    solve, run = result.get("solve") or {}, result.get("run") or {}
    label = "measured" if run else "replayed"
    figures = []
    compared = [*(solve.get("policies") or {}).values(), *(solve.get("baselines") or {}).values()]
    if any(map(is_feasible, compared)):
        figures.append(("Throughput of policies and baselines, each at its best", plots.throughputs(solve)))
    if solve.get("frontier"):
        figures.append(
            ("Throughput under every latency bound", plots.draw(frontier_plot(solve), height_in=3.6))
        )
    if events:
        figures.append(("Pipeline in the first cycles (odd micro-batches lighter)", plots.gantt(events)))
        figures.append(("Active pool over time", plots.pool(events, predicted_events, label=label)))
    if any(map(is_complete, records)):
        bound_s = run.get("latency_bound_s", solve.get("latency_bound_s"))
        cdf = plots.latency_cdf(records, predicted_records, label=label, bound_s=bound_s)
        figures.append(("Latency of the complete queries", cdf))
    if any(map(is_complete, records)) or planned_output_pmf is not None:
        figures.append(("Output lengths", plots.output_lengths(records, planned_output_pmf)))
    if events and (spread := plots.stage_spread(events)):
        figures.append(
            (f"Spread of stage time from cycle to cycle (steady cycles, at least {MIN_CYCLES})", spread)
        )
    return [f"<figure>\n<figcaption>{escape(name)}</figcaption>\n{svg}</figure>" for name, svg in figures]


def _section(title: str) -> str:
    return f"<h2>{escape(title)}</h2>"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in facts)
    return f"<table><tbody>{lines}</tbody></table>"


def _grid(columns: Sequence[str], *bodies: Sequence[Sequence[str]]) -> str:
    """A table; several bodies are set apart by a line."""
    text = {0, *(place for place, column in enumerate(columns) if column in ("knobs", "policy", "limit"))}

    def cells(tag: str, values: Sequence[str]) -> str:
        css = ["" if place in text else ' class="number"' for place in range(len(values))]
        return "".join(f"<{tag}{c}>{escape(v)}</{tag}>" for c, v in zip(css, values, strict=True))

    head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
    lines = ["".join(f"<tr>{cells('td', line)}</tr>" for line in body) for body in bodies if body]
    groups = "".join(f"<tbody>{body}</tbody>" for body in lines)
    return f'<div class="wide"><table>{head}{groups}</table></div>'
