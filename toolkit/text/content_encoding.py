"""Ids of a text in which only chosen places are control tokens."""

import secrets
from collections.abc import Collection, Mapping

import tokenizers

from ..documents import shown_value
from ..errors import PromptError


class ContentEncoder:
    """Encodes text that spells control tokens as text, and control tokens where they are meant.

    A second tokenizer shares the model of the first. It knows each control token by a name that
    no text has, and skips its own spelling, so that one call gives the ids of a whole prompt: what
    is done at the borders (merges, prefixes, spaces that a token strips) is the library's own.
    Added tokens that are not special, such as runs of spaces, are found in text as ever.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[int, str]) -> None:
        """An encoder beside `backend`; `special` has the text of each control token by its id."""
        self._backend = backend
        self._special = special
        secret = f"\U000f0000{secrets.token_hex(8)}"
        self._names = {i: f"{secret}{i}\U000f0001" for i in special}
        known: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        added = [known[i] for i in sorted(known)]
        self._ids = {name: i for i, name in self._names.items()}
        self._ids |= {token.content: i for i, token in known.items()}
        self._encoder = tokenizers.Tokenizer(backend.model)
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(backend, step) is not None:
                setattr(self._encoder, step, getattr(backend, step))
        self._encoder.add_tokens(
            [
                *added,
                *(
                    tokenizers.AddedToken(
                        self._names[i],
                        single_word=known[i].single_word,
                        lstrip=known[i].lstrip,
                        rstrip=known[i].rstrip,
                        normalized=known[i].normalized,
                        special=False,
                    )
                    for i in special
                ),
            ]
        )
        self._encoder.encode_special_tokens = True

    def encode(self, text: str, content: Collection[int] | None = None) -> list[int]:
        """Ids of `text`.

        Args:
            text: Any text.
            content: Places that are not part of a control token, whatever they spell; None for
                a text without any control token.

        Raises:
            PromptError: the tokenizer makes a control token of any text that spells it.
        """
        if content is None:
            return self._encoded(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        meant: list[tuple[int, int, int]] = []
        is_spelled = False
        for i, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # The span has the spaces that the token strips; that of an unknown word has no token.
            at = text.find(self._special[i], begin, end) if i in self._special else -1
            if at < 0:
                continue
            after = at + len(self._special[i])
            if any(place in content for place in range(at, after)):
                is_spelled = True
            else:
                meant.append((i, at, after))
        if not is_spelled:
            return list(encoding.ids)
        parts, done = [], 0
        for i, at, after in meant:
            parts += [text[done:at], self._names[i]]
            done = after
        return self._encoded("".join(parts) + text[done:])

    def _encoded(self, text: str) -> list[int]:
        encoding = self._encoder.encode(text, add_special_tokens=False)
        ids: list[int] = []
        found = zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
        for i, token, (begin, end) in found:
            if self._special.get(i) == token == text[begin:end]:
                raise PromptError(
                    f"the prompt spells the control token {shown_value(token)}, which this "
                    "tokenizer sees in any text: leave it out, or use --parse-special to send it "
                    "as that token"
                )
            # A token that strips spaces has them in its text.
            ids.append(self._ids.get(token, self._ids.get(token.strip(), i)))
        return ids
