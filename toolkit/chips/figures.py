"""Published times of passes on the NPU, by device and model."""

import csv
import functools
from dataclasses import dataclass
from importlib import resources

from ..errors import ConfigError
from .table import Chip, all_chips


@dataclass(frozen=True, kw_only=True)
class PassFigure:
    """What two passes of one model took on one device."""

    model: str
    parameters_b: float
    """Size of the model, in billions of parameters."""
    precision: str
    device: str
    runtime: str
    context_length: int
    one_token_ms: float
    ttft_min_ms: float
    """Shortest time to a first token: about one pass of 128 tokens."""


def figures_of(chip: Chip) -> tuple[PassFigure, ...]:
    """Everything published for devices with a chip; may be empty."""
    return tuple(figure for figure in _load()[0] if figure.device in chip.figures)


def figures_source() -> str:
    """Where the figures come from."""
    return _load()[1]


def require_figures(chip: Chip) -> tuple[PassFigure, ...]:
    """Everything published for devices with a chip.

    Raises:
        ConfigError: nothing is; lists the chips with figures.
    """
    if found := figures_of(chip):
        return found
    others = ", ".join(other.key for other in all_chips() if figures_of(other))
    raise ConfigError(f"no speeds are published for {chip.name}: project for one of {others}")


@functools.cache
def _load() -> tuple[tuple[PassFigure, ...], str]:
    path = resources.files(__package__) / "device_figures.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    notes = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    figures = tuple(
        PassFigure(
            model=row["model"],
            parameters_b=float(row["parameters_b"]),
            precision=row["precision"],
            device=row["device"],
            runtime=row["runtime"],
            context_length=int(row["context_length"]),
            one_token_ms=float(row["one_token_ms"]),
            ttft_min_ms=float(row["ttft_min_ms"]),
        )
        for row in rows
    )
    return figures, " ".join(notes)
