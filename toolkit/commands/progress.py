"""Progress bars on stderr: one line a stage, quiet where nobody looks."""

import contextlib
import time
from collections.abc import Iterator

from ..printing import echo, printable
from ..progress import Report
from .tables import make_console


@contextlib.contextmanager
def stage_progress() -> Iterator[Report]:
    """A bar for every stage that reports; with the time left; each stays on screen when done.

    Where stderr is not a terminal, one line is written as each stage ends.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = make_console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks = {}
    started: dict[str, float] = {}
    latest = time.perf_counter()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal latest
        stage, now = printable(stage), time.perf_counter()
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
            # What is told of first when a part of it is done began as the stage before ended.
            started[stage] = latest if done else now
        latest = now
        progress.update(tasks[stage], completed=done, total=total)
        if done == total and not console.is_terminal and stage in started:
            seconds = now - started.pop(stage)
            echo(f"{stage}: {total} done in {seconds:.1f} s", err=True)

    with progress:
        yield report
