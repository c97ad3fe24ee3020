"""A language model that writes a given text, in place of a real one with a real vocabulary."""

from collections.abc import Sequence

import numpy as np

from omnidraft_npu.bridge.pieces import PieceEncoder


class ScriptedModel:
    """Continues any beginning of its script, in its own pieces; after the end it ends.

    What was cached decides what comes next: a beginning that is not one of the script's
    is continued by its first piece.
    """

    context_length = 1_000_000

    def __init__(self, encoder: PieceEncoder, script: bytes, end_token_id: int) -> None:
        self._encoder, self._script, self._end = encoder, script, end_token_id
        self.vocab_size = encoder.vocabulary.size
        self.token_ids, starts = encoder.encode(script)
        self._at = dict(zip(starts, self.token_ids, strict=True))
        self.cache: list[int] = []

    @property
    def length(self) -> int:
        return len(self.cache)

    def prefill(self, token_ids: Sequence[int]) -> None:
        self.cache += token_ids

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        logits = np.zeros((len(token_ids), self.vocab_size), np.float32)
        for row, token_id in zip(logits, token_ids, strict=True):
            self.cache.append(token_id)
            row[self._next()] = 1.0
        return logits

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self.cache)
        del self.cache[length:]

    def _next(self) -> int:
        written = b"".join(map(self._encoder.vocabulary.token_bytes, self.cache))
        if not self._script.startswith(written):
            return self.token_ids[0]
        rest = self._script[len(written) :]
        if not rest:
            return self._end
        # Where another cut than its own was cached, the rest is spelled by itself.
        return self._at.get(len(written)) or self._encoder.encode(rest[:64])[0][0]
