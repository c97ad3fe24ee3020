"""The training step of a drafter as one ONNX graph: the device has no torch.

===================  ============================  ============================================
`pieces`             int64 ``[batch, length]``     the text in the drafter's pieces
`law_ids`            int64 ``[batch, length, t]``  the law of the piece after each: its pieces
`law_probs`          ``[batch, length, t]``        and their probabilities
`forward_weight`     ``[batch, length]``           what each position counts in the forward
`reverse_weight`     ``[batch, length]``           in the reverse divergence
`overlap_weight`     ``[batch, length]``           and in what of the law the drafter lacks
`head_weight`        ``[batch, length]``           what it counts for the acceptance head
`joint`              scalar                        1: the head moves the adapter too; 0: not
`lora.layers.…`      as the drafter's graphs       the adapter
`head.…`             `acceptance_head`             the acceptance head
`loss`               scalar                        `reference.weighted_loss`
`head_loss`          scalar                        `reference.acceptance_loss`
`grad.lora.…`        as the adapter                of ``loss + joint * head_loss``
`grad.head.…`        as the head                   of `head_loss`
===================  ============================  ============================================

Which loss is learned is a matter of weights. `trie` gives every position with a law the same
forward (or reverse) weight, `overlap` the same weight of its own. `paper`, OmniDraft's, gives
positions whose piece is a whole token 1 in the reverse divergence, and the pieces of accepted
n-grams, each with a law that is that piece alone, 0.2 in the forward one, which is its negative
log-likelihood then.

The graph lies beside the drafter's CPU graph and shares its data file; it is written node by
node, so that no export needs torch. `parity` compares it with torch's own gradients.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.acceptance_head import head_shapes
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lora import MODULES, lora_name

from ..architecture import DecoderConfig
from ..graph_writer import GraphWriter
from ..tensor_file import TensorFile
from .decoder_nodes import TrainedDecoder
from .loss_nodes import Laws, head_loss, law_loss
from .operators import Operators
from .stored_weights import StoredWeights

Arrays = dict[str, npt.NDArray[Any]]

FILE_NAME = "lora_step.onnx"

_OPSET = 21
_CHUNK_BYTES = 16 * 2**20
"""Of logits that are held at once."""


@dataclass(frozen=True, kw_only=True)
class TrainingGraphOptions:
    """Shapes of a training graph; they are fixed."""

    lora_rank: int
    lora_modules: tuple[str, ...] = MODULES
    batch: int = 8
    """Responses an update."""
    length: int = 256
    """Pieces of a response and what led to it; longer ones are cut."""
    num_top: int = 32
    """Pieces that a law names."""

    def __post_init__(self) -> None:
        for name in ("lora_rank", "batch", "num_top"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.length < 2:
            raise ConfigError(f"length is {self.length}, must be at least 2")


def build_training_graph(
    config: DecoderConfig, folder: Path, options: TrainingGraphOptions
) -> Path:
    """Write the training graph of a drafter beside its CPU graph.

    Args:
        config: Of the drafter.
        folder: Where ``model.onnx`` lies, with LoRA inputs or without.
        options: Shapes.

    Returns:
        The graph's path.

    Raises:
        ExportError: the CPU graph cannot be read, or the new one not be written.
    """
    path = folder / FILE_NAME
    weights = StoredWeights(folder / "model.onnx")
    # What the graph adds is small enough to be part of it, so this file is never opened.
    with GraphWriter(
        path, TensorFile(folder / "model.onnx.data"), opset=_OPSET, name="lora_step"
    ) as graph:
        for name, (dtype, shape) in graph_inputs(config, options).items():
            graph.input(name, dtype, shape)
        ops = Operators(graph)
        decoder = TrainedDecoder(
            ops,
            config,
            weights,
            lora_rank=options.lora_rank,
            lora_modules=options.lora_modules,
        )
        _add_losses(ops, config, weights, decoder, options)
    return path


def lora_shapes(config: DecoderConfig, options: TrainingGraphOptions) -> dict[str, tuple[int, int]]:
    """Shapes of the adapter's tensors, in the order of the graph's inputs."""
    shapes, rank = {}, options.lora_rank
    for i in range(config.num_layers):
        for module in options.lora_modules:
            out, in_features = config.tensor_shapes()[f"layers.{i}.{module}"]
            shapes[lora_name(i, module, "A")] = (in_features, rank)
            shapes[lora_name(i, module, "B")] = (rank, out)
    return shapes


def graph_inputs(
    config: DecoderConfig, options: TrainingGraphOptions
) -> dict[str, tuple[type, tuple[int, ...]]]:
    """Types and shapes of the graph's inputs, in their order."""
    shape = (options.batch, options.length)
    top = (*shape, options.num_top)
    named: dict[str, tuple[type, tuple[int, ...]]] = {
        "pieces": (np.int64, shape),
        "law_ids": (np.int64, top),
        "law_probs": (np.float32, top),
        "forward_weight": (np.float32, shape),
        "reverse_weight": (np.float32, shape),
        "overlap_weight": (np.float32, shape),
        "head_weight": (np.float32, shape),
        "joint": (np.float32, ()),
    }
    learned = {**lora_shapes(config, options), **head_shapes(config.hidden_size)}
    return named | {name: (np.float32, shape) for name, shape in learned.items()}


def _add_losses(
    ops: Operators,
    config: DecoderConfig,
    weights: StoredWeights,
    decoder: TrainedDecoder,
    options: TrainingGraphOptions,
) -> None:
    graph, hidden = ops.graph, config.hidden_size
    rows = decoder.states("pieces")
    states = ops.reshape(rows, -1, hidden)
    source = "embed_tokens" if config.has_tied_head else "logits"
    laws = Laws(
        ids=ops.reshape("law_ids", -1, options.num_top),
        probs=ops.reshape("law_probs", -1, options.num_top),
        weights=("forward_weight", "reverse_weight", "overlap_weight"),
    )
    learned = law_loss(
        ops,
        states,
        weights.matrix(graph, source, hidden),
        laws,
        num_chunks(options, config.num_logits),
    )
    head = head_loss(ops, states, learned.agreement, "head_weight")
    both = ops("Add", learned.gradient, ops("Mul", head.gradient, "joint"))
    decoder.pull(ops("Reshape", both, ops("Shape", rows)))
    _add_output(graph, "loss", learned.loss, ())
    _add_output(graph, "head_loss", head.loss, ())
    for name, shape in lora_shapes(config, options).items():
        _add_output(graph, f"grad.{name}", decoder.gradients[name], shape)
    for name, width in head_shapes(hidden).items():
        _add_output(graph, f"grad.{name}", head.gradients[name], width)


def _add_output(graph: GraphWriter, name: str, value: str, shape: tuple[int, ...]) -> None:
    graph.output(graph.node("Identity", [value], name), np.float32, shape)


def num_chunks(options: TrainingGraphOptions, num_logits: int) -> int:
    """Parts of the positions: the fewest that divide a row and keep a chunk's logits small."""
    most = _CHUNK_BYTES // (4 * num_logits)
    divisors = (n for n in range(1, options.length + 1) if options.length % n == 0)
    fits = (n for n in divisors if options.batch * options.length <= n * most)
    return next(fits, options.length)
