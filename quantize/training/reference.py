"""What a training graph computes, by torch's own gradients: to compare with, never to ship."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from omnidraft_npu.acceptance_head import NAMES

from ..architecture import DecoderConfig
from .loss_nodes import REJECTED_WEIGHT
from .reference_decoder import LoraDecoder

_FLOOR = 1e-9
_TINY = 1e-30

Arrays = Mapping[str, npt.NDArray[Any]]


def reference_outputs(
    config: DecoderConfig, weights: Arrays, feeds: Arrays
) -> dict[str, npt.NDArray[np.float32]]:
    """Every output of the training graph, by name.

    Args:
        config: Of the drafter.
        weights: Float32, by canonical name (`DecoderConfig.tensor_shapes`).
        feeds: Every input of the graph.
    """
    data = {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()}
    learned = {n: t.requires_grad_() for n, t in data.items() if n.startswith(("lora.", "head."))}
    frozen = {name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()}
    decoder = LoraDecoder(config, data["pieces"].shape[1])
    states = decoder.states(frozen, learned, data["pieces"])
    logits = decoder.logits(frozen, states)
    names = ("law_ids", "law_probs", "forward_weight", "reverse_weight", "overlap_weight")
    loss = weighted_loss(logits, *(data[name] for name in names))
    head = tuple(learned[name] for name in NAMES)
    label = agreement(logits, data["law_ids"], data["law_probs"]).detach()
    seen = states * data["joint"] + states.detach() * (1 - data["joint"])
    head_loss = acceptance_loss(seen, head, label, data["head_weight"])
    (loss + head_loss).backward()  # type: ignore[no-untyped-call]
    gradients = {f"grad.{n}": t.grad for n, t in learned.items() if t.grad is not None}
    found = {"loss": loss, "head_loss": head_loss, **gradients}
    return {name: value.detach().numpy() for name, value in found.items()}


def weighted_loss(
    logits: Tensor,
    ids: Tensor,
    probs: Tensor,
    forward_weight: Tensor,
    reverse_weight: Tensor,
    overlap_weight: Tensor,
) -> Tensor:
    """Mean by weight of three losses of the drafter against laws.

    With p the law and q what the drafter says: forward is ``-sum p log q``, where all that a
    law leaves open counts as one group; of a law that is a single piece it is the piece's
    negative log-likelihood. Reverse is ``KL(q || p)`` over the pieces that the law names, both
    renormalised to them. Overlap is ``1 - sum min(p, q)`` over those: the chance that a draft
    is rejected when sampling.

    Args:
        logits: ``[batch, length, vocab]`` before the piece that each law is about.
        ids: ``[batch, length, top]`` distinct pieces where `probs` is above 0.
        probs: ``[batch, length, top]``, summing to at most 1.
        forward_weight: ``[batch, length]``, 0 where nothing is learned.
        reverse_weight: ``[batch, length]``.
        overlap_weight: ``[batch, length]``.

    Source:
        OmniDraft, arXiv:2507.02659, Eq. 3-4: reverse KL where vocabularies agree, and the
        likelihood of the pieces of accepted n-grams with a weight of 0.2.
    """
    log_q = logits.log_softmax(-1).gather(-1, ids)
    is_named = (probs > 0).to(logits.dtype)
    named = (is_named * log_q.exp()).sum(-1)
    rest = 1 - probs.sum(-1)
    other = (1 - named).clamp(min=_FLOOR).log()
    forward = -((probs * log_q).sum(-1) + rest.clamp(min=0) * other)

    log_p = probs.clamp(min=_FLOOR).log() - probs.sum(-1, keepdim=True).clamp(min=_FLOOR).log()
    log_share = log_q - named.clamp(min=_TINY).log()[..., None]
    reverse = (is_named * log_share.exp() * (log_share - log_p)).sum(-1)

    losses = torch.stack([forward, reverse, 1 - agreement(logits, ids, probs)])
    weights = torch.stack([forward_weight, reverse_weight, overlap_weight])
    return (weights * losses).sum() / weights.sum().clamp(min=_FLOOR)


def agreement(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Sum over the pieces that a law names of the smaller of law and drafter."""
    return torch.minimum(logits.softmax(-1).gather(-1, ids), probs).sum(-1)


def acceptance_loss(
    states: Tensor, head: tuple[Tensor, ...], label: Tensor, weight: Tensor
) -> Tensor:
    """Mean by weight of the acceptance head's cross-entropy against a soft label."""
    into, bias, out, last = head
    logit = (functional.silu(states @ into + bias) @ out + last)[..., 0]
    accepted = label * functional.softplus(-logit)
    rejected = REJECTED_WEIGHT * (1 - label) * functional.softplus(logit)
    return (weight * (accepted + rejected)).sum() / weight.sum().clamp(min=_FLOOR)
