"""How far the drafter is from the laws it should say, and which tokens it would get right."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .examples import Batch, Example
from .llama import Llama


def law_loss(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Mean cross-entropy of the laws; the mass that they leave open counts as one group.

    Args:
        logits: ``[positions, vocab]``.
        ids: ``[positions, top]`` distinct pieces where ``probs`` is above 0.
        probs: ``[positions, top]`` sum to at most 1.
    """
    log_q = logits.float().log_softmax(-1).gather(1, ids)
    known = torch.where(probs > 0, log_q.exp(), 0).sum(1)
    rest = (1 - probs.sum(1)).clamp(min=0)
    other = (1 - known).clamp(min=1e-4).log()
    return -((probs * log_q).sum(1) + rest * other).mean()


def batch_logits(model: Llama, batch: Batch, device: torch.device) -> Tensor:
    """``[answer pieces, vocab]`` what the drafter says before each learned piece."""
    states = model(torch.from_numpy(batch.pieces).to(device))
    positions = torch.from_numpy(batch.positions).to(device)
    return model.logits(states.flatten(0, 1)[positions])


@torch.no_grad()
def held_out_acceptance(
    model: Llama, groups: Iterable[Sequence[Example]], device: torch.device
) -> dict[str, float]:
    """Share of the target's tokens that the drafter would have drafted, task by task.

    A token counts if the likeliest piece is the right one all along its spelling, given all
    that came before: conditional acceptance with greedy decoding.
    """
    right: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for examples in groups:
        batch = Batch.of(list(examples))
        best = batch_logits(model, batch, device).argmax(-1).cpu().numpy()
        start = 0
        for e in examples:
            answer = e.pieces[e.num_prompt :]
            is_right = (best[start : start + len(answer)] == answer) & e.is_drafted
            start += len(answer)
            is_drafted = np.ones(int(e.tokens[-1]) + 1, np.bool_)
            np.logical_and.at(is_drafted, e.tokens, is_right)
            right[e.task] += int(is_drafted.sum())
            total[e.task] += len(is_drafted)
    return {task: right[task] / total[task] for task in sorted(total)}
