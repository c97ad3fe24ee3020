"""The decoder graph of the HTP flavour: one static graph a length, one file of weights.

For S tokens and a cache of C slots, all of batch 1:

===============================  ==========================  ================================
`input_ids`                      int32 ``[1, S]``            tokens to append
`position_ids`                   int32 ``[1, S]``            under C; padding: C + longest S
`attention_mask`                 ``[1, 1, S, C + S]``        added to scores: 0 seen, -100 not
`sliding_mask`                   ``[1, 1, S, C + S]``        where layers have a window under C
`past_key_values.{i}.key|value`  ``[1, kv_heads, C, dim]``   the cache, kept by the host
`lora.layers.{i}.{module}.A|B`   ``[in, rank]``, ``[rank, out]``  where a rank is declared
`logits`                         ``[1, S, num_logits]``
`new.{i}.key|value`              ``[1, kv_heads, S, dim]``   rows for the host's cache
`hidden_states`                  ``[1, S, hidden]``          where asked; after the final norm
===============================  ==========================  ================================

A part of the layers takes `layers.{i}.residual` ``[1, S, hidden]`` of the last layer before it
in place of `input_ids`, and gives that of its own last layer in place of `logits` and
`hidden_states`; numbers of layers are those of the whole.

A graph for prefilling only gives no logits and no hidden states (`prefill_graph`).

The host copies the rows of accepted tokens into any slots it likes: order and place in the
cache do not matter, since masks and positions are inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lora import MODULES

from ..architecture import DecoderConfig
from ..graph_writer import GraphWriter
from ..lora_branch import check_lora
from ..tensor_file import TensorFile
from .decoder_nodes import HtpDecoderNodes

Floats = npt.NDArray[np.float32]
Tensors = Callable[[str], Floats]

WEIGHTS = "weights.data"

_OPSET = 23


@dataclass(frozen=True, kw_only=True)
class HtpGraphOptions:
    """What the HTP graphs of a model can do."""

    lengths: tuple[int, ...] = (1, 8, 128)
    """Tokens a pass takes, a graph for each: to draft, to verify, to prefill."""
    context_length: int
    """Slots of the cache."""
    lora_rank: int = 0
    """Rank of the LoRA inputs; 0 leaves them out."""
    lora_modules: tuple[str, ...] = MODULES
    """Projections with LoRA inputs, where there is a rank."""
    has_hidden_states: bool = False
    """Whether the graphs also give `hidden_states`."""
    prefill_length: int | None = None
    """Length whose graph is for filling the cache only, without logits and hidden states."""
    layers: range | None = None
    """Part of the layers, for a model that fits no context in one; None for all of them."""

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ConfigError(
                f"context_length is {self.context_length}, must be at least 1: "
                "use --context-length 128 or more"
            )
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise ConfigError(f"lengths is {self.lengths}, must be one or more different numbers")
        for length in self.lengths:
            if not 1 <= length <= self.context_length:
                raise ConfigError(
                    f"lengths has {length}, must lie between 1 and the {self.context_length} "
                    "tokens of the context: choose a longer context or a shorter length"
                )
        if self.prefill_length not in (None, *self.lengths) or self.lengths == (
            self.prefill_length,
        ):
            raise ConfigError(
                f"prefill_length is {self.prefill_length}, must be one of several lengths: "
                "leave it out"
            )
        check_lora(self.lora_rank, self.lora_modules)

    def path(self, folder: Path, length: int) -> Path:
        """Where in `folder` the graph of a length lies."""
        return folder / f"length_{length}.onnx"


def build_htp_decoder(
    config: DecoderConfig,
    tensors: Tensors,
    folder: Path,
    options: HtpGraphOptions,
    tell: Callable[[str], None] | None = None,
) -> dict[int, Path]:
    """Write ``length_<S>.onnx`` for every length and one ``weights.data`` for all of them.

    Args:
        config: Shape and variant of the model.
        tensors: Gives a tensor by its canonical name; each is asked for once.
        folder: Made if absent. Nothing of it is left if the build fails.
        options: Lengths, context, LoRA, hidden states.
        tell: Told the name of each tensor that is read.

    Returns:
        Path of the graph by length.

    Raises:
        ExportError: the folder cannot be written.
        ValueError: `options.layers` is no run of the model's layers.
    """
    layers = range(config.num_layers) if options.layers is None else options.layers
    if not 0 <= layers.start < layers.stop <= config.num_layers or layers.step != 1:
        raise ValueError(f"{layers} is no run of the {config.num_layers} layers")

    def read(name: str) -> Floats:
        if tell is not None:
            tell(name)
        return tensors(name)

    paths = {length: options.path(folder, length) for length in options.lengths}
    try:
        with TensorFile(folder / WEIGHTS) as weights:
            for length, path in paths.items():
                with GraphWriter(path, weights, opset=_OPSET) as graph:
                    HtpDecoderNodes(
                        config,
                        read,
                        graph,
                        layers=layers,
                        length=length,
                        context_length=options.context_length,
                        num_positions=options.context_length + max(options.lengths),
                        lora_rank=options.lora_rank,
                        lora_modules=options.lora_modules,
                        has_hidden_states=options.has_hidden_states,
                    ).build()
    except BaseException:
        for path in paths.values():
            path.unlink(missing_ok=True)
        raise
    return paths
