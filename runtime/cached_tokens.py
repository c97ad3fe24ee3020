"""How many tokens a conversation has cached: the host owns the cache, rewinding is a counter."""

from omnidraft_npu.errors import PromptError

from .model import Model


class CachedTokens:
    """The counter of a conversation and its limits, whatever graphs run it."""

    def __init__(self, model: Model) -> None:
        """Begin with an empty cache of `model`'s size."""
        self._limits = model
        self._length = 0

    @property
    def context_length(self) -> int:
        """Most tokens the cache can hold."""
        return self._limits.context_length

    @property
    def vocab_size(self) -> int:
        """Rows of `score`'s logits; padding is cut off."""
        return self._limits.vocab_size

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    def rewind(self, length: int) -> None:
        """Keep the first `length` cached tokens.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"rewind to {length} with {self._length} tokens cached")
        self._length = length

    def _check_room(self, num_tokens: int) -> None:
        if self._length + num_tokens > self.context_length:
            raise PromptError(
                f"{self._length + num_tokens} tokens do not fit into the context of "
                f"{self.context_length}: shorten the prompt, or {self._limits.more_room}"
            )
