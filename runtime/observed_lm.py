"""A causal language model whose logits somebody else looks at too."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .causal_lm import OnnxCausalLM, OnnxModel


class ObservedLM(OnnxCausalLM):
    """Keeps the logits of the last call at hand, and counts rows that are no logits at all."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__(model)
        self.logits: npt.NDArray[np.float32] = np.empty((0, self.vocab_size), np.float32)
        """``[n, vocab_size]`` of the last `score`; a view that the next call overwrites."""
        self.num_broken = 0
        """Rows so far whose largest logit is NaN or infinite."""

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the model itself."""
        self.logits = super().score(token_ids)
        self.num_broken += int(np.sum(~np.isfinite(self.logits.max(axis=-1))))
        return self.logits
