"""An adapter's tensors against the inputs of a graph."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import BundleError

Tensors = Mapping[str, npt.NDArray[np.float32]]

_TAKE_HIDDEN = tuple(f".{part}_proj.A" for part in ("q", "k", "v", "gate", "up"))


def fit_lora(inputs: Mapping[str, tuple[int, ...]], tensors: Tensors | None) -> Tensors:
    """A tensor for every LoRA input; the ones left out, or all with None, are zero.

    Args:
        inputs: Shapes by graph input (`omnidraft_npu.lora.lora_name`).
        tensors: The adapter.

    Raises:
        BundleError: a tensor is not an input of the graph, or has another shape.
    """
    given = tensors or {}
    for name, tensor in given.items():
        if name not in inputs:
            raise BundleError(
                f"the adapter has {name!r}, the graph has no such input: use an adapter made "
                "for this model, or export it with LoRA inputs"
            )
        if tensor.shape != inputs[name]:
            raise BundleError(
                f"the adapter's {name} is {list(tensor.shape)}, the graph takes "
                f"{list(inputs[name])}: use an adapter for this model, of the rank of the export"
            )
    return {
        name: np.ascontiguousarray(given.get(name, np.zeros(shape, np.float32)), np.float32)
        for name, shape in inputs.items()
    }


def check_head(head: Tensors, inputs: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a head for another width of hidden states than what the first projections take.

    Args:
        head: Tensors of an acceptance head, or none.
        inputs: As for `fit_lora`.

    Raises:
        BundleError: it is for another width.
    """
    widths = {shape[0] for name, shape in inputs.items() if name.endswith(_TAKE_HIDDEN)}
    if head and widths and (found := len(head["head.in.weight"])) not in widths:
        raise BundleError(
            f"its acceptance head takes hidden states of {found}, the drafter gives {min(widths)}: "
            "it was made for another drafter"
        )
