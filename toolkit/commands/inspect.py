"""`omnidraft-npu inspect`: what is in a bundle."""

import json
from pathlib import Path

import click

from ..bundle import Bundle, open_bundle
from ..manifest import HtpEntry, ModelEntry


@click.command(name="inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Hash every file, however large.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show the models, graphs and files of BUNDLE, after checking them.

    \b
    Examples:
      omnidraft-npu inspect bundle
      omnidraft-npu inspect bundle --verify --json
    """
    opened = open_bundle(bundle, verify=verify)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **opened.manifest.to_json()}, indent=2))
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
    click.echo(f"{bundle.root} (format {manifest.format_version})")
    table_console().print(table)
    for _, model in models:
        if model.htp is not None:
            click.echo(f"{model.name} on the NPU: {_htp_text(model.htp)}")
    total = sum(entry.size for entry in manifest.files.values())
    click.echo(
        f"{len(manifest.files)} files, {size_text(total)}, written by "
        f"omnidraft-npu {manifest.tool_version}"
    )


def _htp_text(htp: HtpEntry) -> str:
    """Lengths, chips and what the recipe costs, in one line."""
    first = htp.pieces()[0]
    parts = [f"{htp.precision} graphs of {', '.join(first.graphs)} tokens"]
    if htp.parts:
        layers = " and ".join(str(part.num_layers) for part in htp.parts)
        parts.append(f"in {len(htp.parts)} parts of {layers} layers")
    if first.compiled:
        parts.append(f"compiled for {', '.join(first.compiled)} by QNN {htp.qnn_version}")
        if not htp.loads_on_simulator:
            parts[-1] += ", not loadable on the simulator"
    if htp.calibration:
        parts.append(f"calibrated on {htp.calibration}")
    parts += [
        f"{name.replace('_', ' ')} {htp.report[name]:.4g}"
        for name in ("relative_error", "top_1_agreement", "float_perplexity", "perplexity")
        if name in htp.report
    ]
    if htp.is_accurate is False:
        parts.append("loses more than its recipe should")
    return "; ".join(parts)


def model_bytes(bundle: Bundle, model: ModelEntry) -> int:
    """Size of all files of a model: graphs, weights, tokenizer and configuration."""
    prefix = model.folder + "/"
    return sum(e.size for path, e in bundle.manifest.files.items() if path.startswith(prefix))


def size_text(num_bytes: int) -> str:
    """A size for people, in MB of 10^6 bytes."""
    return f"{num_bytes / 1e6:,.1f} MB"
