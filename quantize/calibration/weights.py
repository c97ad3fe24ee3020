"""Every weight of a decoder in the recipe's bits, layer after layer, from checkpoint to disk.

The inputs of a layer are those of the layers before it as they were rounded, so that each
layer makes good some of the error it is given. Memory holds one layer.
"""

import zipfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ExportError
from omnidraft_npu.files import atomic_path

from ..architecture import DecoderConfig
from ..error_feedback import inverse_root, round_with_feedback
from ..input_sizes import RandomTokens
from ..recipes import Recipe
from ..scale_search import (
    Floats,
    IntegerWeight,
    Scales,
    WeightFormat,
    nearest_scales,
    round_levels,
    search_scales,
)

Tensors = Callable[[str], Floats]
Rounding = Literal["nearest", "search", "feedback"]
"""Round to nearest with scales that clip nothing; with searched scales; and the same with
each error made good by the weights not yet rounded."""

_PARTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
HEAD = "lm_head"
"""Name of the head's integer weight, also where the head is tied to the embedding."""


class IntegerWeights:
    """Integer weights by canonical name, each a file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, weight: IntegerWeight) -> None:
        """Keep a weight."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "bits": np.array(weight.bits),
            "levels": weight.levels,
            "channel": weight.scales.channel,
        }
        if weight.scales.block is not None:
            arrays["block"] = weight.scales.block
        with atomic_path(self._path(name)) as path, path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    def get(self, name: str) -> IntegerWeight | None:
        """The weight of a name; None if it stays as it is."""
        path = self._path(name)
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                scales = Scales(channel=arrays["channel"], block=arrays.get("block"))
                bits: Literal[4, 8] = 4 if arrays["bits"] == 4 else 8
                return IntegerWeight(levels=arrays["levels"], scales=scales, bits=bits)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ExportError(
                f"{path} is damaged: delete it and run the same command again"
            ) from error

    def over(self, tensors: Tensors) -> Tensors:
        """`tensors` with the weights that are kept here as their levels stand for them."""

        def read(name: str) -> Floats:
            weight = self.get(name)
            return tensors(name) if weight is None else weight.dequantize()

        return read

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"


def quantize_weights(
    config: DecoderConfig,
    tensors: Tensors,
    windows: npt.NDArray[np.int64],
    recipe: Recipe,
    weights: IntegerWeights,
    *,
    rounding: Rounding = "feedback",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Round the projections and the head of a model.

    Args:
        config: Shape of the model.
        tensors: Gives a tensor by its canonical name.
        windows: ``[n, length]`` calibration text.
        recipe: Formats; nothing is done where it has none.
        weights: Where the results go; those that lie there already are taken over.
        rounding: How.
        tell: Told the layers done and their total.
    """
    if recipe.weights is None:
        return
    embedding = tensors("embed_tokens")
    run = RandomTokens(config, embedding, windows)
    del embedding
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        names = [name for name in config.tensor_shapes() if name.startswith(prefix)]
        layer = {name.removeprefix(prefix): tensors(name) for name in names}

        def revise(
            group: str, x: Floats, layer: Mapping[str, Floats], prefix: str = prefix
        ) -> Mapping[str, Floats]:
            revised = dict(layer)
            inputs = _Inputs(x)
            for part in _PARTS[group]:
                weight = weights.get(prefix + part)
                form = recipe.format_of(part)
                if weight is None and form is not None:
                    weight = _round(layer[part], form, inputs, rounding)
                    weights.put(prefix + part, weight)
                if weight is not None:
                    revised[part] = weight.dequantize()
            return revised

        run.revise_layer(i, layer, revise)
        tell(i + 1, config.num_layers)
    if recipe.head is not None and weights.get(HEAD) is None:
        head = tensors("embed_tokens" if config.has_tied_head else HEAD)
        inputs = _Inputs(run.head_input(tensors("final_norm")))
        kind: Rounding = "nearest" if rounding == "nearest" else "search"
        weights.put(HEAD, _round(head, recipe.head, inputs, kind))


class _Inputs:
    """What rounding asks of the inputs of a group of weights, found when first asked for."""

    def __init__(self, x: Floats) -> None:
        """Args: x is ``[..., in]``."""
        self._rows = x.reshape(-1, x.shape[-1])

    @cached_property
    def moments(self) -> Floats:
        """``[in, in]`` second moments."""
        return (self._rows.T @ self._rows) / np.float32(len(self._rows))

    @cached_property
    def root(self) -> Floats:
        """``[in, in]`` see `inverse_root`."""
        return inverse_root(self.moments)


def _round(
    weight: Floats, form: WeightFormat, inputs: _Inputs, rounding: Rounding
) -> IntegerWeight:
    if rounding == "nearest":
        return round_levels(weight, nearest_scales(weight, form), form)
    scales = search_scales(weight, form, inputs.moments)
    if rounding == "search":
        return round_levels(weight, scales, form)
    return round_with_feedback(weight, scales, form, inputs.root)
