"""`command=gather`: one table and one plot of a sweep."""

from __future__ import annotations

from exegpt.commands.context import Context
from exegpt.report.gather import gather as merge
from exegpt.report.tables import gather_table


def gather(context: Context) -> None:
    """Merge the results below `gather.dir` into summary.csv, summary.md and pareto.png there."""
    directory = context.job.gather_dir
    assert directory is not None
    result = merge(directory)
    gather_table(result, context.console)
    context.write("ok", {"gather": {"dir": str(directory)}})
