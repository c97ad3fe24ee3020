"""Training the acceptance head by itself, between requests and without any model."""

import numpy as np
import numpy.typing as npt

from omnidraft_npu.acceptance_head import AcceptanceHead

from .adamw import AdamW, AdamWConfig

Floats = npt.NDArray[np.float32]

HEAD_RATE = 3e-3
"""Learning rate; the head is small and starts anew, so it may go far."""


def train_head(
    head: AcceptanceHead,
    hidden: Floats,
    labels: Floats,
    rng: np.random.Generator,
    *,
    steps: int = 400,
    batch: int = 256,
    learning_rate: float = HEAD_RATE,
) -> AcceptanceHead:
    """A head that fits these pieces better: the interleaved schedule's step after the drafter's.

    Args:
        head: Where training begins.
        hidden: ``[pieces, hidden]`` states of the drafter as it is now.
        labels: ``[pieces]`` soft acceptances, from 0 to 1.
        rng: Orders the pieces.
        steps: Of the optimiser; the pieces are seen as often as that takes.
        batch: Pieces of a step.
        learning_rate: Of AdamW; it falls to 0 in a straight line.
    """
    optimiser = AdamW(head.tensors, AdamWConfig(learning_rate=learning_rate))
    trained = AcceptanceHead(tensors=optimiser.tensors)
    order = rng.permutation(len(labels))
    for step in range(steps):
        if len(order) < min(batch, len(labels)):
            order = rng.permutation(len(labels))
        chosen, order = order[:batch], order[batch:]
        _, gradients = trained.loss_and_gradients(hidden[chosen], labels[chosen])
        optimiser.config = AdamWConfig(learning_rate=learning_rate * (1 - step / steps))
        optimiser.step(gradients)
    return AcceptanceHead(tensors={n: t.copy() for n, t in optimiser.tensors.items()})
