"""The rounds: propose, score, verify, rewind. Text and statistics are layers over this."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .config import DecodeConfig
from .proposal import Proposal, Stop
from .sampling import Draw, TargetLaw
from .verification import Verdict, verify

Logits = npt.NDArray[np.float32]


class CausalLM(Protocol):
    """A causal language model with a KV cache that the host can crop."""

    @property
    def context_length(self) -> int:
        """Most tokens the cache can hold."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of `score`'s logits: real ids only, padded rows are already cut off."""
        ...

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    @property
    def hidden_states(self) -> Logits | None:
        """``[n, hidden]`` states of the last `score`'s n tokens; None if the model gives none."""
        ...

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the cache; nothing to do for an empty sequence."""
        ...

    def score(self, token_ids: Sequence[int]) -> Logits:
        """Append tokens and give ``[len(token_ids), vocab_size]`` logits after each.

        The array is a view that the next call overwrites.
        """
        ...

    def rewind(self, length: int) -> None:
        """Keep the first `length` cached tokens and drop the rest."""
        ...


class DraftControl(Protocol):
    """Decides how much is drafted, from what was drafted in the round and in those before it."""

    def begin(self) -> None:
        """Begin a response."""
        ...

    def begin_round(self, max_draft_tokens: int) -> None:
        """Begin a round of at most so many pieces, or tokens of lookup."""
        ...

    def prefers_lookup(self, num_matched: int) -> bool:
        """Whether what followed a match of so many tokens is drafted, and not the model asked."""
        ...

    def lookup_length(self, num_matched: int) -> tuple[int, Stop]:
        """How many tokens of lookup are proposed, and why not more."""
        ...

    def prefers_past(self, acceptance: float, num_matched: int) -> bool:
        """Whether tokens of answers of before, each accepted with this probability, are drafted,
        and neither what followed a match of so many tokens nor the model asked."""
        ...

    def past_length(self, acceptance: float) -> tuple[int, Stop]:
        """How many of them are proposed, and why not more."""
        ...

    def before_pass(self) -> Stop | None:
        """Why the drafter is not asked for another piece; None where it is."""
        ...

    def before_draw(self, logits: Logits, hidden: Logits | None) -> Stop | None:
        """Why a piece is not drawn from its logits and hidden state; None where it is."""
        ...

    def observe(
        self, proposal: Proposal, verdict: Verdict, *, draft_s: float, rest_s: float
    ) -> None:
        """Learn from a round, in which drafting and all after it took so many seconds."""
        ...


class Proposer(Protocol):
    """Offers draft tokens for a context that it follows."""

    def begin(self, context: Sequence[int]) -> None:
        """Follow a new context of target ids; state of an earlier one may be reused, never seen."""
        ...

    def propose(
        self,
        max_draft_tokens: int,
        draw: Draw | None = None,
        control: DraftControl | None = None,
    ) -> Proposal:
        """At most `max_draft_tokens` target tokens to come after the context; may be empty.

        How many may depend on the budget and on what was drawn, never on the target. What
        is drawn at random is drawn with `draw`; None drafts greedily. With `control` there
        may be fewer.
        """
        ...

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context by what the target decided."""
        ...


@dataclass(frozen=True, kw_only=True)
class Round:
    """One verdict with what it cost."""

    verdict: Verdict
    num_proposed: int
    draft_model_s: float
    """Time in the drafter's forward passes."""
    verify_s: float
    """Time in the target's forward pass."""
    total_s: float
    source: str = "model"
    """Which proposer made the drafts."""
    stop: Stop | None = None
    """Why they were not more; None where none were asked for."""


def generate(
    proposer: Proposer | None,
    target: CausalLM,
    prompt: Sequence[int],
    config: DecodeConfig,
    control: DraftControl | None = None,
) -> Iterator[Round]:
    """Yield one round at a time until a stop token, the token budget or a full context.

    Between rounds the target's cache holds the whole context but its last token;
    that one is scored together with the next drafts. Without a proposer the target
    decodes plainly, in the same loop.

    Args:
        proposer: Where drafts come from; None decodes plainly.
        target: The model whose output is preserved. Cached tokens that start `prompt`
            must already be cropped to a proper prefix of it (`target.length < len(prompt)`).
        prompt: Target ids, at least one.
        config: Limits and stop tokens.
        control: Decides how much is drafted, up to the limit; None always drafts up to it.

    Raises:
        ValueError: `prompt` is empty or shorter than what the target has cached.
    """
    if not prompt or target.length >= len(prompt):
        raise ValueError(f"prompt of {len(prompt)} tokens with {target.length} cached")
    length = len(prompt)
    last = int(prompt[-1])
    end = min(length + config.max_new_tokens, target.context_length)
    sampling = config.sampling
    law, draw, rng = TargetLaw(sampling, prompt), None, None
    if sampling.temperature > 0:
        rng = np.random.default_rng(sampling.seed)
        draw = Draw(sampling=sampling, rng=rng)
    target.prefill(prompt[target.length : -1])
    if proposer is not None:
        proposer.begin(prompt)
    if control is not None:
        control.begin()

    while length < end:
        start = time.perf_counter()
        budget = min(config.max_draft_tokens, end - length - 1)
        proposal = Proposal.EMPTY
        if control is not None:
            control.begin_round(budget)
        if proposer is not None and budget > 0:
            if control is None:
                proposal = proposer.propose(budget, draw)
            else:
                proposal = proposer.propose(budget, draw, control)
        drafted = time.perf_counter()
        logits = target.score([last, *proposal.token_ids])
        scored = time.perf_counter()
        rows = law.rows(logits, proposal.token_ids)
        verdict = verify(proposal, rows, rng).until(config.stop_token_ids)

        law.observe(verdict.token_ids)
        length += len(verdict.token_ids)
        last = verdict.token_ids[-1]
        target.rewind(length - 1)
        if proposer is not None:
            proposer.observe(verdict.token_ids)
        now = time.perf_counter()
        if control is not None:
            control.observe(proposal, verdict, draft_s=drafted - start, rest_s=now - drafted)
        yield Round(
            verdict=verdict,
            num_proposed=len(proposal.token_ids),
            draft_model_s=proposal.model_s,
            verify_s=scored - drafted,
            total_s=now - start,
            source=proposal.source,
            stop=proposal.stop if proposer is not None and budget > 0 else None,
        )
        if verdict.is_stopped:
            return
