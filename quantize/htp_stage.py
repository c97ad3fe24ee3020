"""The NPU flavour of one model of a bundle: its static graphs, then a binary for each chip."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

from omnidraft_npu.chips.table import Chip
from omnidraft_npu.manifest import HtpEntry, HtpPart, read_record
from omnidraft_npu.progress import Report
from omnidraft_npu.qnn.binary import installed_qnn_version
from omnidraft_npu.text.tokenizer import Tokenizer

from .calibration.htp_quantization import QuantizedGraphs, quantize_htp_decoder
from .calibration.texts import calibration_text
from .checkpoints.checkpoint import Checkpoint, TokenizerFiles
from .compile import compile_graphs
from .htp.decoder_graph import HtpGraphOptions
from .htp_parts import build_parts, check_parts
from .htp_request import HtpRequest
from .preflight import HtpEstimate, check_memory, estimate, size_text
from .recipes import Recipe
from .stages import Facts, Stages, Tell

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HtpModel:
    """A model that is to have an NPU flavour, and what its graphs can do."""

    name: str
    request: HtpRequest
    checkpoint: Checkpoint
    tokenizer: TokenizerFiles
    lora_rank: int
    has_hidden_states: bool

    @property
    def options(self) -> HtpGraphOptions:
        """Lengths, context and inputs of the graphs."""
        config = self.checkpoint.config
        context_length = min(self.request.context_length, config.context_length)
        return HtpGraphOptions(
            lengths=self.request.lengths(context_length, config.num_heads // config.num_kv_heads),
            context_length=context_length,
            lora_rank=self.lora_rank,
            has_hidden_states=self.has_hidden_states,
        )


def check_htp(model: HtpModel, available_ram: int | None) -> HtpEstimate:
    """What can be known to fail before anything is made.

    Returns:
        What the model takes.

    Raises:
        ConfigError, ExportError: memory here, or that of a chip, does not suffice.
        PromptError: the calibration file cannot be used.
    """
    request, options = model.request, model.options
    if request.recipe.weights is not None:
        tokenizer = Tokenizer.from_documents(
            model.tokenizer.tokenizer_json, model.tokenizer.tokenizer_config
        )
        calibration_text(
            request.options.calibration,
            tokenizer,
            context_length=options.context_length,
            window=max(options.lengths),
        )
    found = _estimate(model)
    check_parts(model.name, request.recipe, found.parts)
    check_memory(model.name, found, request.options.max_ram_bytes or available_ram)
    if len(found.parts) > 1:
        logger.info(
            "%s has %s of weights and cache, more than a context of the NPU holds: it goes into "
            "%d parts",
            model.name,
            size_text(found.weight_bytes + found.kv_bytes),
            len(found.parts),
        )
    return found


def _estimate(model: HtpModel) -> HtpEstimate:
    request, options = model.request, model.options
    return estimate(
        model.name,
        model.checkpoint.config,
        request.recipe,
        context_length=options.context_length,
        chips=request.chips,
        num_binaries=(1 if request.options.share_weights else len(options.lengths))
        * (1 if request.options.one_binary else len(request.chips)),
    )


def build_htp(model: HtpModel, root: Path, folder: str, tell: Tell) -> Facts:
    """Write the static graphs of a model.

    Args:
        model: The model.
        root: The stage's folder; exists and is empty.
        folder: Its path in the bundle.
        tell: Told of every step.

    Returns:
        The model's `HtpEntry` as JSON, without binaries.
    """
    recipe, parts = model.request.recipe, _estimate(model).parts
    config, options = model.checkpoint.config, model.options
    tokenizer = Tokenizer.from_documents(
        model.tokenizer.tokenizer_json, model.tokenizer.tokenizer_config
    )
    source = (config, model.checkpoint.tensor, tokenizer, root, options, recipe)
    calibration = model.request.options.calibration
    entry = HtpEntry(
        precision=recipe.name,
        context_length=options.context_length,
        sliding_window=config.sliding_window,
        lora_rank=options.lora_rank,
        has_hidden_states=options.has_hidden_states,
    )
    if len(parts) > 1:
        graphs = build_parts(*source, parts, calibration=calibration, tell=tell)
        pieces = tuple(
            HtpPart(num_layers=len(layers), graphs=_relative(own, root, folder))
            for layers, own in zip(parts, graphs, strict=True)
        )
        return dataclasses.asdict(dataclasses.replace(entry, parts=pieces))
    made = quantize_htp_decoder(
        *source, calibration=calibration, tell=lambda step, done, total: tell(done, total)
    )
    _warn_of_loss(model.name, recipe, made)
    entry = dataclasses.replace(
        entry,
        graphs=_relative(made.graphs, root, folder),
        calibration=made.calibration,
        report={} if made.comparison is None else made.comparison.to_report(),
        is_accurate=made.is_accurate,
    )
    return dataclasses.asdict(entry)


def _warn_of_loss(name: str, recipe: Recipe, made: QuantizedGraphs) -> None:
    if made.is_accurate is False and made.comparison is not None:
        logger.warning(
            "%s loses %.1f %% of perplexity in %s, more than the %.0f %% that are good: compare "
            "it, or use another --htp-precision",
            name,
            100 * made.comparison.loss,
            recipe.name,
            100 * recipe.max_loss,
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
    facts = stages.run(
        f"{model.name} for the NPU",
        place,
        lambda root, tell: build_htp(model, root, place, tell),
        progress,
    )
    entry: HtpEntry = read_record(HtpEntry, facts, "htp")
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
