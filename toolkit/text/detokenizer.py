"""Text as ids arrive, never half of a character."""

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one sequence piece by piece; all deltas joined are `Tokenizer.decode` of all ids.

    Bytes of an incomplete character wait for the next push, control tokens are not shown.
    Every push takes time and memory by its own ids only.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_continuation: bool = False) -> None:
        """Begin a sequence.

        Args:
            tokenizer: Gives the bytes of each id.
            is_continuation: The ids follow a prompt, so that a space in front of them is text.
        """
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer.has_space_prefix and not is_continuation

    def push(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete."""
        tokenizer = self._tokenizer
        hidden = tokenizer.special_ids
        data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in hidden)
        return self._shown(self._utf8.decode(data))

    def finish(self) -> str:
        """What still waits: U+FFFD if the sequence ends inside a character, else nothing."""
        return self._shown(self._utf8.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text
