"""`omnidraft-npu inspect`: what is in a bundle."""

from pathlib import Path

import click

from ..bundle import Bundle, open_bundle
from ..manifest import HtpEntry, ModelEntry, TrainingEntry
from ..memory import size_text
from ..printing import echo, echo_json
from .decoding_options import bundle_argument


@click.command(name="inspect")
@bundle_argument
@click.option("--verify", is_flag=True, help="Hash every file, however large.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show the models, graphs and files of BUNDLE, after checking them.

    BUNDLE is a folder, or what `run --target` was given, for the bundle that it made.

    \b
    Examples:
      omnidraft-npu inspect bundle
      omnidraft-npu inspect bundle --verify --json
    """
    opened = open_bundle(bundle, verify=verify)
    if as_json:
        echo_json({"schema_version": 1, **opened.manifest.to_json()})
        return
    _show(opened)


def _show(bundle: Bundle) -> None:
    from .tables import make_table, table_console

    manifest = bundle.manifest
    columns = ("role", "name", "architecture", "graph", "size", "context", "vocabulary", "ends at")
    table = make_table(columns, long=("name", "ends at"))
    models = [("drafter", manifest.drafter), *(("target", m) for m in manifest.targets.values())]
    for role, model in models:
        for flavour, graph in model.graphs.items():
            table.add_row(
                role,
                model.name,
                model.architecture,
                f"{flavour} {graph.precision}",
                size_text(model_bytes(bundle, model)),
                f"{model.context_length:,}",
                f"{model.vocab_size:,}",
                " ".join(map(str, model.eos_token_ids)),
            )
        if model.htp is not None:
            recipe, slots = f"htp {model.htp.precision}", f"{model.htp.context_length:,}"
            table.add_row("", "", "", recipe, "", slots, "", "")
    echo(f"{bundle.root} (format {manifest.format_version})")
    table_console().print(table)
    for _, model in models:
        if model.training is not None:
            echo(f"{model.name} learns: {_training_text(model.training)}")
        if model.htp is not None:
            echo(f"{model.name} on the NPU: {_htp_text(model.htp)}")
            calibration = model.htp.calibration or "nothing: its activations are floats"
            echo(f"  calibrated on {calibration}")
            echo(f"  quantisation: {_quality_text(model.htp)}")
    total = sum(entry.size for entry in manifest.files.values())
    echo(
        f"{len(manifest.files)} files, {size_text(total)}, written by "
        f"omnidraft-npu {manifest.tool_version}"
    )


def _training_text(training: TrainingEntry) -> str:
    """What an update changes and learns from, in one line."""
    error = training.gradient_error
    checked = "the loss alone" if error is None else f"torch, which they equal within {error:.1e}"
    return (
        f"LoRA of rank {training.lora_rank}, {training.batch} responses of at most "
        f"{training.length} pieces an update; gradients checked against {checked}"
    )


def _htp_text(htp: HtpEntry) -> str:
    """Lengths and chips, in one line."""
    first = htp.pieces()[0]
    parts = [f"{htp.precision} graphs of {', '.join(first.graphs)} tokens"]
    if htp.parts:
        layers = " and ".join(str(part.num_layers) for part in htp.parts)
        parts.append(f"in {len(htp.parts)} parts of {layers} layers")
    if first.compiled:
        by = f" by QNN {htp.qnn_version}" if htp.qnn_version else ""
        parts.append(f"compiled for {', '.join(first.compiled)}{by}")
        if not htp.loads_on_simulator:
            parts[-1] += ", not loadable on the simulator"
    return "; ".join(parts)


_ACCURACY = {
    True: "accurate, within the bounds of its recipe",
    False: "NOT accurate, outside the bounds of its recipe",
    None: "not measured",
}
_WORST_LAYER = "error_after_layer_"


def _quality_text(htp: HtpEntry) -> str:
    """What the recipe costs and whether that is within its bounds, in one line."""
    report, parts = htp.report, [_ACCURACY[htp.is_accurate]]
    if {"perplexity", "float_perplexity"} <= report.keys():
        rise = report["perplexity"] / report["float_perplexity"] - 1
        parts.append(
            f"perplexity {report['perplexity']:,.2f} where floats have "
            f"{report['float_perplexity']:,.2f} ({100 * rise:+.1f} %)"
        )
    if "top_1_agreement" in report:
        tokens = f" of {report['tokens']:,.0f} tokens" if "tokens" in report else ""
        parts.append(f"the same first choice after {100 * report['top_1_agreement']:.1f} %{tokens}")
    if "relative_error" in report:
        parts.append(f"relative error of the logits {report['relative_error']:.3f}")
    worst = [name for name in report if name.startswith(_WORST_LAYER)]
    if worst:
        layers = (f"{name.removeprefix(_WORST_LAYER)} ({report[name]:.3f})" for name in worst)
        parts.append(f"it grows most over layers {', '.join(layers)}")
    return "; ".join(parts)


def model_bytes(bundle: Bundle, model: ModelEntry) -> int:
    """Size of all files of a model: graphs, weights, tokenizer and configuration."""
    prefix = model.folder + "/"
    return sum(e.size for path, e in bundle.manifest.files.items() if path.startswith(prefix))
