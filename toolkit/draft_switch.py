"""Whether to draft at all: off where it saved nothing lately, and tried again ever more rarely."""

_OPTIMISM = 0.25
"""Of a plain round's time: what drafting is taken to save a round until it has been seen."""
_FLOOR = 0.05
"""Likewise, the most that it is taken to lose, so that it can soon be found to pay again."""
_RATE = 0.03
"""Weight of the latest round."""
_PROBE_RATE = 0.2
"""Weight of a round that tries again."""
_FIRST_PAUSE, _LAST_PAUSE = 8, 256
"""Plain rounds before drafting is tried again; each failed try doubles them."""
_LASTING = 16
"""Rounds that drafting must be on again before the next pause is short."""
_PROBE_LENGTH = 2
"""Fewest pieces of a round that tries again."""


class DraftSwitch:
    """Turns a drafter off by what its rounds saved, each against plain decoding of its tokens."""

    def __init__(self) -> None:
        self.saved_s: float | None = None
        """Seconds that a round of drafting saved lately; None before the first."""
        self.min_length = 0
        """Pieces that this round has whatever they promise."""
        self.begin()

    def begin(self) -> None:
        """Begin a response: its text may suit the drafter better."""
        self._pause, self._num_plain, self._num_on = _FIRST_PAUSE, 0, 0

    def begin_round(self, plain_s: float) -> bool:
        """Whether to draft in this round; `plain_s` seconds are what one without takes."""
        self.min_length = 0
        if self.saved_s is None:
            self.saved_s = _OPTIMISM * plain_s
        self._floor_s = -_FLOOR * plain_s
        if self.saved_s > 0:
            self._num_on += 1
            if self._num_on >= _LASTING:
                self._pause = _FIRST_PAUSE
            return True
        self._num_on = 0
        self._num_plain += 1
        if self._num_plain <= self._pause:
            return False
        self._num_plain = 0
        self._pause = min(2 * self._pause, _LAST_PAUSE)
        self.min_length = _PROBE_LENGTH
        return True

    def observe(self, saved_s: float) -> None:
        """Learn what a round of drafting saved; below 0 what it lost."""
        if self.saved_s is None:
            return
        rate = _PROBE_RATE if self.min_length else _RATE
        self.saved_s = max(self._floor_s, self.saved_s + rate * (saved_s - self.saved_s))
