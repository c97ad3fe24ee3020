"""`omnidraft-npu export`: from checkpoints to a bundle."""

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ..drafters import DEFAULT_DRAFTER
from ..precision import Precision
from ..printing import echo, echo_json
from ..replacement import partial_path
from .htp_options import htp_options, read_htp_options

if TYPE_CHECKING:
    from omnidraft_npu.quantize.export import ExportReport
    from omnidraft_npu.quantize.model_request import Exporter

_PRECISIONS = get_args(Precision)


@click.command(name="export")
@click.option(
    "--drafter",
    default=DEFAULT_DRAFTER,
    show_default=True,
    help="Small model that proposes: name, hub id or path; the default one ships with the package.",
)
@click.option(
    "--target",
    "targets",
    required=True,
    multiple=True,
    help="Model whose output is preserved; may be repeated, the first is the default.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option(
    "--precision",
    type=click.Choice(_PRECISIONS),
    default="int8",
    show_default=True,
    help="Weights of the targets, and of the drafter unless --draft-precision says otherwise.",
)
@click.option("--draft-precision", type=click.Choice(_PRECISIONS), help="Weights of the drafter.")
@click.option(
    "--context-length",
    type=int,
    default=4096,
    show_default=True,
    help="Most tokens of prompt and response together; a model made for fewer gets its own limit.",
)
@click.option(
    "--exporter",
    type=click.Choice(["builder", "optimum"]),
    default="builder",
    show_default=True,
    help="How targets are exported; `optimum` takes any causal LM (extra `optimum`).",
)
@click.option(
    "--lora-rank",
    type=int,
    help="Rank of what the drafter can learn on the device; 0 for one that does not learn "
    "[default: 16; 0 where a chip cannot compute it].",
)
@click.option(
    "--training-shape",
    default="8x256",
    show_default=True,
    metavar="BxL",
    help="Responses an update learns from x pieces of each; 4x128 takes a quarter of the memory.",
)
@htp_options
@click.option("--force", is_flag=True, help="Replace the bundle that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    drafter: str,
    targets: tuple[str, ...],
    output: Path,
    precision: Precision,
    draft_precision: Precision | None,
    context_length: int,
    exporter: "Exporter",
    lora_rank: int | None,
    training_shape: str,
    force: bool,
    as_json: bool,
    **npu: Any,
) -> None:
    """Turn a drafter and one or more targets into a bundle.

    Models are Hugging Face folders, GGUF files, or names that `omnidraft-npu pull` brought to
    the local store; a local path always wins. An interrupted export resumes when the same
    command is run again.

    The drafter can learn from what the target says, on the device and without torch: beside its
    graph lies one that gives its losses and their gradients (--lora-rank).

    With --soc the bundle also holds static graphs for the NPU and a context binary for every
    chip named, made here ahead of time: no chip is needed, and each binary is read back to see
    that it is for that chip.

    \b
    Examples:
      omnidraft-npu export --target gemma3-270m -o bundle
      omnidraft-npu export --drafter ./llama-68m --target ./vicuna-7b --precision int4 -o bundle
      omnidraft-npu export --drafter smollm2-135m --target gemma3-270m --soc x-elite -o bundle
    """
    from omnidraft_npu.quantize.export import ExportRequest, export_bundle
    from omnidraft_npu.quantize.htp_request import default_lora_rank, htp_request
    from omnidraft_npu.quantize.model_request import model_request
    from omnidraft_npu.quantize.training_stage import TrainingShape

    from ..activity import at_work
    from .progress import stage_progress
    from .resuming import telling_how_to_resume

    click.get_current_context().with_resource(at_work())
    logging.getLogger("omnidraft_npu").setLevel(logging.INFO)
    options = read_htp_options(**npu)
    htp = htp_request(options)
    request = ExportRequest(
        drafter=model_request(
            drafter,
            precision=draft_precision or precision,
            context_length=context_length,
            lora_rank=default_lora_rank(htp) if lora_rank is None else lora_rank,
            training=TrainingShape.parse(training_shape),
            htp=htp,
        ),
        targets=tuple(
            model_request(
                target,
                precision=precision,
                context_length=context_length,
                exporter=exporter,
                htp=htp,
            )
            for target in targets
        ),
    )
    with telling_how_to_resume(partial_path(output)), stage_progress() as report:
        done = export_bundle(request, output, force=force, progress=report)
    _say(done, as_json)


def _say(done: "ExportReport", as_json: bool) -> None:
    from omnidraft_npu.memory import peak_children_rss_bytes, peak_rss_bytes, size_text

    from ..forgetting import find_learned
    from ..state_folder import learned_targets
    from .inspect import model_bytes

    root = done.bundle.root
    learned = find_learned(root, learned_targets(root))
    if learned.files:
        echo(
            f"kept what the replaced bundle had learned: {learned}; `omnidraft-npu adapters forget "
            f"{shlex.quote(str(root))}` erases it",
            err=True,
        )
    manifest = done.bundle.manifest
    models = [manifest.drafter, *manifest.targets.values()]
    sizes = [(model.name, model_bytes(done.bundle, model)) for model in models]
    peaks = [peak for peak in (peak_rss_bytes(), peak_children_rss_bytes()) if peak is not None]
    peak = max(peaks, default=None)
    if as_json:
        document = {
            "schema_version": 1,
            "bundle": str(done.bundle.root),
            "models": [{"name": name, "size_bytes": size} for name, size in sizes],
            "stage_s": done.stage_s,
            "seconds": done.seconds,
            "peak_rss_bytes": peak,
        }
        echo_json(document)
        return
    parts = [f"{name} {size_text(size)}" for name, size in sizes]
    memory = f", peak memory {size_text(peak)}" if peak is not None else ""
    echo(
        f"{done.bundle.root}: {', '.join(parts)}; {done.seconds:.1f} s{memory}. "
        f'Next: omnidraft-npu run -b {shlex.quote(str(done.bundle.root))} "…"',
        err=True,
    )
