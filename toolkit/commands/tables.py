"""Tables on stdout, for people and for pipes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..printing import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 160


def make_table(columns: Sequence[str], *, long: Sequence[str]) -> "Table":
    """A table that fits 80 characters more often; only its `long` columns are ever wrapped."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name not in long)
    return table


def make_console(*, stderr: bool = False, width: int | None = None) -> "Console":
    """A console that shows text as it is, without markup, and escapes what is not printable."""
    from rich.console import Console
    from rich.text import Text

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return PrintableConsole(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def table_console() -> "Console":
    """A console on stdout: as wide as the terminal, or wide enough for any table of ours."""
    console = make_console()
    return console if console.is_terminal else make_console(width=_PIPE_WIDTH)
