"""What the target said before each token of a response: its likeliest tokens, kept as they come."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnidraft_npu.distillation import TokenLaws
from omnidraft_npu.peaks import Peaks

Floats = npt.NDArray[np.float32]

NUM_TOP = 48
"""Tokens kept of a law; they hold over 97 % of its mass on average."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """A finished response, as it is learned from."""

    prompt_ids: tuple[int, ...]
    """Target ids of all that came before it."""
    laws: TokenLaws
    """Its tokens, and the target's own law before each, at temperature 1."""


class LawRecorder:
    """Follows one response."""

    def __init__(self, prompt_ids: Sequence[int], *, num_top: int = NUM_TOP) -> None:
        """Begin after these target ids, with `num_top` tokens a law."""
        self._prompt_ids = tuple(prompt_ids)
        self._num_top = num_top
        self._token_ids: list[int] = []
        self._top_ids: list[npt.NDArray[np.int32]] = []
        self._probs: list[Floats] = []

    def add(self, token_ids: Sequence[int], logits: Floats) -> None:
        """Keep what was said before each of these tokens.

        Args:
            token_ids: What the target decided in a round.
            logits: ``[at least the tokens, vocab]`` its own, before any sampling option; row i
                stands before token i.
        """
        self._token_ids += token_ids
        for row in logits[: len(token_ids)]:
            ids, probs = top_law(row, self._num_top)
            self._top_ids.append(ids)
            self._probs.append(probs)

    def answer(self) -> Answer | None:
        """The response so far; None where there is none, or the target said what is no number."""
        if not self._token_ids:
            return None
        probs = np.stack(self._probs)
        if not np.isfinite(probs).all():
            return None
        return Answer(
            prompt_ids=self._prompt_ids,
            laws=TokenLaws(
                token_ids=np.array(self._token_ids, np.int32),
                top_ids=np.stack(self._top_ids),
                probs=probs,
            ),
        )


def top_law(logits: Floats, num_top: int) -> tuple[npt.NDArray[np.int32], Floats]:
    """``[num_top]`` likeliest ids, and their probabilities, falling; equal ones by rising id.

    Args:
        logits: ``[vocab]``.
        num_top: At most this many; fewer where the vocabulary has fewer.
    """
    num_top = min(num_top, len(logits))
    peaks = Peaks(logits)
    ids = peaks.at_least(peaks.floor(num_top))
    ids = ids[np.argsort(-logits[ids], kind="stable")[:num_top]]
    # What is no number is above no bound, or above all.
    if len(ids) < num_top or not np.isfinite(logits[ids[0]]):
        return np.zeros(num_top, np.int32), np.full(num_top, np.nan, np.float32)
    top = logits[ids[0]]
    mass = np.exp(logits - top).sum(dtype=np.float64)
    probs = (np.exp(logits[ids] - top) / mass).astype(np.float32)
    return ids.astype(np.int32), probs
