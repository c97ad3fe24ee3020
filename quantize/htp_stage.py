"""The NPU flavour of one model of a bundle: its static graphs, then a binary for each chip."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from omnidraft_npu.chips.table import Chip
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.manifest import HtpEntry, HtpPart, read_record
from omnidraft_npu.progress import Report
from omnidraft_npu.qnn.binary import installed_qnn_version
from omnidraft_npu.text.tokenizer import Tokenizer

from .calibration.htp_quantization import QuantizedGraphs, quantize_htp_decoder
from .calibration.texts import calibration_text
from .checkpoints.checkpoint import Checkpoint, TokenizerFiles
from .compile import compile_graphs
from .htp.decoder_graph import HtpGraphOptions
from .htp_request import DEFAULT_CONTEXT_LENGTH, HtpRequest
from .preflight import HtpEstimate, check_memory, estimate, size_text
from .recipes import Recipe
from .stages import Facts, Stages, Tell

logger = logging.getLogger(__name__)

_FEW_PROMPTS, _FEW_TOKENS = 8, 1000
"""Calibration on less is not trusted without a word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HtpModel:
    """A model that is to have an NPU flavour, and what its graphs can do."""

    name: str
    request: HtpRequest
    checkpoint: Checkpoint
    tokenizer: TokenizerFiles
    max_context_length: int
    """Most tokens of a conversation, on any device."""
    lora_rank: int
    has_hidden_states: bool

    @property
    def options(self) -> HtpGraphOptions:
        """Lengths, context and inputs of the graphs."""
        config, wanted = self.checkpoint.config, self.request.options
        context_length = min(
            wanted.context_length or DEFAULT_CONTEXT_LENGTH,
            self.max_context_length,
            config.context_length,
        )
        lengths = self.request.lengths(context_length, config.num_heads // config.num_kv_heads)
        has_prefill = wanted.verify_length in lengths[:-1]
        return HtpGraphOptions(
            lengths=lengths,
            context_length=context_length,
            prefill_length=lengths[-1] if has_prefill else None,
            lora_rank=self.lora_rank,
            has_hidden_states=self.has_hidden_states,
        )


def check_htp(model: HtpModel, available_ram: int | None) -> HtpEstimate:
    """What can be known to fail before anything is made; what may disappoint is logged.

    Returns:
        What the model takes.

    Raises:
        ConfigError, ExportError: memory here, or that of a chip, does not suffice; options that
            a chip or the model cannot have.
        PromptError: the calibration file cannot be used.
    """
    request, options = model.request, model.options
    _check_options(model)
    if request.recipe.weights is not None:
        tokenizer = Tokenizer.from_documents(
            model.tokenizer.tokenizer_json, model.tokenizer.tokenizer_config
        )
        text = calibration_text(
            request.options.calibration,
            tokenizer,
            context_length=options.context_length,
            window=max(options.lengths),
        )
        if text.num_prompts < _FEW_PROMPTS or text.num_tokens < _FEW_TOKENS:
            logger.warning(
                "%s is calibrated on %d prompts of %d tokens in all, and other text may go beyond "
                "their range: give %d prompts and %d tokens or more, or leave out --calibration",
                model.name,
                text.num_prompts,
                text.num_tokens,
                _FEW_PROMPTS,
                _FEW_TOKENS,
            )
    found = _estimate(model)
    check_memory(model.name, found, request.options.max_ram_bytes or available_ram)
    if len(found.parts) > 1:
        logger.info(
            "%s has %s of weights and cache and goes into %d parts, each a context of its own on "
            "the NPU",
            model.name,
            size_text(found.weight_bytes + found.kv_bytes),
            len(found.parts),
        )
        if not request.options.share_weights:
            logger.warning(
                "the graphs of %s for %s tokens each hold the weights, %s in all: --share-weights "
                "keeps them once, in binaries that only a device loads",
                model.name,
                ", ".join(map(str, options.lengths)),
                size_text(found.weight_bytes * len(options.lengths)),
            )
    return found


def _check_options(model: HtpModel) -> None:
    options, recipe = model.request.options, model.request.recipe
    wanted, limit = options.context_length, model.checkpoint.config.context_length
    if wanted is not None and wanted > model.max_context_length:
        raise ConfigError(
            f"--htp-context-length {wanted} is more than --context-length "
            f"{model.max_context_length}, the most that a conversation holds: give "
            f"{model.max_context_length} or less, or a larger --context-length"
        )
    if wanted is not None and wanted > limit:
        logger.warning(
            "%s is for %d tokens at most: its cache on the NPU has %d slots, not %d",
            model.name,
            limit,
            limit,
            wanted,
        )
    without = [chip for chip in model.request.chips if not chip.fp16]
    if model.lora_rank and without:
        raise ConfigError(
            f"adapters of {model.name} are computed in fp16 on the NPU, which no source claims for "
            f"{without[0].name}: leave out --soc {without[0].key}, or use --lora-rank 0"
        )
    if recipe.kv_bits == 16:
        logger.warning(
            "%s gets a cache of 16 bits, twice the memory of 8; as far as QNN's simulator shows, "
            "the NPU multiplies by no more than 8 of them: compare with --kv-bits 8",
            model.name,
        )


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
        max_ram_bytes=request.options.max_ram_bytes,
    )


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
    recipe, parts = model.request.recipe, _estimate(model).parts
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
