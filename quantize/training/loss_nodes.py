"""The losses of a training graph and their gradients, a few positions at a time.

The logits of a batch are far larger than everything else: each chunk of positions goes from
states to logits, loss and gradient of the states before the next one begins.
"""

from dataclasses import dataclass

from omnidraft_npu.acceptance_head import NAMES

from .operators import Operators

_FLOOR = 1e-9
_TINY = 1e-30
"""Of what a sure drafter says of pieces that it does not expect: far below `_FLOOR`."""
_FLOAT = 1
"""ONNX's number of the type."""
REJECTED_WEIGHT = 6.0
"""What a piece that is rejected counts against one that is accepted (SpecDec++)."""


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Values ``[positions, …]`` of what there is to learn, by name."""

    ids: str
    probs: str
    weights: tuple[str, str, str]
    """``[batch, length]`` of the forward divergence, of the reverse one, and of the overlap."""


@dataclass(frozen=True, kw_only=True)
class LawLoss:
    """Values of the loss and what it leads to."""

    loss: str
    """Scalar."""
    gradient: str
    """``[positions, hidden]`` of the states."""
    agreement: str
    """``[positions, 1]`` sum of the smaller of law and drafter over the law's pieces."""


def law_loss(ops: Operators, states: str, head: str, laws: Laws, num_chunks: int) -> LawLoss:
    """Mean of the losses by weight, as `reference.weighted_loss` gives it.

    Args:
        ops: Adds the nodes.
        states: ``[positions, hidden]``
        head: ``[vocab, hidden]``
        laws: Of every position.
        num_chunks: Equal parts that the positions are cut into.
    """
    total = ops("Max", ops("Sum", *map(ops.sum, laws.weights)), ops.number(_FLOOR))
    shares = [ops("Div", ops.reshape(weight, -1, 1), total) for weight in laws.weights]
    rows = [ops.split(x, num_chunks, 0) for x in (states, laws.ids, laws.probs, *shares)]
    losses, gradients, agreements = zip(
        *(_chunk(ops, head, *values) for values in zip(*rows, strict=True)), strict=True
    )
    return LawLoss(
        loss=ops("Sum", *losses),
        gradient=ops("Concat", *gradients, axis=0),
        agreement=ops("Concat", *agreements, axis=0),
    )


def _chunk(
    ops: Operators, head: str, states: str, ids: str, probs: str, *shares: str
) -> tuple[str, str, str]:
    """Loss, gradient of the states, and agreement of some positions; `shares` of each loss."""
    log_law = ops("LogSoftmax", ops.matmul(states, head, transpose_y=True), axis=-1)
    log_q = ops("GatherElements", log_law, ids, axis=1)
    named = _Named(ops, log_q, probs)
    found = zip((named.forward(), named.reverse(), named.overlap()), shares, strict=True)
    parts = [[ops("Mul", value, share) for value in pair] for pair, share in found]
    losses, slopes = zip(*parts, strict=True)
    loss, slope = ops.sum(ops("Sum", *losses)), ops("Sum", *slopes)
    # Of a log-probability the gradient is the piece's own less the whole law.
    spread = ops("Mul", ops("Exp", log_law), ops("Neg", ops.sum(slope, 1, keep=True)))
    grad_logits = ops("ScatterElements", spread, ids, slope, axis=1, reduction="add")
    return loss, ops.matmul(grad_logits, head), named.agreement()


class _Named:
    """The pieces that laws name: ``[positions, top]``."""

    def __init__(self, ops: Operators, log_q: str, probs: str) -> None:
        """Args: log_q and probs are what the drafter and the law say of them."""
        self._ops, self._log_q, self._probs = ops, log_q, probs
        is_named = ops("Cast", ops("Greater", probs, ops.number(0.0)), to=_FLOAT)
        self._is_named = is_named
        self._q = ops("Mul", ops("Exp", log_q), is_named)
        self._sum_q = ops.sum(self._q, 1, keep=True)
        self._sum_p = ops.sum(probs, 1, keep=True)

    def forward(self) -> tuple[str, str]:
        """``-sum p log q`` with what is open as one group; its slope along `log_q`."""
        ops = self._ops
        rest = ops("Max", ops("Sub", ops.number(1.0), self._sum_p), ops.number(0.0))
        left = ops("Sub", ops.number(1.0), self._sum_q)
        floored = ops("Max", left, ops.number(_FLOOR))
        named = ops.sum(ops("Mul", self._probs, self._log_q), 1, keep=True)
        loss = ops("Neg", ops("Add", named, ops("Mul", rest, ops("Log", floored))))
        push = ops("Where", ops("Greater", left, ops.number(_FLOOR)), rest, ops.number(0.0))
        push = ops("Div", push, floored)
        return loss, ops("Sub", ops("Mul", self._q, push), self._probs)

    def reverse(self) -> tuple[str, str]:
        """``KL(q || p)`` over the named pieces, both renormalised; its slope along `log_q`."""
        ops = self._ops
        log_p = ops("Sub", self._log(self._probs), self._log(self._sum_p))
        log_share = ops("Sub", self._log_q, self._log(self._sum_q, _TINY))
        share = ops("Mul", ops("Exp", log_share), self._is_named)
        excess = ops("Sub", log_share, log_p)
        loss = ops.sum(ops("Mul", share, excess), 1, keep=True)
        return loss, ops("Mul", share, ops("Sub", excess, loss))

    def overlap(self) -> tuple[str, str]:
        """``1 - sum min(p, q)``, a draft's chance to be rejected; its slope along `log_q`."""
        ops = self._ops
        loss = ops("Sub", ops.number(1.0), self.agreement())
        # No more is won where the drafter says as much of a piece as the law does.
        is_short = ops("Less", self._q, self._probs)
        return loss, ops("Where", is_short, ops("Neg", self._q), ops.number(0.0))

    def agreement(self) -> str:
        """``[positions, 1]``"""
        return self._ops.sum(self._ops("Min", self._q, self._probs), 1, keep=True)

    def _log(self, x: str, floor: float = _FLOOR) -> str:
        return self._ops("Log", self._ops("Max", x, self._ops.number(floor)))


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """Values of the acceptance head's loss and what it leads to."""

    loss: str
    gradient: str
    """``[positions, hidden]`` of the states."""
    gradients: dict[str, str]
    """Of the head's tensors."""


def head_loss(ops: Operators, states: str, agreement: str, weight: str) -> HeadLoss:
    """Binary cross-entropy of the acceptance head, rejections counting `REJECTED_WEIGHT` times.

    Args:
        ops: Adds the nodes; the head's tensors are inputs of its graph.
        states: ``[positions, hidden]``
        agreement: ``[positions, 1]``, the soft label; no gradient goes into it.
        weight: ``[positions]``
    """
    into, bias, out, last = NAMES
    inner = ops("Add", ops.matmul(states, into), bias)
    active, pull_active = ops.silu(inner)
    logit = ops("Add", ops.matmul(active, out), last)
    total = ops("Max", ops.sum(weight), ops.number(_FLOOR))
    share = ops("Div", ops.reshape(weight, -1, 1), total)
    accepted = ops("Mul", share, agreement)
    rejected = ops("Mul", ops("Sub", share, accepted), ops.number(REJECTED_WEIGHT))
    loss = ops(
        "Add",
        ops("Mul", accepted, ops("Softplus", ops("Neg", logit))),
        ops("Mul", rejected, ops("Softplus", logit)),
    )
    chance = ops("Sigmoid", logit)
    grad = ops("Sub", ops("Mul", ops("Add", accepted, rejected), chance), accepted)
    grad_inner = pull_active(ops.matmul(grad, out, transpose_y=True))
    return HeadLoss(
        loss=ops.sum(loss),
        gradient=ops.matmul(grad_inner, into, transpose_y=True),
        gradients={
            into: ops("Gemm", states, grad_inner, transA=1),
            bias: ops.sum(grad_inner, 0),
            out: ops("Gemm", active, grad, transA=1),
            last: ops.sum(grad, 0),
        },
    )
