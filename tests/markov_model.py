"""A language model with a table for weights, in place of a real one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.speculative import generate


class MarkovModel:
    """A causal model with a table for weights, which also checks how its cache is used.

    The logits after a token are the table's row of that token; with `history` above 1,
    the row picked by the last `history` cached tokens together, so that a wrong cache shows.
    """

    def __init__(
        self, table: npt.ArrayLike, *, context_length: int = 4096, history: int = 1
    ) -> None:
        self.table = np.asarray(table, np.float32)
        self.context_length = context_length
        self.history = history
        self.cache: list[int] = []
        self.num_forwards = 0
        self.num_fed = 0

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    @property
    def length(self) -> int:
        return len(self.cache)

    @property
    def hidden_states(self) -> None:
        return None

    def prefill(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self.score(token_ids)

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        assert len(token_ids) > 0
        assert len(self.cache) + len(token_ids) <= self.context_length
        self.num_forwards += 1
        self.num_fed += len(token_ids)
        rows = []
        for token_id in token_ids:
            assert isinstance(token_id, int)
            assert 0 <= token_id < self.vocab_size
            self.cache.append(token_id)
            rows.append(self._row())
        return self.table[rows]

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self.cache)
        del self.cache[length:]

    def _row(self) -> int:
        seen = self.cache[-self.history :]
        return sum(token * 31**i for i, token in enumerate(reversed(seen))) % len(self.table)


def first_tokens_against_law(proposer, target, prompt, *, num_texts=8_000):
    """Sample texts, and count their first two tokens.

    Args:
        proposer: Of drafts for a target of 3 tokens.
        target: A `MarkovModel` without history.
        prompt: Ends with token 0.

    Returns:
        The chi-square statistic of 8 degrees of freedom against the target's own law, and the
        proposers that served rounds.
    """
    odds = np.exp(target.table)
    law = odds / odds.sum(1, keepdims=True)
    counts, sources = np.zeros((3, 3)), set()
    for seed in range(num_texts):
        config = DecodeConfig(
            max_new_tokens=3,
            max_draft_tokens=2,
            sampling=SamplingConfig(temperature=1.0, seed=seed),
        )
        target.rewind(0)
        rounds = list(generate(proposer, target, prompt, config))
        text = [i for one in rounds for i in one.verdict.token_ids]
        sources |= {one.source for one in rounds}
        counts[text[0], text[1]] += 1
    expected = law[0][:, None] * law * counts.sum()
    return ((counts - expected) ** 2 / expected).sum(), sources
