"""Updates of an adapter from stored examples: the training graph, then a step of AdamW."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from omnidraft_npu.acceptance_head import PREFIX as HEAD
from omnidraft_npu.acceptance_head import AcceptanceHead
from omnidraft_npu.errors import BundleError, ConfigError
from omnidraft_npu.replay import Example

from .adamw import AdamW, AdamWConfig, Tensors
from .providers import is_size, open_cpu_session, reason_of

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
Loss = Literal["near", "trie", "reverse", "paper", "overlap"]

LORA = "lora."
_DATA = ("pieces", "law_ids", "law_probs", "forward_weight", "reverse_weight")
_OVERLAP = "overlap_weight"
"""An input that graphs exported by earlier versions lack."""
_NGRAM_WEIGHT = 0.2
"""Of the pieces of n-grams in the `paper` loss; OmniDraft, arXiv:2507.02659, Eq. 4."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one step of the optimiser did."""

    loss: float
    """Before the step, over the examples of the update."""
    norm: float | None
    """Of the gradients; None where the step was skipped, as they were no numbers."""
    seconds: float


class TrainingStep:
    """An opened training graph: loss and gradients for a batch of a fixed shape."""

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        """Open a graph that `quantize.training.graph` made.

        Raises:
            BundleError: it is missing, or no such graph.
        """
        self._session = open_cpu_session(path, threads=threads, keeps_memory=False)
        inputs = {i.name: tuple(i.shape) for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self.shapes = {n: shape for n, shape in inputs.items() if n.startswith((LORA, HEAD))}
        """Of the tensors that are learned, by name."""
        grads = [f"grad.{name}" for name in self.shapes]
        if not inputs.keys() >= set(_DATA) or not set(self._outputs) >= {"loss", *grads}:
            raise BundleError(f"{path} is no training graph: export the drafter again")
        sizes = inputs["law_ids"]
        if len(sizes) != 3 or not all(is_size(size) for shape in inputs.values() for size in shape):
            raise BundleError(f"{path} has inputs of open shapes: export the drafter again")
        self.batch, self.length, self.num_top = sizes
        self._path, self._inputs = path, inputs.keys()
        self._options = ort.RunOptions()

    def run(self, batch: Mapping[str, npt.NDArray[Any]], tensors: Tensors) -> tuple[float, Tensors]:
        """Loss of a batch, and the gradient of every tensor that is learned.

        Raises:
            InterruptedError: `cancel` was called meanwhile.
        """
        feeds = {name: value for name, value in batch.items() if name in self._inputs}
        try:
            values = self._session.run(self._outputs, {**feeds, **tensors}, self._options)
        except Exception as error:
            if not self._options.terminate:
                raise BundleError(
                    f"{self._path} cannot be run ({reason_of(error)}): export the drafter again"
                ) from error
            raise InterruptedError("the update was called off") from error
        finally:
            self._options.terminate = False
        found = dict(zip(self._outputs, values, strict=True))
        loss = float(found["loss"]) + float(found.get("head_loss", 0.0))
        return loss, {name: found[f"grad.{name}"] for name in self.shapes}

    def cancel(self) -> None:
        """End a run that another thread is in, or the next one, as soon as can be."""
        self._options.terminate = True

    def check(self, loss: Loss) -> None:
        """Fail where the graph does not have a loss.

        Raises:
            ConfigError: it was exported before there was this loss.
        """
        if loss == "overlap" and _OVERLAP not in self._inputs:
            raise ConfigError(
                f"{self._path} was exported before there was a loss `overlap`: export the bundle "
                "again"
            )

    def batch_of(
        self,
        examples: Sequence[Example],
        loss: Loss = "trie",
        *,
        weights: Sequence[Floats] | None = None,
        is_joint: bool = False,
    ) -> dict[str, npt.NDArray[Any]]:
        """Examples as the graph wants them.

        Of an example that is too long the end is taken; rows without an example, and pieces
        without a law, have no weight.

        Args:
            examples: At most as many as a batch holds.
            loss: `trie`, the forward divergence from the law at every piece; `near`, the same
                by the weights; `reverse`, the reverse one; `overlap`, the chance that a draft
                is rejected; `paper`, the reverse one where a piece is a whole token, and 0.2
                of the negative log-likelihood of the pieces of other tokens.
            weights: ``[response]`` for each example, of the loss `near`.
            is_joint: Whether the head's loss moves the adapter too.

        Raises:
            ConfigError: the graph was exported before it had this loss.
            ValueError: there are more examples than a batch holds.

        Source:
            OmniDraft, arXiv:2507.02659, Eq. 3 and 4, for `paper`.
        """
        self.check(loss)
        if len(examples) > self.batch:
            raise ValueError(f"{len(examples)} examples for a batch of {self.batch}")
        shape = (self.batch, self.length)
        batch: dict[str, npt.NDArray[Any]] = {
            "pieces": np.zeros(shape, np.int64),
            "law_ids": np.zeros((*shape, self.num_top), np.int64),
            "law_probs": np.zeros((*shape, self.num_top), np.float32),
            "forward_weight": np.zeros(shape, np.float32),
            "reverse_weight": np.zeros(shape, np.float32),
            _OVERLAP: np.zeros(shape, np.float32),
            "head_weight": np.zeros(shape, np.float32),
            "joint": np.array(is_joint, np.float32),
        }
        for row, example in enumerate(examples):
            self._fill(batch, row, example, loss)
            if weights is not None and len(weights[row]):
                end = min(len(example.pieces), self.length) - 1
                batch["forward_weight"][row, end - len(weights[row]) : end] *= weights[row]
        return batch

    def _fill(
        self, batch: dict[str, npt.NDArray[Any]], row: int, example: Example, loss: Loss
    ) -> None:
        text = example.pieces[-self.length :]
        batch["pieces"][row, : len(text)] = text
        # A law is about the piece after its position; the first piece has none before it.
        count = min(example.num_response, len(text) - 1)
        if not count:
            return
        where = slice(len(text) - 1 - count, len(text) - 1)
        top = min(self.num_top, example.laws.ids.shape[1])
        ids = example.laws.ids[-count:, :top].copy()
        probs = example.laws.probs[-count:, :top].copy()
        is_direct, is_drafted = example.is_direct[-count:], example.is_drafted[-count:]
        if loss == "paper":
            is_part = is_drafted & ~is_direct
            ids[is_part, 0], probs[is_part] = text[-count:][is_part], 0
            probs[is_part, 0] = 1
            batch["forward_weight"][row, where] = _NGRAM_WEIGHT * is_part
            batch["reverse_weight"][row, where] = is_direct
        elif loss == "overlap":
            batch[_OVERLAP][row, where] = 1
        else:
            batch[f"{'reverse' if loss == 'reverse' else 'forward'}_weight"][row, where] = 1
        batch["law_ids"][row, where, :top] = ids
        batch["law_probs"][row, where, :top] = probs
        batch["head_weight"][row, where] = is_drafted


class LoraTrainer:
    """An adapter under training; the same examples in the same order give the same adapter."""

    def __init__(
        self,
        step: TrainingStep,
        config: AdamWConfig,
        *,
        loss: Loss = "trie",
        is_joint: bool = False,
        start: Tensors | None = None,
    ) -> None:
        """Go on from an adapter, or from one that changes nothing.

        Args:
            step: The drafter's training graph.
            config: Of the optimiser.
            loss, is_joint: See `TrainingStep.batch_of`.
            start: The adapter, its acceptance head may be missing; None begins with B = 0 and
                a fixed random A.

        Raises:
            BundleError: `start` has other tensors than the graph.
        """
        tensors = new_adapter(step.shapes) | dict(start or {})
        if {n: t.shape for n, t in tensors.items()} != step.shapes:
            raise BundleError(
                "the adapter's tensors are not those of the training graph: start a new one with "
                "`omnidraft-npu adapters forget`"
            )
        self._step, self._loss, self._is_joint = step, loss, is_joint
        # The head is clipped by itself: its gradients are of another size.
        self._optimizers = [
            AdamW({n: t for n, t in tensors.items() if n.startswith(prefix)}, config)
            for prefix in (LORA, HEAD)
        ]

    @property
    def tensors(self) -> dict[str, Floats]:
        """The adapter as it is now, the average over the latest steps: a copy."""
        return {n: t.copy() for one in self._optimizers for n, t in one.average.items()}

    @property
    def lora(self) -> Tensors:
        """What the drafter is fed of it, no copy."""
        return self._optimizers[0].average

    @property
    def num_steps(self) -> int:
        """Steps of the optimiser so far."""
        return self._optimizers[0].num_steps

    def update(
        self, examples: Sequence[Example], weights: Sequence[Floats] | None = None
    ) -> Update:
        """One step on a batch of examples; a loss that is no number is said, and skipped.

        Args:
            examples, weights: See `TrainingStep.batch_of`.

        Raises:
            InterruptedError: the graph's run was called off; nothing has changed.
        """
        started = time.perf_counter()
        batch = self._step.batch_of(examples, self._loss, weights=weights, is_joint=self._is_joint)
        tensors = {n: t for one in self._optimizers for n, t in one.tensors.items()}
        loss, gradients = self._step.run(batch, tensors)
        norm = None
        if np.isfinite(loss) and all(np.isfinite(g).all() for g in gradients.values()):
            norm, _ = (one.step(gradients) for one in self._optimizers)
        if norm is None:
            logger.warning("an update of the adapter is skipped: its loss is %s", loss)
        return Update(loss=loss, norm=norm, seconds=time.perf_counter() - started)

    def state(self) -> dict[str, Floats]:
        """All that changes from update to update, to go on from with `restore`; no copies."""
        parts = zip((LORA, HEAD), self._optimizers, strict=True)
        return {f"{prefix}{n}": t for prefix, one in parts for n, t in one.state().items()}

    def restore(self, state: Tensors) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it is of other tensors; all or a part of it may have been taken over.
        """
        for prefix, one in zip((LORA, HEAD), self._optimizers, strict=True):
            mine = {n: t for n, t in state.items() if n.startswith(prefix)}
            one.restore({n.removeprefix(prefix): t for n, t in mine.items()})


def has_loss(path: Path, loss: Loss) -> bool:
    """Whether a training graph has a loss, as `TrainingStep.check`, without opening it.

    An input's name stands in the file as it is; to import onnx would take .13 s of every start.
    """
    return loss != "overlap" or _OVERLAP.encode() in path.read_bytes()


def new_adapter(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Floats]:
    """An adapter that changes nothing yet: random A, B of zeros, and a head that knows nothing.

    Source:
        Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """
    rng = np.random.default_rng(0)
    adapter: dict[str, Floats] = {}
    for name, shape in shapes.items():
        if name.endswith(".A"):
            adapter[name] = rng.normal(scale=shape[0] ** -0.5, size=shape).astype(np.float32)
        else:
            adapter[name] = np.zeros(shape, np.float32)
    into = shapes.get("head.in.weight")
    return adapter | (dict(AcceptanceHead.fresh(into[0], rng).tensors) if into else {})
