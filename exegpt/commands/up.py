"""`command=up`: profile, solve, run, report."""

from __future__ import annotations

import time

from exegpt.commands.context import REPORT_FILE, Context
from exegpt.commands.profile import load_profile, profile_record
from exegpt.commands.run import execute, run_schedule
from exegpt.commands.solve import find_schedule, make_problem
from exegpt.report.html import write_report
from exegpt.report.tables import solution_table


def up(context: Context) -> None:
    """The whole path; without a feasible schedule it ends with the reason."""
    context.require_devices("command=up")
    context.check_files(weights=True)
    started = time.perf_counter()
    table, path = load_profile(context)
    sections = {"profile": profile_record(table, path, time.perf_counter() - started)}
    schedule, sections["solve"] = find_schedule(context, make_problem(context, table))
    solution_table(sections["solve"], context.console)
    if schedule is None:
        result = context.write("infeasible", {**context.describe(), **sections})
        write_report(context.output_dir / REPORT_FILE, result)
        return
    run_schedule(context, schedule, table, lambda job: execute(context, job), sections=sections)
