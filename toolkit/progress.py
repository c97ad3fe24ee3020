"""How long work tells how far it is."""

from typing import Protocol


class Report(Protocol):
    """Told of a stage's name, the items done and their total."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it."""
        ...
