"""The training step of a drafter as one ONNX graph: the device has no torch.

===================  ============================  ============================================
`pieces`             int64 ``[batch, length]``     the text in the drafter's pieces
`law_ids`            int64 ``[batch, length, t]``  the law of the piece after each: its pieces
`law_probs`          ``[batch, length, t]``        and their probabilities
`forward_weight`     ``[batch, length]``           what each position counts in the forward
`reverse_weight`     ``[batch, length]``           and in the reverse divergence
`lora.layers.…`      as the drafter's graphs       the adapter
`loss`               scalar                        `losses.weighted_loss`
`grad.lora.layers…`  as the adapter                its gradients
===================  ============================  ============================================

The graph is traced: torch differentiates the loss, and what comes of it is exported.
`optimize=True` of the exporter was seen to change the loss, so it is off.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnidraft_npu.errors import ExportError
from omnidraft_npu.lora import MODULES, lora_name

from ..architecture import DecoderConfig
from .decoder import LoraDecoder
from .losses import weighted_loss

Floats = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]

_OPSET = 21
_WORST_ERROR = 1e-4
"""Of a gradient, over its largest element, against torch's own."""


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


def build_training_graph(
    config: DecoderConfig,
    tensors: Callable[[str], Floats],
    path: Path,
    options: TrainingGraphOptions,
) -> float:
    """Write the training graph of a drafter; its weights are part of it, float32.

    Args:
        config: Of the drafter.
        tensors: Gives a tensor by its canonical name.
        path: Of the graph; large weights go to a file beside it.
        options: Shapes.

    Returns:
        The largest error of a gradient against torch's, relative to its largest element.

    Raises:
        ExportError: that error is too large, or the file cannot be written.
    """
    weights = {name: torch.from_numpy(tensors(name)) for name in config.tensor_shapes()}
    step = _Step(config, weights, options)
    feeds = example_feeds(config, options)
    program = step.export(feeds)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        program.save(str(path), external_data=True)
        _strip(path)
    except OSError as error:
        raise ExportError(f"cannot write {path} ({error.strerror})") from error
    found = _parity(path, step, feeds)
    if not found < _WORST_ERROR:
        raise ExportError(
            f"the training graph's gradients differ from torch's by {found:.1e}, more than "
            f"{_WORST_ERROR:.0e}: use the torch version that this tool pins"
        )
    return found


def lora_shapes(config: DecoderConfig, options: TrainingGraphOptions) -> dict[str, tuple[int, int]]:
    """Shapes of the adapter's tensors, in the order of the graph's inputs."""
    shapes, rank = {}, options.lora_rank
    for i in range(config.num_layers):
        for module in options.lora_modules:
            out, in_features = config.tensor_shapes()[f"layers.{i}.{module}"]
            shapes[lora_name(i, module, "A")] = (in_features, rank)
            shapes[lora_name(i, module, "B")] = (rank, out)
    return shapes


def example_feeds(config: DecoderConfig, options: TrainingGraphOptions) -> Arrays:
    """Random values for every input, for tracing and for comparing."""
    rng = np.random.default_rng(0)
    shape = (options.batch, options.length)
    num_top = min(options.num_top, config.num_logits)
    ids = rng.permuted(np.tile(np.arange(num_top), (*shape, 1)), axis=-1)
    ids = (ids + rng.integers(0, config.num_logits, (*shape, 1))) % config.num_logits
    probs = rng.dirichlet(np.ones(options.num_top + 1), shape)[..., : options.num_top]
    probs[rng.random(shape) < 0.2, 1:] = 0
    feeds: Arrays = {
        "pieces": rng.integers(0, config.num_logits, shape),
        "law_ids": ids,
        "law_probs": probs.astype(np.float32),
        "forward_weight": (rng.random(shape) < 0.6).astype(np.float32),
        "reverse_weight": rng.random(shape).astype(np.float32),
    }
    for name, lora_shape in lora_shapes(config, options).items():
        feeds[name] = rng.normal(scale=0.1, size=lora_shape).astype(np.float32)
    return feeds


class _Step(torch.nn.Module):
    """Loss and gradients, with the weights as constants."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], options: TrainingGraphOptions
    ) -> None:
        super().__init__()
        self._names = list(lora_shapes(config, options))
        self._decoder = LoraDecoder(config, options.length)
        self._weights = weights

    def loss(self, lora: tuple[Tensor, ...], *data: Tensor) -> Tensor:
        """The loss of a batch."""
        pieces, ids, probs, forward_weight, reverse_weight = data
        named = dict(zip(self._names, lora, strict=True))
        states = self._decoder.states(self._weights, named, pieces)
        logits = self._decoder.logits(self._weights, states)
        return weighted_loss(logits, ids, probs, forward_weight, reverse_weight)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The loss, then a gradient for every tensor of the adapter."""
        data, lora = inputs[:5], inputs[5:]
        gradients, loss = torch.func.grad_and_value(self.loss)(lora, *data)
        return (loss, *gradients)

    def export(self, feeds: Arrays) -> Any:
        """An ONNX program of the step."""
        from torch.fx.experimental.proxy_tensor import make_fx

        inputs = tuple(torch.from_numpy(value) for value in feeds.values())
        traced = make_fx(self.forward)(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                traced,
                inputs,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=_OPSET,
                input_names=list(feeds),
                output_names=["loss", *(f"grad.{name}" for name in self._names)],
            )


def _strip(path: Path) -> None:
    """Drop the exporter's notes on where every node came from: most of the file."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info):
        del part.metadata_props[:]
    model.doc_string = model.graph.doc_string = ""
    path.write_bytes(model.SerializeToString())


def _parity(path: Path, step: _Step, feeds: Arrays) -> float:
    """The largest error of an output of the graph, relative to that output's largest element."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = session.run(None, feeds)
    expected = step(*(torch.from_numpy(value) for value in feeds.values()))
    errors = [
        float(np.abs(ours - theirs.numpy()).max() / max(theirs.abs().max().item(), 1e-12))
        for ours, theirs in zip(found, expected, strict=True)
    ]
    return max(errors)
