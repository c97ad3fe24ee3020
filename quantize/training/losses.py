"""What a drafter should learn of the target's laws, as one number."""

from torch import Tensor

_FLOOR = 1e-9


def weighted_loss(
    logits: Tensor, ids: Tensor, probs: Tensor, forward_weight: Tensor, reverse_weight: Tensor
) -> Tensor:
    """Mean of forward and reverse divergences between laws and the drafter, by weight.

    With p the law and q what the drafter says: forward is ``-sum p log q``, where all that a
    law leaves open counts as one group; of a law that is a single piece it is the piece's
    negative log-likelihood. Reverse is ``KL(q || p)`` over the pieces that the law names, both
    renormalised to them.

    Args:
        logits: ``[batch, length, vocab]`` before the piece that each law is about.
        ids: ``[batch, length, top]`` distinct pieces where `probs` is above 0.
        probs: ``[batch, length, top]``, summing to at most 1.
        forward_weight: ``[batch, length]``, 0 where nothing is learned.
        reverse_weight: ``[batch, length]``.

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
    log_share = log_q - named.clamp(min=_FLOOR).log()[..., None]
    reverse = (is_named * log_share.exp() * (log_share - log_p)).sum(-1)

    total = forward_weight.sum() + reverse_weight.sum()
    return (forward_weight * forward + reverse_weight * reverse).sum() / total.clamp(min=_FLOOR)
