"""The acceptance head: how likely a drafted piece is accepted, from the drafter's hidden state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import BundleError

Floats = npt.NDArray[np.float32]

WIDTH = 64
NAMES = ("head.in.weight", "head.in.bias", "head.out.weight", "head.out.bias")
PREFIX = "head."

REJECTION_WEIGHT = 6.0
"""What a rejection counts in the loss, where an acceptance counts 1."""


def head_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors, by name."""
    shapes = ((hidden_size, WIDTH), (WIDTH,), (WIDTH, 1), (1,))
    return dict(zip(NAMES, shapes, strict=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class AcceptanceHead:
    """``sigmoid(out(silu(in(hidden))))``: the probability that the piece drawn there is accepted,
    given that all before it in the round were.

    Source:
        SpecDec++ 2024, arXiv:2405.19715; OmniDraft 2025, arXiv:2507.02659, equations 5 to 7.
    """

    tensors: Mapping[str, Floats]
    """Those of `head_shapes`."""

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, npt.NDArray[np.float32]]
    ) -> "AcceptanceHead | None":
        """The head among the tensors of an adapter; None where it has none.

        Raises:
            BundleError: it is there in part, or its shapes do not fit together.
        """
        own = {
            n: np.ascontiguousarray(t, np.float32)
            for n, t in tensors.items()
            if n.startswith(PREFIX)
        }
        if not own:
            return None
        first = own.get(NAMES[0])
        wanted = head_shapes(len(first) if first is not None and first.ndim == 2 else 0)
        if {name: tensor.shape for name, tensor in own.items()} != wanted:
            found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in own.items())
            raise BundleError(
                f"the adapter's acceptance head has {found}, which is no head: "
                "roll the adapter back or import it again"
            )
        return cls(tensors=own)

    @classmethod
    def fresh(cls, hidden_size: int, rng: np.random.Generator) -> "AcceptanceHead":
        """A head that says one half of everything, to begin training with."""
        scale = 1 / np.sqrt(hidden_size)
        shapes = head_shapes(hidden_size)
        tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        tensors[NAMES[0]] = rng.normal(0, scale, shapes[NAMES[0]]).astype(np.float32)
        tensors[NAMES[3]][:] = -math.log(REJECTION_WEIGHT)
        return cls(tensors=tensors)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that it is for."""
        return len(self.tensors[NAMES[0]])

    def logits(self, hidden: Floats) -> Floats:
        """``[...]`` of ``[..., hidden]`` states, as the loss weighs them."""
        into, bias, out, last = (self.tensors[name] for name in NAMES)
        inner = hidden @ into + bias
        found: Floats = (inner * _sigmoid(inner)) @ out[:, 0] + last[0]
        return found

    def probabilities(self, hidden: Floats) -> Floats:
        """``[...]`` probabilities that the piece drawn at ``[..., hidden]`` states is accepted.

        Counting rejections `REJECTION_WEIGHT` times makes them look more likely by that factor;
        it is taken back here, so that the probabilities can be weighed against times.
        """
        return _sigmoid(self.logits(hidden) + np.float32(math.log(REJECTION_WEIGHT)))

    def loss_and_gradients(self, hidden: Floats, labels: Floats) -> tuple[float, dict[str, Floats]]:
        """The mean weighted binary cross-entropy, and its gradients by tensor.

        Args:
            hidden: ``[pieces, hidden]`` states.
            labels: ``[pieces]`` soft acceptances: probability that a piece drawn there is
                accepted; 1 or 0 where it was, or was not.
        """
        into, bias, out, _ = (self.tensors[name] for name in NAMES)
        inner = hidden @ into + bias
        gate = _sigmoid(inner)
        active = inner * gate
        logits = active @ out[:, 0] + self.tensors[NAMES[3]][0]
        kept, lost = labels, np.float32(REJECTION_WEIGHT) * (1 - labels)
        losses = kept * np.logaddexp(0, -logits) + lost * np.logaddexp(0, logits)
        slope = (_sigmoid(logits) * (kept + lost) - kept) / np.float32(len(labels))
        inner_slope = np.outer(slope, out[:, 0]) * (gate + active * (1 - gate))
        gradients = (
            hidden.T @ inner_slope,
            inner_slope.sum(axis=0),
            (active.T @ slope)[:, None],
            slope.sum(keepdims=True),
        )
        return float(losses.mean()), dict(zip(NAMES, gradients, strict=True))


def _sigmoid(values: Floats) -> Floats:
    found: Floats = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * values))
    return found
