"""From a checkpoint to the quantised HTP graphs of a recipe, and what they lose."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.text.tokenizer import Tokenizer

from ..architecture import DecoderConfig
from ..graph_writer import GraphWriter
from ..htp.decoder_graph import WEIGHTS, HtpGraphOptions, build_htp_decoder
from ..htp.prefill_graph import keep_cache_rows_only
from ..recipes import Recipe
from ..tensor_file import TensorFile
from .comparison import Comparison, ModelComparison
from .encodings import Encoding, encode
from .fp16_graph import write_fp16_graph
from .nbits_graph import build_nbits_graph
from .qdq_graph import QdqGraph, constants_of
from .ranges import Ranges, collect_ranges
from .static_graph import Array
from .texts import calibration_text
from .weights import IntegerWeights, Rounding, quantize_weights

Floats = npt.NDArray[np.float32]
Tensors = Callable[[str], Floats]
Tell = Callable[[str, int, int], None]
"""Told the step, the items done and their total."""

_OPSET = 23
_WINDOW = 512
"""Most tokens of a calibration window."""
_SCRATCH = "scratch"


@dataclass(frozen=True, kw_only=True)
class QuantizedGraphs:
    """The graphs of a model for the NPU, and what is known of them."""

    parts: tuple[dict[int, Path], ...]
    """By length, of each part."""
    calibration: str = ""
    """Text the ranges and weights were calibrated on, and its shape."""
    comparison: Comparison | None = None
    """What the recipe costs; of fp16, with every value rounded to it on the CPU."""
    faults: tuple[str, ...] = ()
    """The recipe's bounds that do not hold."""

    @property
    def graphs(self) -> dict[int, Path]:
        """Of a model in one part."""
        (graphs,) = self.parts
        return graphs

    @property
    def is_accurate(self) -> bool | None:
        """Whether the loss is within the recipe's bounds; None where it was not measured."""
        return None if self.comparison is None else not self.faults


def quantize_htp_decoder(
    config: DecoderConfig,
    tensors: Tensors,
    tokenizer: Tokenizer,
    folder: Path,
    options: HtpGraphOptions,
    recipe: Recipe,
    *,
    parts: Sequence[range] | None = None,
    calibration: Path | None = None,
    rounding: Rounding = "feedback",
    rounded: Path | None = None,
    tell: Tell = lambda step, done, total: None,
) -> QuantizedGraphs:
    """Write ``length_<S>.onnx`` and ``weights.data`` of a recipe, and compare with float.

    Args:
        config: Shape of the model.
        tensors: Gives a tensor by its canonical name; each may be asked for several times.
        tokenizer: Of the model.
        folder: Made if absent. Float graphs lie in it while the work lasts, one part at a time.
        options: Lengths, context, LoRA, hidden states; of the whole model.
        recipe: What becomes integers.
        parts: Runs of layers for a model that fits no context in one, each with a folder
            ``part_<i>`` of its own; None for one part.
        calibration: Prompts of the user's; None for the built-in ones.
        rounding: Of the weights.
        rounded: Folder for the rounded weights, which stay there if the work stops and are then
            taken over; None for one in `folder`, gone whatever happens.
        tell: Progress.

    Raises:
        ExportError: the folder cannot be written.
        PromptError: the calibration file cannot be used.
    """
    layers = [range(config.num_layers)] if parts is None else list(parts)
    places = [folder] if len(layers) == 1 else [folder / f"part_{i}" for i in range(len(layers))]
    pieces = [dataclasses.replace(options, layers=run) for run in layers]
    made: list[dict[int, Path]] = []
    longest = max(options.lengths)
    window = min(_WINDOW, options.context_length) // longest * longest
    text = calibration_text(
        calibration, tokenizer, context_length=options.context_length, window=window
    )
    comparison = ModelComparison(text.held_out, sliding_window=config.sliding_window)
    if recipe.weights is None:
        for i, (place, piece) in enumerate(zip(places, pieces, strict=True)):
            tell("graphs", i, len(places))
            graphs = build_htp_decoder(config, tensors, place, piece)
            _compare_fp16(comparison, graphs[longest], layers[i])
            made.append(_finish(graphs, options))
        tell("graphs", len(places), len(places))
        found = comparison.result()
        return QuantizedGraphs(
            parts=tuple(made), comparison=found, faults=tuple(found.faults(recipe))
        )
    scratch = folder / _SCRATCH
    weights = IntegerWeights(rounded or scratch / "weights")
    try:
        quantize_weights(
            config,
            tensors,
            text.windows,
            recipe,
            weights,
            rounding=rounding,
            tell=lambda done, total: tell("weights", done, total),
        )
        inputs: Array = text.windows
        for i, (place, piece) in enumerate(zip(places, pieces, strict=True)):
            tell("graphs", i, len(places))
            source = build_htp_decoder(config, tensors, scratch / "float", piece)
            encodings: dict[str, Encoding] = {}
            if recipe.has_integer_activations:
                encodings, inputs = _calibrate(source[longest], inputs, config, recipe, tell)
            place.mkdir(parents=True, exist_ok=True)
            graphs = {length: piece.path(place, length) for length in source}
            write_graphs(source, graphs, encodings, weights, recipe)
            comparison.add(source[longest], graphs[longest], layers[i])
            shutil.rmtree(scratch / "float")
            made.append(_finish(graphs, options))
        tell("graphs", len(places), len(places))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if rounded is not None:
        shutil.rmtree(rounded)
    found = comparison.result()
    return QuantizedGraphs(
        parts=tuple(made),
        calibration=f"{text.source}: {text.num_prompts} prompts, {text.windows.size} tokens, "
        f"{longest} at a time beside {options.context_length} cached",
        comparison=found,
        faults=tuple(found.faults(recipe)),
    )


def _compare_fp16(comparison: ModelComparison, path: Path, layers: range) -> None:
    """Add a float graph beside itself with every value rounded to fp16."""
    rounded = path.with_name("rounded.onnx")
    try:
        write_fp16_graph(path, rounded)
        comparison.add(path, rounded, layers)
    finally:
        rounded.unlink(missing_ok=True)


def _calibrate(
    path: Path, inputs: Array, config: DecoderConfig, recipe: Recipe, tell: Tell
) -> tuple[dict[str, Encoding], Array]:
    """Encodings of a part, and what the next part is to be calibrated on."""
    ranges, given = collect_ranges(
        path,
        inputs,
        sliding_window=config.sliding_window,
        tell=lambda done, total: tell("ranges", done, total),
    )
    return find_encodings(path, ranges, recipe), given


def _finish(graphs: dict[int, Path], options: HtpGraphOptions) -> dict[int, Path]:
    """The graphs as they are deployed, after the comparison, which reads all logits."""
    if options.prefill_length is not None:
        keep_cache_rows_only(graphs[options.prefill_length])
    return graphs


def find_encodings(path: Path, ranges: Ranges, recipe: Recipe) -> dict[str, Encoding]:
    """Of the values of the float graph at `path`, which hold for its other lengths too."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    constants = constants_of(graph, path.parent)
    limits = {}
    for table in {node.input[0] for node in graph.node if node.op_type == "Gather"}:
        values = constants(table)
        limits[table] = (float(values.min()), float(values.max()))
    return encode(
        graph,
        ranges,
        limits,
        kv_bits=recipe.kv_bits or 16,
        has_float_residual=recipe.has_float_residual,
        has_float_attention=recipe.has_float_attention,
    )


def write_graphs(
    source: dict[int, Path],
    graphs: dict[int, Path],
    encodings: dict[str, Encoding],
    weights: IntegerWeights,
    recipe: Recipe,
) -> None:
    """Write the quantised graphs and their common data file.

    Args:
        source: Float graphs by length.
        graphs: Where the quantised ones go, in one folder.
        encodings: see `find_encodings`; none for integer weights in a float graph.
        weights: Of the projections and the head.
        recipe: Of the graphs.
    """
    import onnx

    folder = next(iter(graphs.values())).parent
    try:
        with TensorFile(folder / WEIGHTS) as file:
            for length, path in source.items():
                graph = onnx.load(path, load_external_data=False).graph
                with GraphWriter(graphs[length], file, opset=_OPSET) as writer:
                    constants = constants_of(graph, path.parent)
                    if encodings:
                        QdqGraph(
                            writer,
                            graph,
                            encodings,
                            weights,
                            constants,
                            has_rotary_operator=recipe.has_rotary_operator,
                        ).build()
                    else:
                        build_nbits_graph(writer, graph, weights, constants)
    except BaseException:
        for path in graphs.values():
            path.unlink(missing_ok=True)
        raise
