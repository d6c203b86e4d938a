"""The tables of the case study's section."""

from __future__ import annotations

from collections.abc import Mapping

from exegpt.report.solution_rows import knobs_text
from exegpt.report.units import format_number, format_ratio, format_seconds, ratio_of
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.result import Best
from exegpt.scheduler.solution import candidate_record
from exegpt.specs import Counting, Policy
from paper.case_facts import TABLE_6, TABLE_7, Row, Times, flat, printed_identity_s
from paper.report import table


def theirs_table(given: Problem, theirs: Mapping[Row, Mapping[Counting, Best]]) -> str:
    """A row per row of Table 6."""
    rows = []
    for row, both in theirs.items():
        paper, exact = both[Counting.paper], both[Counting.exact]
        rows.append(
            [
                row.bound_s,
                f"{row.policy.value}: {knobs(given, exact)}",
                *[f"{x.throughput_per_s:.2f}" for x in (row, paper, exact)],
                *[f"{x.latency_s:.2f} s" for x in (row, paper, exact)],
            ]
        )
    header = ["bound, s", "schedule", "seq/s: paper", "paper's counting", "exact"]
    return table([*header, "latency: paper", "paper's counting", "exact"], rows, right=(0, *range(2, 8)))


def ours_table(given: Problem, found: Mapping[Row, Best | None], static: Mapping[Row, Best | None]) -> str:
    """A row per bound of Table 6."""
    rows = []
    for row, best in found.items():
        base = static[row]
        if best is None:
            rows.append([row.bound_s, "none", None, None, None, None])
            continue
        rows.append(
            [
                row.bound_s,
                f"{best.choice.policy.value}: {knobs(given, best)}",
                format_number(best.throughput_per_s),
                format_seconds(best.latency_s),
                format_ratio(best.throughput_per_s / row.throughput_per_s),
                format_ratio(ratio_of(best.throughput_per_s, base.throughput_per_s if base else None)),
            ]
        )
    header = ["bound, s", "schedule", "seq/s", "latency", "over the paper's figure", "over STATIC here"]
    return table(header, rows, right=(0, 2, 3, 4, 5))


def knobs(given: Problem, best: Best) -> str:
    """A schedule in the paper's symbols."""
    return knobs_text(candidate_record(best, given.lengths.mean_output))


def identity_table() -> str:
    """Latencies of the printed rows of RRA by its closed form."""
    rows = [
        [
            f"B_E {r.batch}, N_D {r.extent}",
            f"{r.latency_s:.2f} s",
            f"{printed_identity_s(r):.2f} s",
        ]
        for r in TABLE_6
        if r.policy is Policy.RRA
    ]
    return table(["schedule", "printed", "closed form"], rows, right=(1, 2))


def times_table(times: Mapping[str, Times]) -> str:
    """Times of stages beside Table 7's."""
    rows = [
        [policy, phase, *[_range_text(*pair) for pair in (TABLE_7[policy, phase], ours)]]
        for (policy, phase), ours in flat(times).items()
    ]
    return table(["policy", "phase", "the paper", "here"], rows, right=(2, 3))


def _range_text(mean_s: float, half_s: float) -> str:
    return f"{format_seconds(mean_s)} +- {half_s / mean_s:.1%}"
