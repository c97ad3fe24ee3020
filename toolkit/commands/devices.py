"""`omnidraft-npu devices`: the chips known, and what is known of them."""

import dataclasses
from typing import TYPE_CHECKING

import click

from ..printing import echo, echo_json

if TYPE_CHECKING:
    from ..chips.table import Chip


@click.command(name="devices")
@click.option("--verbose", is_flag=True, help="Add sources, disagreements and other names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(verbose: bool, as_json: bool) -> None:
    """List the chips that `export --soc` takes, and those that are too old for it.

    Any name, part number or soc_model of a chip will do, in any spelling, and so will the
    devices that `--verbose` lists.

    \b
    Examples:
      omnidraft-npu devices
      omnidraft-npu devices --verbose
    """
    from ..chips.table import all_chips, sources

    if as_json:
        chips = [
            {**dataclasses.asdict(chip), "is_too_old": chip.is_too_old} for chip in all_chips()
        ]
        document = {"schema_version": 1, "sources": sources(), "chips": chips}
        echo_json(document)
        return
    _show(all_chips())
    if verbose:
        _show_origins(all_chips(), sources())


def _show(chips: "tuple[Chip, ...]") -> None:
    from .tables import make_table, table_console

    columns = ("soc", "chip", "soc_model", "arch", "fp16", "weight sharing", "VTCM", "compiled as")
    table = make_table(columns, long=("chip",))
    for chip in chips:
        table.add_row(
            chip.key,
            chip.name,
            str(chip.soc_model),
            f"v{chip.arch}",
            _claim(chip.fp16),
            _claim(chip.weight_sharing),
            "–" if chip.vtcm_mb is None else f"{chip.vtcm_mb} MB",
            _compiled_as(chip),
        )
    table_console().print(table)
    echo("–: not claimed by the source")


def _claim(ability: bool | None) -> str:
    return {True: "yes", False: "no", None: "–"}[ability]


def _compiled_as(chip: "Chip") -> str:
    """What a context binary made here says it is for, or why none can be made."""
    if chip.is_too_old:
        return "too old: CPU only"
    if chip.simulated is None:
        return "not by this QNN"
    found = chip.simulated
    return f"{found.name} v{found.arch} {found.vtcm_mb} MB"


def _show_origins(chips: "tuple[Chip, ...]", sources: dict[str, str]) -> None:
    echo()
    echo("Sources:")
    for key, text in sources.items():
        echo(f"  {key}: {text}")
    echo()
    echo("Chips:")
    for chip in chips:
        names = ", ".join((*chip.aliases, *chip.figures))
        echo(f"  {chip.key} ({chip.source})" + (f": {names}" if names else ""))
        for note in chip.notes:
            echo(f"    {note}")
