"""`omnidraft-npu bench`: what drafting gains on this machine."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from ..files import require_writable
from ..printing import echo_json
from .bench_learning import check_apart, learning_state, measure_learning, print_learning
from .bench_output import document_of, print_table, tell_differences, write_plot
from .decoding_options import (
    bundle_options,
    device_options,
    draft_length_fields,
    drafting_options,
    parse_draft_length,
    prompt_options,
    sampling_options,
    threads_option,
)
from .measuring import draft_lengths_or_auto, encode_prompts, load_prompts, tell_devices
from .progress import stage_progress
from .projecting import print_projection, project_bench, projection_chip, projection_options

if TYPE_CHECKING:
    from omnidraft_npu.runtime.bench import BenchResult
    from omnidraft_npu.runtime.learner_adapter import Adapter
    from omnidraft_npu.runtime.lora_trainer import Loss
    from omnidraft_npu.runtime.opened_pair import DraftMode, ProposerName

    from ..config import DecodeConfig, DeviceConfig
    from ..prompts import TaskPrompt
    from .decoding_options import DraftLengthChoice


@click.command(name="bench")
@bundle_options
@prompt_options
@click.option("--max-new-tokens", default=64, show_default=True, help="Most tokens per response.")
@click.option(
    "--draft-length",
    "--draft-tokens",
    "draft_length",
    metavar="LENGTHS",
    callback=draft_lengths_or_auto,
    default="1,2,4,8",
    show_default=True,
    help="Draft lengths to measure, `auto` among them: as many tokens as pay.",
)
@drafting_options
@click.option("--temperature", default=0.0, show_default=True, help="0 decodes greedily.")
@sampling_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Responses to each prompt; medians of fewer than 3 mean little.",
)
@device_options
@threads_option
@click.option("--raw", is_flag=True, help="Give the model bare prompts, without a chat template.")
@projection_options
@click.option(
    "--learn",
    "learn_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measure, let the drafter learn from answers to the prompts of this file, and measure "
    "again; a scratch adapter is begun, and thrown away.",
)
@click.option(
    "--learn-loss",
    type=click.Choice(["near", "trie", "reverse", "overlap", "paper"]),
    help="What --learn makes smaller, see docs/learning.md [default: as `run` does].",
)
@click.option(
    "--keep", is_flag=True, help="Learn in the bundle's own state, going on from what is there."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw acceptance and speed-up into a PNG file (extra `plots`).",
)
def command(
    bundle: Path | None,
    target: str | None,
    accept_terms: bool,
    prompts_file: Path | None,
    per_task: int | None,
    max_new_tokens: int,
    draft_length: "tuple[DraftLengthChoice, ...]",
    proposer: "ProposerName",
    draft_mode: "DraftMode",
    temperature: float,
    repeats: int,
    devices: "DeviceConfig",
    threads: int | None,
    raw: bool,
    project_chip: str | None,
    project_target_size: float | None,
    project_drafter_size: float | None,
    learn_file: Path | None,
    learn_loss: "Loss | None",
    keep: bool,
    as_json: bool,
    plot: Path | None,
    **sampling: Any,
) -> None:
    """Measure acceptance and speed-up, task by task and draft length by draft length.

    The target decodes alone first, with the drafter not even loaded; then with each draft
    length. Decode speed leaves prefill out. The speed-up is the ratio of decode speeds in
    this same run, as a geometric mean over prompts. Texts that differ are told.

    \b
    Examples:
      omnidraft-npu bench --accept-terms
      omnidraft-npu bench -b bundle
      omnidraft-npu bench -b bundle --prompts mine.jsonl --draft-length 4,auto --json
      omnidraft-npu bench -b bundle --per-task 8 --plot bench.png
      omnidraft-npu bench -b bundle --prompts test.jsonl --learn train.jsonl --draft-length 4
      omnidraft-npu bench -b bundle --project-chip x-elite --project-target-size 8
    """
    from ..activity import at_work
    from ..config import DecodeConfig, SamplingConfig

    click.get_current_context().with_resource(at_work())
    if plot is not None:
        from ..plots import require_matplotlib

        require_matplotlib()
        if not plot.absolute().parent.is_dir():
            raise ConfigError(f"the folder of --plot {plot} does not exist: make it first")
        require_writable(plot)
    config = DecodeConfig(
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature, **sampling),
    )
    if learn_file is None and (keep or learn_loss is not None):
        name = "--keep" if keep else "--learn-loss"
        raise ConfigError(f"{name} is about what is learned: use it with --learn")
    if learn_file is not None and (proposer == "lookup" or project_chip is not None):
        raise ConfigError("--learn goes neither with --proposer lookup nor with --project-chip")
    prompts = load_prompts(prompts_file, per_task)
    learned = [] if learn_file is None else load_prompts(learn_file, None)
    check_apart(learned, prompts)
    chip = projection_chip(project_chip, project_target_size, project_drafter_size)

    from omnidraft_npu.runtime.bench import measure
    from omnidraft_npu.runtime.learner_config import LearnerConfig

    from .default_pair import choose_bundle

    bundle, target = choose_bundle(bundle, target, accept_terms=accept_terms)
    opening: dict[str, Any] = {
        "target": target,
        "threads": threads,
        "proposer": proposer,
        "draft_mode": draft_mode,
        "devices": devices,
    }
    measured = functools.partial(
        _measure,
        functools.partial(
            measure,
            bundle,
            lambda session: encode_prompts(session, prompts, raw=raw),
            config,
            {name: draft_length_fields(name) for name in draft_length},
            repeats=repeats,
            **opening,
        ),
        max((k for k in draft_length if k != "auto"), default=0),
    )
    settings = {
        "threads": threads,
        "proposer": proposer,
        "draft_mode": draft_mode,
        "draft_tokens": draft_length,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "temperature": temperature,
        **sampling,
    }
    projection = None
    loss = learn_loss or LearnerConfig().loss
    if learned:
        with learning_state(is_kept=keep) as state:
            document = _learn(
                lambda earlier: measured(state=state, earlier=earlier),
                lambda result: document_of(result, prompts, settings),
                bundle,
                opening | {"state": state},
                learned,
                config,
                loss,
                raw=raw,
            )
        document["learning"] |= {"is_kept": keep, "loss": loss}
    else:
        result = measured()
        document = document_of(result, prompts, settings)
        if chip is not None:
            projection = project_bench(
                result, bundle, chip, project_target_size, project_drafter_size
            )
            document["projection"] = projection.to_json()
    if as_json:
        echo_json(document)
    else:
        print_table(document)
        if learned:
            print_learning(document)
        if projection is not None:
            print_projection(projection)
    tell_differences(document)
    if plot is not None:
        write_plot(document, plot)


def _measure(
    measure: "Callable[..., BenchResult]",
    longest: int,
    *,
    state: Path | None = None,
    earlier: "Adapter | None" = None,
) -> "BenchResult":
    """Measure with progress on stderr, and say the first time what runs where."""
    with stage_progress() as report:
        result = measure(report=report, state=state, earlier=earlier)
    if earlier is None:
        tell_devices(result.session, longest)
    return result


def _learn(
    measured: "Callable[[Adapter | None], BenchResult]",
    document: "Callable[[BenchResult], dict[str, Any]]",
    bundle: Path,
    opening: dict[str, Any],
    prompts: "list[TaskPrompt]",
    config: "DecodeConfig",
    loss: "Loss",
    *,
    raw: bool,
) -> dict[str, Any]:
    """The document with `learning`; `opening` are arguments of `open_session`."""
    from omnidraft_npu.runtime.bench_learning import check_can_learn
    from omnidraft_npu.runtime.session import open_session

    check_can_learn(bundle, opening["target"], opening["state"], loss)
    return measure_learning(
        measured,
        document,
        lambda: open_session(bundle, **opening),
        prompts,
        lambda name: dataclasses.replace(config, **draft_length_fields(parse_draft_length(name))),
        loss=loss,
        threads=opening["threads"],
        raw=raw,
    )
