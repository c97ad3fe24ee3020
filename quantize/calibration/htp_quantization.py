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
from .qdq_graph import QdqGraph, constants_of
from .ranges import collect_ranges
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
        encodings = _encodings(source[longest], text.windows, config, recipe, tell)
        graphs = {length: options.path(folder, length) for length in source}
        _write(source, graphs, encodings, weights)
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


def _encodings(
    path: Path,
    windows: npt.NDArray[np.int64],
    config: DecoderConfig,
    recipe: Recipe,
    tell: Tell,
) -> dict[str, Encoding]:
    """Of the values of a float graph, those of the graphs of other lengths included."""
    import onnx

    ranges = collect_ranges(
        path,
        windows,
        sliding_window=config.sliding_window,
        tell=lambda done, total: tell("ranges", done, total),
    )
    graph = onnx.load(path, load_external_data=False).graph
    constants = constants_of(graph, path.parent)
    limits = {}
    for table in {node.input[0] for node in graph.node if node.op_type == "Gather"}:
        values = constants(table)
        limits[table] = (float(values.min()), float(values.max()))
    return encode(graph, ranges, limits, recipe.kv_bits or 16)


def _write(
    source: dict[int, Path],
    graphs: dict[int, Path],
    encodings: dict[str, Encoding],
    weights: IntegerWeights,
) -> None:
    import onnx

    folder = next(iter(graphs.values())).parent
    try:
        with TensorFile(folder / WEIGHTS) as file:
            for length, path in source.items():
                graph = onnx.load(path, load_external_data=False).graph
                with GraphWriter(graphs[length], file, opset=_OPSET) as writer:
                    constants = constants_of(graph, path.parent)
                    QdqGraph(writer, graph, encodings, weights, constants).build()
    except BaseException:
        for path in graphs.values():
            path.unlink(missing_ok=True)
        raise
