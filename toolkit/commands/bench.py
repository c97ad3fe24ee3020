"""`omnidraft-npu bench`: what drafting gains on this machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError, StoreError
from .decoding_options import (
    bundle_options,
    device_options,
    draft_length_fields,
    drafting_options,
    prompt_options,
    sampling_options,
)
from .measuring import draft_lengths_or_auto, encode_prompts, load_prompts, tell_devices
from .progress import stage_progress
from .projecting import print_projection, project_bench, projection_chip, projection_options

if TYPE_CHECKING:
    from omnidraft_npu.runtime.bench import BenchResult
    from omnidraft_npu.runtime.opened_pair import DraftMode, OpenedModel, ProposerName

    from ..config import DeviceConfig
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
@click.option("--threads", type=int, help="Threads of one operator [default: physical cores].")
@click.option("--raw", is_flag=True, help="Give the model bare prompts, without a chat template.")
@projection_options
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
      omnidraft-npu bench -b bundle --project-chip x-elite --project-target-size 8
    """
    from ..config import DecodeConfig, SamplingConfig

    if plot is not None:
        from ..plots import require_matplotlib

        require_matplotlib()
        if not plot.absolute().parent.is_dir():
            raise ConfigError(f"the folder of --plot {plot} does not exist: make it first")
    config = DecodeConfig(
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature, **sampling),
    )
    prompts = load_prompts(prompts_file, per_task)
    chip = projection_chip(project_chip, project_target_size, project_drafter_size)

    from omnidraft_npu.runtime.bench import measure

    from .default_pair import choose_bundle

    bundle, target = choose_bundle(bundle, target, accept_terms=accept_terms)
    with stage_progress() as report:
        result = measure(
            bundle,
            lambda session: encode_prompts(session, prompts, raw=raw),
            config,
            {name: draft_length_fields(name) for name in draft_length},
            target=target,
            threads=threads,
            proposer=proposer,
            draft_mode=draft_mode,
            devices=devices,
            repeats=repeats,
            report=report,
        )
    tell_devices(result.session, max((k for k in draft_length if k != "auto"), default=0))
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
    document = _document(result, prompts, settings)
    projection = None
    if chip is not None:
        projection = project_bench(result, bundle, chip, project_target_size, project_drafter_size)
        document["projection"] = projection.to_json()
    if as_json:
        click.echo(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        _print_table(document)
        if projection is not None:
            print_projection(projection)
    _tell_differences(document)
    if plot is not None:
        _write_plot(document, plot)


def _document(
    result: "BenchResult",
    prompts: "list[TaskPrompt]",
    settings: dict[str, Any],
) -> dict[str, Any]:
    from omnidraft_npu.runtime.bench_report import rows_of, summary_of

    from ..machine import describe_machine

    pair = result.session.pair
    rows = rows_of(result, prompts, is_greedy=settings["temperature"] == 0)
    environment = {
        **describe_machine(),
        "target": _describe_model(pair.target),
        "drafter": None if pair.drafter is None else _describe_model(pair.drafter),
        "target_provider": result.session.target_provider,
        "draft_provider": result.session.draft_provider,
        "placement": pair.placement,
        **settings,
    }
    return {
        "schema_version": 1,
        "environment": environment,
        "rows": rows,
        "summary": summary_of(result, prompts, rows),
    }


def _describe_model(model: "OpenedModel") -> dict[str, Any]:
    entry = model.entry
    return {
        "name": entry.name,
        "source": entry.source,
        "architecture": entry.architecture,
        "precision": model.precision,
    }


def _print_table(document: dict[str, Any]) -> None:
    from rich.table import Table

    from ..plots import title_of
    from .tables import table_console

    table = Table(title=title_of(document["environment"]))
    for name in ("task", "k", "drafts", "accepted", "of tested", "tokens a round", "bytes a round"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name in ("tok/s alone", "tok/s", "speed-up", "draft", "verify", "bridge", "ttft"):
        table.add_column(name, justify="right")
    for task, group in document["summary"].items():
        alone = group["target_alone"]["decode_tokens_per_s"]
        for k, row in group["by_draft_tokens"].items():
            table.add_row(
                task,
                k,
                f"{row['mean_draft_length']:.1f}",
                _percent(row["acceptance_rate"]),
                _percent(row["conditional_acceptance"]),
                f"{row['num_tokens'] / row['rounds']:.2f}",
                f"{row['bytes_per_target_forward']:.1f}",
                f"{alone:.1f}",
                f"{row['decode_tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}x",
                *(_percent(row[f"{part}_share"]) for part in ("draft", "verify")),
                _percent(row["bridge_share"], 1),
                f"{1000 * row['ttft_s']:.0f} ms",
            )
        table.add_section()
    table_console().print(table)


def _percent(part: float | None, digits: int = 0) -> str:
    return "–" if part is None else f"{100 * part:.{digits}f} %"


def _tell_differences(document: dict[str, Any]) -> None:
    wrong = [row for row in document["rows"] if row["is_equal"] is False]
    if wrong:
        click.echo(
            f"{len(wrong)} of {len(document['rows'])} texts differ from the target's own: "
            "run `omnidraft-npu verify` on these prompts",
            err=True,
        )


def _write_plot(document: dict[str, Any], path: Path) -> None:
    from ..plots import plot_bench

    try:
        plot_bench(document, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"wrote {path}", err=True)
