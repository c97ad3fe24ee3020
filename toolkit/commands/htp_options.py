"""Options of `export` that are about the NPU; they mirror `HtpOptions`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import ConfigError

if TYPE_CHECKING:
    from omnidraft_npu.quantize.htp_request import HtpOptions

Command = TypeVar("Command", bound=Callable[..., Any])


def htp_options(command: Command) -> Command:
    """Add the options that `read_htp_options` takes."""
    for option in reversed(
        (
            click.option(
                "--soc",
                metavar="CHIP",
                multiple=True,
                help="Compile for this chip's NPU too, no chip needed; may be repeated. "
                "`omnidraft-npu devices` lists the names.",
            ),
            click.option(
                "--htp-precision",
                metavar="RECIPE",
                help="fp16, w8a16, w4a16 or w4a16-nbits [default: w8a16; w4a16 for a model of 800 "
                "million weights or more, from Hexagon v73 on].",
            ),
            click.option(
                "--kv-bits",
                type=click.Choice(["8", "16"]),
                help="Bits of the cache on the NPU [default: the recipe's].",
            ),
            click.option(
                "--verify-length",
                type=int,
                help="Tokens of the NPU graph that verifies, at most 32: one more than the "
                "longest draft  [default: 8].",
            ),
            click.option(
                "--htp-context-length",
                type=int,
                help="Slots of the cache on the NPU, at most --context-length; every pass computes "
                "with all of them  [default: 1024].",
            ),
            click.option(
                "--calibration",
                type=click.Path(path_type=Path, dir_okay=False),
                help="Prompts to calibrate on, a JSONL or .txt file [default: built-in].",
            ),
            click.option(
                "--share-weights",
                is_flag=True,
                help="One binary for all lengths; only a device can load it.",
            ),
            click.option(
                "--one-binary",
                is_flag=True,
                help="One binary for all chips; only a device can load it.",
            ),
            click.option(
                "--max-ram",
                type=click.FloatRange(min=0, min_open=True),
                metavar="GB",
                help="What a step may take; a larger model goes into parts that keep to it "
                "[default: what is available].",
            ),
        )
    ):
        command = option(command)
    return command


def read_htp_options(
    *,
    soc: tuple[str, ...],
    htp_precision: str | None,
    kv_bits: str | None,
    verify_length: int | None,
    htp_context_length: int | None,
    calibration: Path | None,
    share_weights: bool,
    one_binary: bool,
    max_ram: float | None,
) -> "HtpOptions":
    """The options as one record.

    Raises:
        ConfigError: one that is out of range, or given without a chip.
    """
    from omnidraft_npu.quantize.htp_request import DEFAULT_VERIFY_LENGTH, HtpOptions

    given = {
        "--htp-precision": htp_precision,
        "--kv-bits": kv_bits,
        "--calibration": calibration,
        "--share-weights": share_weights,
        "--one-binary": one_binary,
        "--verify-length": verify_length,
        "--max-ram": max_ram,
        "--htp-context-length": htp_context_length,
    }
    if not soc and (without := [name for name, value in given.items() if value]):
        raise ConfigError(
            f"{without[0]} is about the NPU, and no chip is named: add --soc x-elite, say, or "
            "leave it out"
        )
    if max_ram is not None and not math.isfinite(max_ram):
        raise ConfigError(f"max_ram is {max_ram}, must be a number of GB: use --max-ram 8")
    return HtpOptions(
        soc=soc,
        precision=htp_precision,
        kv_bits={None: None, "8": 8, "16": 16}[kv_bits],
        verify_length=DEFAULT_VERIFY_LENGTH if verify_length is None else verify_length,
        context_length=htp_context_length,
        calibration=calibration,
        share_weights=share_weights,
        one_binary=one_binary,
        max_ram_bytes=None if max_ram is None else int(max_ram * 1e9),
    )
