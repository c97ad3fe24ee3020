"""Drafting free text: any pieces, cut into target tokens at the end of the round."""

from ..proposal import Visit
from ..sampling import Draw, to_weights
from ..token_law import Sampler
from .pieces import PieceEncoder
from .spelling import end_aliases, end_pieces
from .vocabulary import Vocabulary
from .walk import Logits


class TextWalk:
    """Takes whatever the drafter writes, also pieces that cross the boundaries of target tokens.

    No law over target tokens is known for them, so they are proposed as certain ones. The
    text is cut by itself: what was decided is never cut anew, and with it in front 5 of
    11,225 cuts were others. The last token may go on in text that was not drafted any
    more; it is proposed as it is, since it is mostly right.
    """

    trie = None

    def __init__(self, drafter: Vocabulary, encoder: PieceEncoder) -> None:
        """Write in pieces of `drafter`, and cut with the `encoder` of the target."""
        self._drafter = drafter
        self._encoder = encoder
        target = encoder.vocabulary
        ends = end_pieces(drafter, target)
        # Preferred is the token whose role is that of its piece, then the lowest id.
        by_preference = sorted(ends, key=lambda i: (target.roles[i] == drafter.roles[ends[i]], -i))
        self._ends = {ends[i]: i for i in by_preference}
        for piece, stand_in in end_aliases(drafter, target).items():
            self._ends[piece] = self._ends[stand_in]
        self.begin()

    @property
    def visits(self) -> list[tuple[Visit, ...]]:
        """None: tokens are certain."""
        return []

    def begin(self) -> None:
        """Start a new round."""
        self.token_ids: list[int] = []
        self._data = b""
        self._end: list[int] = []

    def step(self, logits: Logits, draw: Draw | None = None) -> int | None:
        """The next piece, the likeliest or one drawn with `draw`; None ends the round."""
        if draw is None:
            piece = int(logits.argmax())
        else:
            law = Sampler(to_weights(logits, draw.sampling))
            if not law.total > 0:
                return None
            piece = law.draw(draw.rng)
        data = self._drafter.token_bytes(piece)
        if not data:
            self._end = [self._ends[piece]] if piece in self._ends else []
            return None
        self._data += data
        return piece

    def finish(self) -> bool:
        """Cut the text into tokens; False where there are none."""
        self.token_ids = self._end
        if self._data:
            self.token_ids = self._encoder.encode(self._data)[0] + self._end
        return bool(self.token_ids)
