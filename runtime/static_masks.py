"""Attention masks of a static graph, changed only where a pass differs from the one before."""

import numpy as np
import numpy.typing as npt

SEEN = 0.0
HIDDEN = -100.0
"""Finite, because the NPU has no use for infinity, and small, because a quantised mask keeps
few steps for everything else beside a large one."""


class MaskRows:
    """``[1, 1, length, context + length]``: cache slots, then the new tokens, for each new token.

    New tokens see those before them among the new; rows past the last real token are as good
    as any, nobody looks at what comes of them.
    """

    def __init__(self, length: int, context_length: int, window: int | None = None) -> None:
        """A mask for an empty cache.

        Args:
            length: Tokens of a pass.
            context_length: Slots of the cache; slot i holds the token of position i.
            window: Tokens that one sees, itself included; None for all.
        """
        self.values: npt.NDArray[np.float32] = np.full(
            (1, 1, length, context_length + length), HIDDEN, np.float32
        )
        row, column = np.ogrid[:length, :length]
        seen = (column <= row) & (row - column < (window or length))
        self.values[0, 0, :, context_length:][seen] = SEEN
        self._slots = self.values[0, 0, :, :context_length]
        self._window = window
        self._start = 0

    def move(self, start: int) -> None:
        """Let the pass begin at position `start`: slots from there on are stale."""
        before, self._start = self._start, start
        if self._window is None:
            low, high = sorted((before, start))
            self._slots[:, low:high] = SEEN if start > before else HIDDEN
            return
        for row, slots in enumerate(self._slots):
            slots[max(0, before + row + 1 - self._window) : before] = HIDDEN
            slots[max(0, start + row + 1 - self._window) : start] = SEEN
