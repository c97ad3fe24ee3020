"""The NPU flavour of one model of a bundle: its static graphs, then a binary for each chip."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from omnidraft_npu.chips.table import Chip
from omnidraft_npu.documents import convert_document
from omnidraft_npu.manifest import HtpEntry, HtpPart
from omnidraft_npu.progress import Report
from omnidraft_npu.qnn.binary import installed_qnn_version
from omnidraft_npu.text.tokenizer import Tokenizer

from .calibration.htp_quantization import QuantizedGraphs, quantize_htp_decoder
from .compile import compile_graphs
from .htp_model import HtpModel, estimate_htp
from .recipes import Recipe
from .stages import Facts, Stages, Tell

logger = logging.getLogger(__name__)


def build_htp(
    model: HtpModel,
    root: Path,
    folder: str,
    rounded: Path,
    tell: Callable[[str, int, int], None],
) -> Facts:
    """Write the static graphs of a model.

    Args:
        model: The model.
        root: The stage's folder; exists and is empty.
        folder: Its path in the bundle.
        rounded: Folder for rounded weights, which outlive an interruption.
        tell: Told of every step.

    Returns:
        The model's `HtpEntry` as JSON, without binaries.
    """
    recipe, parts = model.recipe, estimate_htp(model).parts
    config, options = model.checkpoint.config, model.options
    made = quantize_htp_decoder(
        config,
        model.checkpoint.tensor,
        Tokenizer.from_documents(model.tokenizer.tokenizer_json, model.tokenizer.tokenizer_config),
        root,
        options,
        recipe,
        parts=parts,
        calibration=model.request.options.calibration,
        rounded=rounded,
        tell=tell,
    )
    _tell_loss(model.name, recipe, made)
    graphs = [_relative(own, root, folder) for own in made.parts]
    pieces = tuple(
        HtpPart(num_layers=len(layers), graphs=own)
        for layers, own in zip(parts, graphs, strict=True)
    )
    is_whole = len(parts) == 1
    entry = HtpEntry(
        precision=recipe.name,
        context_length=options.context_length,
        graphs=graphs[0] if is_whole else {},
        parts=() if is_whole else pieces,
        sliding_window=config.sliding_window,
        lora_rank=options.lora_rank,
        has_hidden_states=options.has_hidden_states,
        calibration=made.calibration,
        report={} if made.comparison is None else made.comparison.to_report(),
        is_accurate=made.is_accurate,
    )
    return dataclasses.asdict(entry)


def _tell_loss(name: str, recipe: Recipe, made: QuantizedGraphs) -> None:
    if made.comparison is not None:
        logger.info("%s in %s: %s", name, recipe.name, made.comparison)
    if made.faults:
        logger.warning(
            "%s loses more in %s than is good (%s): compare it, or use another --htp-precision",
            name,
            recipe.name,
            "; ".join(made.faults),
        )


def _relative(graphs: Mapping[int, Path], root: Path, folder: str) -> dict[str, str]:
    """Paths in the bundle by length."""
    return {
        str(length): f"{folder}/{path.relative_to(root).as_posix()}"
        for length, path in sorted(graphs.items())
    }


def export_htp(model: HtpModel, folder: str, stages: Stages, progress: Report) -> HtpEntry:
    """The NPU flavour of a model: its graphs in one stage, binaries for every chip in others.

    Args:
        model: The model.
        folder: Of the model in the bundle.
        stages: Where the bundle is made.
        progress: Told of every step.

    Raises:
        ExportError: QNN cannot compile a graph.
    """
    place = f"{folder}/htp"
    name, rounded = f"{model.name} for the NPU", stages.scratch(f"{place}/rounded")

    def tell(step: str, done: int, total: int) -> None:
        progress(f"{name}, {step}", done, total)

    facts = stages.run(
        name, place, lambda root, _: build_htp(model, root, place, rounded, tell), progress
    )
    entry = convert_document(
        facts, HtpEntry, f"a finished part of {stages.root}", advice="remove that", is_closed=True
    )
    pieces = [
        _compile_piece(
            piece, f"{place}/part_{i}" if entry.parts else place, model, stages, progress
        )
        for i, piece in enumerate(entry.pieces())
    ]
    options = model.request.options
    entry = dataclasses.replace(
        entry,
        qnn_version=installed_qnn_version(),
        loads_on_simulator=not (options.share_weights or options.one_binary),
    )
    if entry.parts:
        return dataclasses.replace(entry, parts=tuple(pieces))
    return dataclasses.replace(entry, compiled=pieces[0].compiled)


def _compile_piece(
    piece: HtpPart, place: str, model: HtpModel, stages: Stages, progress: Report
) -> HtpPart:
    """A part, or the whole model, with binaries for every chip, each in a stage of its own."""
    graphs = {int(length): stages.root / path for length, path in piece.graphs.items()}
    request, options = model.request, model.request.options
    groups = [request.chips] if options.one_binary else [(chip,) for chip in request.chips]
    compiled: dict[str, dict[str, str]] = {}
    for chips in groups:
        own = f"{place}/{'+'.join(chip.key for chip in chips)}"

        def work(root: Path, tell: Tell, chips: tuple[Chip, ...] = chips) -> Facts:
            made = compile_graphs(
                graphs, root, chips, share_weights=options.share_weights, tell=tell
            )
            return {str(length): path.name for length, path in made.items()}

        name = f"{model.name} for {', '.join(chip.key for chip in chips)}"
        part = place.rpartition("/htp")[2].replace("/part_", ", part ")
        names = stages.run(name + part, own, work, progress)
        paths = {length: f"{own}/{file}" for length, file in names.items()}
        compiled |= {chip.key: paths for chip in chips}
    return dataclasses.replace(piece, compiled=compiled)
