"""What a bench says of a chip that was not there: options, inputs and table of a projection."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import ConfigError
from ..printing import echo

if TYPE_CHECKING:
    from omnidraft_npu.chips.table import Chip
    from omnidraft_npu.cost_model import Best, Projection
    from omnidraft_npu.runtime.bench import BenchResult

    from ..bundle import Bundle
    from ..manifest import ModelEntry

Command = TypeVar("Command", bound=Callable[..., Any])

MIN_TESTED = 20
"""Tests of a position in a round below which its acceptance says little."""
_BYTES_PER_WEIGHT = {"fp32": 4.0, "int8": 1.125, "int4": 0.625}


def projection_options(command: Command) -> Command:
    """Add the options that `projection_chip` and `project_bench` take."""
    for option in reversed(
        (
            click.option(
                "--project-chip",
                metavar="CHIP",
                help="Project the speed-up on a chip from published speeds; see `devices`.",
            ),
            click.option(
                "--project-target-size",
                type=float,
                metavar="BILLIONS",
                help="Parameters of the target to project for [default: about its own].",
            ),
            click.option(
                "--project-drafter-size",
                type=float,
                metavar="BILLIONS",
                help="Parameters of the drafter to project for [default: about its own].",
            ),
        )
    ):
        command = option(command)
    return command


def projection_chip(
    name: str | None, target_b: float | None, drafter_b: float | None
) -> "Chip | None":
    """The chip to project for, before anything is measured; None where none is named.

    Raises:
        ConfigError: no such chip, nothing is published for it, or a size that cannot be.
    """
    from ..chips.figures import require_figures
    from ..chips.table import find_chip

    for option, size in (("target", target_b), ("drafter", drafter_b)):
        if size is None:
            continue
        if name is None:
            raise ConfigError(f"--project-{option}-size needs a chip: add --project-chip CHIP")
        if not 0 < size < float("inf"):
            raise ConfigError(f"--project-{option}-size is {size}, must be above 0 and finite")
    if name is None:
        return None
    chip = find_chip(name)
    require_figures(chip)
    return chip


def project_bench(
    result: "BenchResult",
    bundle: Path,
    chip: "Chip",
    target_b: float | None,
    drafter_b: float | None,
) -> "Projection":
    """A projection with the acceptance of every response that was drafted.

    Raises:
        ConfigError: nothing was drafted, or a size is needed that the bundle does not tell.
    """
    from ..bundle import open_bundle
    from ..cost_model import project
    from ..statistics import DecodeStats

    stats = DecodeStats.sum(
        run.stats for one in result.drafted.values() for m in one for run in m.runs
    )
    if not stats.tested:
        raise ConfigError("nothing was drafted, so there is no acceptance to project from")
    counted = zip(stats.acceptance_by_position, stats.tested_by_position, strict=True)
    known = [acceptance for acceptance, tested in counted if tested >= MIN_TESTED]
    pair, opened = result.session.pair, open_bundle(bundle)
    drafter = pair.drafter.entry if pair.drafter is not None else pair.target.entry
    return project(
        chip,
        acceptance_by_position=known or stats.acceptance_by_position[:1],
        acceptance_after=stats.accepted / stats.tested,
        target_b=target_b or _parameters_b(opened, pair.target.entry, "target"),
        drafter_b=drafter_b or _parameters_b(opened, drafter, "drafter"),
        context_length=(pair.target.entry.htp or pair.target.entry).context_length,
    )


def print_projection(projection: "Projection") -> None:
    """The projection on stdout, every input first."""
    from ..chips.figures import figures_source
    from .tables import make_table, table_console

    speed = projection.speed
    by_position = " ".join(f"{a:.2f}" for a in projection.acceptance_by_position)
    echo()
    echo(f"A projection for {projection.chip}, not a measurement: nothing ran there. Its inputs:")
    echo(
        f"  acceptance by position, measured above: {by_position}; "
        f"{projection.acceptance_after:.2f} assumed after that, and the same on the chip"
    )
    echo(
        f"  published for {speed.device} ({speed.runtime}, w4a16, context {speed.context_length}, "
        f"{speed.num_models} models): a one-token pass takes {speed.overhead_ms:.1f} ms and "
        f"{speed.ms_per_b:.1f} ms a billion parameters; 128 tokens cost {speed.prefill_cost:.2f} "
        "of one, taken as linear between"
    )
    echo(f"  source: {figures_source()}")
    echo(
        f"  target of {projection.target_b:.3g} billion parameters: {projection.target_step_ms:.1f}"
        f" ms a step; drafter of {projection.drafter_b:.3g}: {projection.draft_step_ms:.1f} ms, or "
        f"{projection.draft_step_without_overhead_ms:.1f} ms if it only had to read its weights"
    )
    sizes = {"target": projection.target_b, "drafter": projection.drafter_b}
    if small := [role for role, size in sizes.items() if size < speed.smallest_b]:
        echo(
            f"  the smallest published model has {speed.smallest_b:.3g} billion, so what the "
            f"{' and the '.join(small)} would take is a guess"
            + ("; --project-target-size 8 asks for a larger target" if "target" in small else "")
        )
    echo(
        "  speed-up = tokens a round / (pass cost + k drafter steps / target step); each draft "
        "counts as a drafter step, also one of prompt lookup, and the bridge as nothing"
    )
    drafted = ("k", "tokens a round", "speed-up")
    columns = ("verify length", "pass cost", *drafted, *(f"{name} *" for name in drafted))
    table = make_table(columns, long=())
    for row in projection.lengths:
        table.add_row(
            str(row.verify_length),
            f"{row.verify_cost:.2f}",
            *_cells(row.best),
            *_cells(row.best_without_overhead),
        )
    table_console().print(table)
    echo("* at most: with a drafter that only has to read its weights")
    shortest, (longer, gain) = projection.lengths[0], projection.longer_gain
    if longer is shortest:
        said = f"A verify graph of over {shortest.verify_length} tokens buys nothing here"
    else:
        said = (
            f"A verify graph of {longer.verify_length} tokens buys at most {100 * gain:.0f} % over "
            f"one of {shortest.verify_length}: export with --verify-length {longer.verify_length}"
        )
    echo(said)


def _cells(best: "Best") -> tuple[str, str, str]:
    return str(best.draft_tokens), f"{best.mean_acceptance_length:.2f}", f"{best.speedup:.2f}x"


def _parameters_b(bundle: "Bundle", entry: "ModelEntry", role: str) -> float:
    """About how many billions of parameters a model has, by the size of its graph's files."""
    graph = entry.graphs["cpu"]
    if graph.precision not in _BYTES_PER_WEIGHT:
        raise ConfigError(
            f"how large {entry.name} is cannot be told: add --project-{role}-size BILLIONS"
        )
    folder = graph.path.rpartition("/")[0] + "/"
    num_bytes = sum(f.size for path, f in bundle.manifest.files.items() if path.startswith(folder))
    return num_bytes / _BYTES_PER_WEIGHT[graph.precision] / 1e9
