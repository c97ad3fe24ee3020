"""A causal language model whose logits somebody else looks at too."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .lora_inputs import Tensors
from .model import ConversationLM


class ObservedLM:
    """Keeps the logits of the last call at hand, and counts rows that are no logits at all."""

    def __init__(self, lm: ConversationLM) -> None:
        self._lm = lm
        self.logits: npt.NDArray[np.float32] = np.empty((0, self.vocab_size), np.float32)
        """``[n, vocab_size]`` of the last `score`; a view that the next call overwrites."""
        self.num_broken = 0
        """Rows so far whose largest logit is NaN or infinite."""

    @property
    def context_length(self) -> int:
        """As the model itself, like all that follows."""
        return self._lm.context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the logits."""
        return self._lm.vocab_size

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._lm.length

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the tokens in the cache."""
        return self._lm.token_ids

    @property
    def hidden_states(self) -> npt.NDArray[np.float32] | None:
        """Of the last `score`."""
        return self._lm.hidden_states

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._lm.prefill(token_ids)

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append tokens and give logits after each."""
        self.logits = self._lm.score(token_ids)
        self.num_broken += int(np.sum(~np.isfinite(self.logits.max(axis=-1))))
        return self.logits

    def rewind(self, length: int) -> None:
        """Keep the first cached tokens."""
        self._lm.rewind(length)

    def reset(self) -> None:
        """Forget the conversation."""
        self._lm.reset()

    def set_lora(self, tensors: Tensors | None) -> None:
        """Feed an adapter."""
        self._lm.set_lora(tensors)
