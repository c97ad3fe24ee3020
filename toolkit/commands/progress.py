"""Progress bars on stderr: one line a stage, quiet where nobody looks."""

import contextlib
import time
from collections.abc import Iterator

from ..progress import Report


@contextlib.contextmanager
def stage_progress() -> Iterator[Report]:
    """A bar for every stage that reports; with the time left; each stays on screen when done.

    Where stderr is not a terminal, one line is written as each stage ends.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks = {}
    started: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
            started[stage] = time.perf_counter()
        progress.update(tasks[stage], completed=done, total=total)
        if done == total and not console.is_terminal and stage in started:
            seconds = time.perf_counter() - started.pop(stage)
            console.print(f"{stage}: {total} done in {seconds:.1f} s", highlight=False)

    with progress:
        yield report
