"""Updates of an adapter from stored examples: the training graph, then a step of AdamW."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import BundleError
from omnidraft_npu.replay import Example

from .adamw import AdamW, AdamWConfig, Tensors
from .providers import open_cpu_session

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

_DATA = ("pieces", "law_ids", "law_probs", "forward_weight", "reverse_weight")


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one update did."""

    loss: float
    """Before the step, over the examples of the update."""
    norm: float | None
    """Of the gradients; None where the update was skipped, as they were no numbers."""
    seconds: float


class TrainingStep:
    """An opened training graph: loss and gradients for a batch of a fixed shape."""

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        """Open a graph that `quantize.training.graph` made.

        Raises:
            BundleError: it is missing, or no such graph.
        """
        self._session = open_cpu_session(path, threads=threads)
        inputs = {i.name: tuple(i.shape) for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self.lora_shapes = {n: shape for n, shape in inputs.items() if n.startswith("lora.")}
        grads = [f"grad.{name}" for name in self.lora_shapes]
        if not inputs.keys() >= set(_DATA) or not set(self._outputs) >= {"loss", *grads}:
            raise BundleError(f"{path} is no training graph: export the drafter again")
        self.batch, self.length, self.num_top = inputs["law_ids"]

    def run(self, batch: dict[str, npt.NDArray[Any]], lora: Tensors) -> tuple[float, Tensors]:
        """Loss of a batch, and the gradient of every tensor of the adapter."""
        values = self._session.run(self._outputs, {**batch, **lora})
        found = dict(zip(self._outputs, values, strict=True))
        return float(found["loss"]), {name: found[f"grad.{name}"] for name in self.lora_shapes}

    def batch_of(self, examples: Sequence[Example]) -> dict[str, npt.NDArray[Any]]:
        """Examples as the graph wants them, the forward divergence at every piece with a law.

        Of an example that is too long the end is taken; rows without an example, and pieces
        without a law, have no weight.

        Raises:
            ValueError: there are more examples than a batch holds.
        """
        if len(examples) > self.batch:
            raise ValueError(f"{len(examples)} examples for a batch of {self.batch}")
        shape = (self.batch, self.length)
        pieces = np.zeros(shape, np.int64)
        law_ids = np.zeros((*shape, self.num_top), np.int64)
        law_probs = np.zeros((*shape, self.num_top), np.float32)
        weight = np.zeros(shape, np.float32)
        for row, example in enumerate(examples):
            text = example.pieces[-self.length :]
            pieces[row, : len(text)] = text
            # A law is about the piece after its position; the first piece has none before it.
            num_laws = min(example.num_response, len(text) - 1)
            where = slice(len(text) - 1 - num_laws, len(text) - 1)
            top = min(self.num_top, example.laws.ids.shape[1])
            law_ids[row, where, :top] = example.laws.ids[-num_laws:, :top] if num_laws else 0
            law_probs[row, where, :top] = example.laws.probs[-num_laws:, :top] if num_laws else 0
            weight[row, where] = 1
        return {
            "pieces": pieces,
            "law_ids": law_ids,
            "law_probs": law_probs,
            "forward_weight": weight,
            "reverse_weight": np.zeros(shape, np.float32),
        }


class LoraTrainer:
    """An adapter under training; the same examples in the same order give the same adapter."""

    def __init__(
        self, step: TrainingStep, config: AdamWConfig, *, start: Tensors | None = None
    ) -> None:
        """Go on from an adapter, or from one that changes nothing.

        Args:
            step: The drafter's training graph.
            config: Of the optimiser.
            start: The adapter; None begins with B = 0 and a fixed random A.

        Raises:
            BundleError: `start` has other tensors than the graph.
        """
        if start and {n: t.shape for n, t in start.items()} != step.lora_shapes:
            raise BundleError(
                "the adapter's tensors are not those of the training graph: start a new one with "
                "`omnidraft-npu adapters forget`"
            )
        self._step = step
        self._optimizer = AdamW(start or new_adapter(step.lora_shapes), config)

    @property
    def tensors(self) -> dict[str, Floats]:
        """The adapter as it is now, a copy."""
        return {name: tensor.copy() for name, tensor in self._optimizer.tensors.items()}

    def update(self, examples: Sequence[Example]) -> Update:
        """One step on a batch of examples; a loss that is no number is said, and skipped."""
        started = time.perf_counter()
        batch = self._step.batch_of(examples)
        loss, gradients = self._step.run(batch, self._optimizer.tensors)
        norm = self._optimizer.step(gradients) if np.isfinite(loss) else None
        if norm is None:
            logger.warning("an update of the adapter is skipped: its loss is %s", loss)
        return Update(loss=loss, norm=norm, seconds=time.perf_counter() - started)


def new_adapter(shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    """An adapter that changes nothing yet: random A, B of zeros.

    Source:
        Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """
    rng = np.random.default_rng(0)
    adapter = {}
    for name, shape in shapes.items():
        if name.endswith(".A"):
            adapter[name] = rng.normal(scale=shape[0] ** -0.5, size=shape).astype(np.float32)
        else:
            adapter[name] = np.zeros(shape, np.float32)
    return adapter
