"""Drafted bytes as the tokens that the target's own tokenizer would write after the context."""

from collections.abc import Sequence

from .pieces import PieceEncoder

_WINDOW_TOKENS = 8
"""Decided tokens in front of the drafted bytes, for the tokenizer to see what they follow."""


class Retokeniser:
    """Cuts bytes into target tokens in the context of the last decided ones.

    Decided ids stay as they are, also where the tokenizer would cut them otherwise: only
    what comes after them is cut.
    """

    def __init__(self, encoder: PieceEncoder) -> None:
        """Cut with the target's `encoder`."""
        self._encoder = encoder
        self._window: list[bytes] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        """Follow a new context of target ids."""
        self._window = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append decided target ids; no text before a special token counts."""
        for token_id in token_ids[-_WINDOW_TOKENS:]:
            data = self._encoder.vocabulary.token_bytes(token_id)
            self._window = [*self._window, data] if data else []
        del self._window[:-_WINDOW_TOKENS]

    def tokens(self, data: bytes) -> list[int]:
        """Target ids that spell `data` after the context.

        Where a token would join decided bytes to drafted ones, `data` is cut by itself.
        """
        context = b"".join(self._window)
        token_ids, starts = self._encoder.encode(context + data)
        if len(context) in starts:
            return token_ids[starts.index(len(context)) :]
        return self._encoder.encode(data)[0]
