"""The static graphs of a model that goes into several contexts, a folder for each part."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.text.tokenizer import Tokenizer

from .architecture import DecoderConfig
from .calibration.htp_quantization import write_graphs
from .calibration.texts import calibration_text
from .calibration.weights import IntegerWeights, quantize_weights
from .htp.decoder_graph import HtpGraphOptions, build_htp_decoder
from .recipes import Recipe

Tensors = Callable[[str], npt.NDArray[np.float32]]

_WINDOW = 512
_SCRATCH = "scratch"


def check_parts(name: str, recipe: Recipe, parts: Sequence[range]) -> None:
    """Pass if the recipe can be made part by part.

    Integer activations need the ranges of the whole model in floating point, which is what
    does not fit in memory either.

    Raises:
        ConfigError: it cannot; says which can.
    """
    if len(parts) > 1 and recipe.has_integer_activations:
        raise ConfigError(
            f"{name} needs {len(parts)} contexts in {recipe.name}, and parts are made in "
            "w4a16-nbits or fp16 only: use --htp-precision w4a16-nbits"
        )


def build_parts(
    config: DecoderConfig,
    tensors: Tensors,
    tokenizer: Tokenizer,
    folder: Path,
    options: HtpGraphOptions,
    recipe: Recipe,
    parts: Sequence[range],
    *,
    calibration: Path | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[int, Path]]:
    """Write ``part_<i>/length_<S>.onnx`` and ``weights.data``; one part is in memory at most.

    Args:
        config, tensors, tokenizer: The model.
        folder: Exists.
        options: Of the whole model.
        recipe: One that `check_parts` passes.
        parts: Runs of layers.
        calibration: Prompts of the user's to round the weights by; None for the built-in ones.
        tell: Told the parts done and their total.

    Returns:
        Of each part the graphs by length.
    """
    scratch = folder / _SCRATCH
    weights = None
    made = []
    try:
        if recipe.weights is not None:
            weights = IntegerWeights(scratch / "weights")
            window = min(_WINDOW, options.context_length)
            text = calibration_text(
                calibration, tokenizer, context_length=options.context_length, window=window
            )
            quantize_weights(config, tensors, text.windows, recipe, weights)
        for i, layers in enumerate(parts):
            tell(i, len(parts))
            own, place = dataclasses.replace(options, layers=layers), folder / f"part_{i}"
            if weights is None:
                made.append(build_htp_decoder(config, tensors, place, own))
                continue
            place.mkdir()
            source = build_htp_decoder(config, tensors, scratch / "float", own)
            graphs = {length: own.path(place, length) for length in source}
            write_graphs(source, graphs, {}, weights, recipe)
            shutil.rmtree(scratch / "float")
            made.append(graphs)
        tell(len(parts), len(parts))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return made
