"""From a checkpoint to the quantised HTP graphs of a recipe, and what they lose."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.text.tokenizer import Tokenizer

from ..architecture import DecoderConfig
from ..graph_writer import GraphWriter
from ..htp.decoder_graph import WEIGHTS, HtpGraphOptions, build_htp_decoder
from ..recipes import Recipe
from ..tensor_file import TensorFile
from .comparison import Comparison, compare
from .encodings import Encoding, encode
from .nbits_graph import build_nbits_graph
from .qdq_graph import QdqGraph, constants_of
from .ranges import Ranges, collect_ranges
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

    graphs: dict[int, Path]
    """By length."""
    calibration: str = ""
    """Text the ranges and weights were calibrated on, and its shape."""
    comparison: Comparison | None = None
    """None for a recipe that quantises nothing."""
    is_accurate: bool | None = None
    """Whether the loss is within the recipe's bound."""


def quantize_htp_decoder(
    config: DecoderConfig,
    tensors: Tensors,
    tokenizer: Tokenizer,
    folder: Path,
    options: HtpGraphOptions,
    recipe: Recipe,
    *,
    calibration: Path | None = None,
    rounding: Rounding = "feedback",
    tell: Tell = lambda step, done, total: None,
) -> QuantizedGraphs:
    """Write ``length_<S>.onnx`` and ``weights.data`` of a recipe.

    Args:
        config: Shape of the model.
        tensors: Gives a tensor by its canonical name; each may be asked for several times.
        tokenizer: Of the model.
        folder: Made if absent. Float graphs lie in it while the work lasts.
        options: Lengths, context, LoRA, hidden states.
        recipe: What becomes integers.
        calibration: Prompts of the user's; None for the built-in ones.
        rounding: Of the weights.
        tell: Progress.

    Raises:
        ExportError: the folder cannot be written.
        PromptError: the calibration file cannot be used.
    """
    if recipe.weights is None:
        return QuantizedGraphs(graphs=build_htp_decoder(config, tensors, folder, options))
    longest = max(options.lengths)
    window = min(_WINDOW, options.context_length) // longest * longest
    text = calibration_text(
        calibration, tokenizer, context_length=options.context_length, window=window
    )
    scratch = folder / _SCRATCH
    try:
        source = build_htp_decoder(config, tensors, scratch, options)
        weights = IntegerWeights(scratch / "weights")
        quantize_weights(
            config,
            tensors,
            text.windows,
            recipe,
            weights,
            rounding=rounding,
            tell=lambda done, total: tell("weights", done, total),
        )
        encodings = {}
        if recipe.has_integer_activations:
            ranges = collect_ranges(
                source[longest],
                text.windows,
                sliding_window=config.sliding_window,
                tell=lambda done, total: tell("ranges", done, total),
            )
            encodings = find_encodings(source[longest], ranges, recipe)
        graphs = {length: options.path(folder, length) for length in source}
        write_graphs(source, graphs, encodings, weights, recipe)
        shutil.rmtree(scratch / "weights")
        comparison = compare(
            source[longest],
            graphs[longest],
            text.held_out,
            num_layers=config.num_layers,
            sliding_window=config.sliding_window,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return QuantizedGraphs(
        graphs=graphs,
        calibration=f"{text.source}: {text.num_prompts} prompts, {text.windows.size} tokens, "
        f"{longest} at a time beside {options.context_length} cached",
        comparison=comparison,
        is_accurate=comparison.loss <= recipe.max_loss,
    )


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
