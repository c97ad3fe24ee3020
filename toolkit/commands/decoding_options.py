"""Options of every command that decodes; they mirror `SamplingConfig` and `open_session`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import click

from ..config import MAX_ADAPTED_LENGTH, Device, DeviceConfig

DraftLengthChoice = int | Literal["auto"]

SEEDED_LENGTH = 4
"""Draft length where a seed fixes the sampled text, which measured times must not change."""

Command = TypeVar("Command", bound=Callable[..., Any])


def _existing_bundle(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    from .default_pair import existing_bundle  # slow import

    return existing_bundle(value)


bundle_argument = click.argument(
    "bundle", type=click.Path(path_type=Path), callback=_existing_bundle
)
"""A bundle's folder, or what `run --target` was given: then the bundle in the store is meant."""


def bundle_options(command: Command) -> Command:
    """Add the options that `default_pair.choose_bundle` takes."""
    for option in reversed(
        (
            click.option(
                "-b",
                "--bundle",
                type=click.Path(path_type=Path),
                help="What `export` made; without it the target is exported once into the store.",
            ),
            click.option(
                "--target",
                help="Which target of the bundle [default: its first]. Without --bundle: a default "
                "model, a Hugging Face folder, a GGUF file, or the name of a pulled model.",
            ),
            click.option(
                "--accept-terms",
                is_flag=True,
                help="Accept the terms of a default model's licence.",
            ),
        )
    ):
        command = option(command)
    return command


def prompt_options(command: Command) -> Command:
    """Add the options that `measuring.load_prompts` takes."""
    for option in reversed(
        (
            click.option(
                "--prompts",
                "prompts_file",
                type=click.Path(path_type=Path, dir_okay=False),
                help='Rows {"prompt", "task"} in a JSONL file, or one prompt in a .txt '
                "[default: built-in].",
            ),
            click.option(
                "--per-task",
                type=click.IntRange(min=1),
                help="At most so many prompts of a task.",
            ),
        )
    ):
        command = option(command)
    return command


def parse_draft_length(text: str) -> DraftLengthChoice:
    """`auto` or a number.

    Raises:
        ValueError: neither of them.
    """
    return "auto" if text.strip() == "auto" else int(text)


def repeatable_draft_length(
    choice: DraftLengthChoice | None, *, temperature: float, seed: int | None
) -> DraftLengthChoice:
    """The draft length to use: never `auto` where a seed fixes the sampled text.

    What is drawn in a round depends on the length of its draft, and `auto` on measured times.

    Args:
        choice: What was given; None for the default.
        temperature, seed: How the text is sampled.
    """
    if temperature > 0 and seed is not None and choice in (None, "auto"):
        return SEEDED_LENGTH
    return "auto" if choice is None else choice


def draft_length_fields(length: DraftLengthChoice) -> dict[str, Any]:
    """The fields of `DecodeConfig` for a draft length."""
    if length == "auto":
        return {"max_draft_tokens": MAX_ADAPTED_LENGTH, "adapts_draft_length": True}
    return {"max_draft_tokens": length, "adapts_draft_length": False}


def _one_draft_length(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> DraftLengthChoice | None:
    if value is None:
        return None
    try:
        return parse_draft_length(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither a number nor auto") from error


draft_length_option = click.option(
    "--draft-length",
    "--draft-tokens",
    "draft_length",
    metavar="auto|INTEGER",
    callback=_one_draft_length,
    help="Drafter tokens proposed in each round; `auto`: as many as pay by measured times. "
    f"[default: auto; with --seed and a temperature always a number, {SEEDED_LENGTH} for auto]",
)


def _usable_threads(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    from ..machine import usable_threads

    return usable_threads(value)


threads_option = click.option(
    "--threads",
    type=int,
    callback=_usable_threads,
    help="Threads of one operator, at most one a processor [default: physical cores].",
)


def drafting_options(command: Command) -> Command:
    """Add the options that say what drafts, and by which spellings."""
    for option in (
        click.option(
            "--draft-mode",
            type=click.Choice(["auto", "full", "text", "cache", "direct", "paper"]),
            default="auto",
            show_default=True,
            help="How the drafter's pieces become target tokens. `full`: by every spelling; "
            "best when sampling. `text`: its text is cut by the target's tokenizer; best when "
            "greedy. `auto`: `text` at temperature 0, else `full`. `cache`: by equal bytes and "
            "what was seen before. `direct`: by equal bytes. `paper`: approximate when sampling.",
        ),
        click.option(
            "--proposer",
            type=click.Choice(["cascade", "model", "lookup"]),
            default="cascade",
            show_default=True,
            help="Draft with the drafter, with what followed earlier in the text, or with both, "
            "and with what followed in answers that were kept to learn from.",
        ),
    ):
        command = option(command)
    return command


def device_options(command: Command) -> Command:
    """Add the options of `DeviceConfig`; the command is given one as `devices`."""

    @functools.wraps(command)
    def with_devices(
        draft_device: Device, target_device: Device, simulate: bool, soc: str | None, **rest: Any
    ) -> Any:
        if soc is not None:
            from ..chips.table import find_chip

            find_chip(soc)  # An unknown name is an error also where nothing asks for the chip.
        devices = DeviceConfig(
            draft_device=draft_device, target_device=target_device, simulate=simulate, soc=soc
        )
        return command(devices=devices, **rest)

    choice = click.Choice(["auto", "npu", "cpu"])
    wrapped: Any = with_devices
    for option in reversed(
        (
            click.option(
                "--draft-device",
                type=choice,
                default="auto",
                show_default=True,
                help="Where the drafter runs: `auto` takes the NPU if it can, `npu` insists.",
            ),
            click.option(
                "--target-device",
                type=choice,
                default="auto",
                show_default=True,
                help="Where the target runs.",
            ),
            click.option(
                "--simulate",
                is_flag=True,
                help="Count the simulator on x86_64 as an NPU; it is slow.",
            ),
            click.option(
                "--soc",
                help="The chip, as in `omnidraft-npu devices` [default: this machine's].",
            ),
        )
    ):
        wrapped = option(wrapped)
    return cast(Command, wrapped)


_SAMPLING: tuple[tuple[str, float, str], ...] = (
    ("--top-k", 0, "Sample from the K most likely tokens; 0 disables the limit."),
    ("--top-p", 1.0, "Sample from the fewest likely tokens with this probability together."),
    ("--min-p", 0.0, "Leave out tokens below this share of the likeliest one's probability."),
    ("--repetition-penalty", 1.0, "Above 1 makes tokens less likely that were there before."),
)
_SEED = click.option("--seed", type=int, help="Random seed for sampling.")


def sampling_options(command: Command) -> Command:
    """Add the options that shape the target's distribution, all but the temperature.

    What is not given is off, whatever the model's maker wants: a measurement depends on what
    its command says.
    """
    command = _SEED(command)
    for name, default, text in reversed(_SAMPLING):
        command = click.option(name, default=default, show_default=True, help=text)(command)
    return command


def model_sampling_options(command: Command) -> Command:
    """Add `--temperature` and the options above, None where the model's own defaults hold.

    The command is given them as `given`, a dict for `GenerationDefaults.sampling`; those that
    no model could be decoded with are refused before anything is opened.
    """
    temperature = ("--temperature", 0.0, "0 decodes greedily.")

    @functools.wraps(command)
    def with_given(**rest: Any) -> Any:
        from ..generation_defaults import GenerationDefaults

        names = [name[2:].replace("-", "_") for name, *_ in (temperature, *_SAMPLING)]
        given = {name: rest.pop(name) for name in names}
        GenerationDefaults().sampling(seed=rest["seed"], **given)
        return command(given=given, **rest)

    wrapped: Any = _SEED(with_given)
    for name, default, text in reversed((temperature, *_SAMPLING)):
        wrapped = click.option(
            name, type=type(default), help=f"{text} [default: the model's, or {default}]"
        )(wrapped)
    return cast(Command, wrapped)
