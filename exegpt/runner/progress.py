"""Progress of long work on the terminal (stderr; stdout is for results)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def run_progress(num_requests: int) -> Iterator[Callable[[int, int], None]]:
    """A bar of finished requests with output tokens per second."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("serving", total=num_requests, rate=0.0)

        def report(num_finished: int, num_tokens: int) -> None:
            elapsed = max(time.perf_counter() - started, 1e-9)
            progress.update(task, completed=num_finished, rate=num_tokens / elapsed)

        yield report


@contextmanager
def step_progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for (done, total) steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(description, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield report
