"""The rounds: propose, score, verify, rewind. Text and statistics are layers over this."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .config import DecodeConfig
from .proposal import Proposal
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


class Proposer(Protocol):
    """Offers draft tokens for a context that it follows."""

    def begin(self, context: Sequence[int]) -> None:
        """Follow a new context of target ids; state of an earlier one may be reused, never seen."""
        ...

    def propose(self, max_draft_tokens: int, draw: Draw | None = None) -> Proposal:
        """At most `max_draft_tokens` target tokens to come after the context; may be empty.

        How many may depend on the budget and on what was drawn, never on the target. What
        is drawn at random is drawn with `draw`; None drafts greedily.
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


def generate(
    proposer: Proposer | None, target: CausalLM, prompt: Sequence[int], config: DecodeConfig
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

    while length < end:
        start = time.perf_counter()
        budget = min(config.max_draft_tokens, end - length - 1)
        proposal = Proposal.EMPTY
        if proposer is not None and budget > 0:
            proposal = proposer.propose(budget, draw)
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
        yield Round(
            verdict=verdict,
            num_proposed=len(proposal.token_ids),
            draft_model_s=proposal.model_s,
            verify_s=scored - drafted,
            total_s=now - start,
            source=proposal.source,
        )
        if verdict.is_stopped:
            return
