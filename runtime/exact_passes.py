"""Passes in which a token's logits and cache rows have the same bits whatever its neighbours.

Speculative decoding scores a token among drafts, plain decoding scores it alone, and a later
turn may prefill it. An operator may take its sums in another order each time. The difference is
tiny, but quantised activations round it up to steps, and a greedy text can part at a near-tie.
On every processor looked at only attention depends on its neighbours, in three ways:

* A row that is alone in its tile takes another kernel: passes have two rows or more, and no
  multiple of a tile and one more.
* On Arm, the keys of a pass are summed by fours, so a row's bits depend on whether the pass
  reaches the next multiple: passes are filled up to it.
* With heads of over 128 channels the order also depends on whether the last block of keys is
  more than half full, at places that depend on the processor's cache: no pass crosses them.

So rows are added to a pass where needed: copies of its last token, of which nothing stays.
`exact_search` finds which of the three hold on the machine at hand (docs/exactness.md).
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

_TILE = 16
"""Attention's tiles are a multiple of this many rows: twice the head's channels, or as many keys
as fit in a part of the processor's second-level cache.

Source:
    onnxruntime, contrib_ops/cpu/bert/gqa_attention_base.h (`q_block_size`).
"""


class Pass(NamedTuple):
    """One forward pass over new tokens."""

    num_tokens: int
    total: int
    """Keys that attention sees, those of added rows among them."""
    num_repeated: int = 0
    """Tokens before the new ones, in the cache already, that the pass computes again."""


@dataclass(frozen=True, kw_only=True)
class ExactRule:
    """What makes the bits of a row independent of the pass it is computed in."""

    min_rows: int = 1
    """Fewest rows of a pass."""
    key_multiple: int = 1
    """What the number of keys of a pass is a multiple of."""
    first_cut: int | None = None
    """The least number of keys that no pass may cross; None if there are none."""
    cut_every: int = 1
    """Keys from one such place to the next."""
    whole_pass: bool = False
    """Whether rows are added to every operator and not to attention alone."""
    holds: bool = True
    """Whether a test on this machine found that the bits are equal so."""

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @property
    def max_added_rows(self) -> int:
        """Most rows of a pass that are not its new tokens'."""
        return self.min_rows + 2 * self.key_multiple

    def total(self, start: int, num_tokens: int, context_length: int) -> int:
        """Keys that a pass over `num_tokens` tokens from `start` on shows to attention."""
        total = max(start + num_tokens, start + self.min_rows)
        total += -total % self.key_multiple
        if self.min_rows > 1 and (total - start) % _TILE == 1:
            total += self.key_multiple
        return min(total, context_length)

    def next_pass(self, start: int, num_tokens: int, context_length: int) -> Pass:
        """The longest exact pass over the first of `num_tokens` tokens from `start` on.

        Args:
            start: Tokens in the cache.
            num_tokens: Tokens still to compute, at least one.
            context_length: Most keys that the cache holds.
        """
        n = self._within_cuts(start, num_tokens, context_length)
        total = self.total(start, n, context_length)
        # At the context's end there is no room for rows behind a token.
        while n > 1 and self._leaves_one(total - start):
            n -= 1
            total = self.total(start, n, context_length)
        is_alone = total - start < self.min_rows
        return Pass(n, total, 1 if is_alone and start else 0)

    def _leaves_one(self, num_rows: int) -> bool:
        return self.min_rows > 1 and num_rows % _TILE == 1

    def _within_cuts(self, start: int, num_tokens: int, context_length: int) -> int:
        """Tokens, at least one, whose pass crosses no cut."""
        if self.first_cut is None:
            return num_tokens
        block = self._block(self.total(start, 1, context_length))
        end = self.first_cut + block * self.cut_every
        n = max(1, min(num_tokens, end - start))
        while n > 1:
            alone = self.total(start + n - 1, 1, context_length)
            if self._block(max(alone, self.total(start, n, context_length))) == block:
                break
            n -= 1
        return n

    def _block(self, total: int) -> int:
        """How many cuts lie below so many keys."""
        assert self.first_cut is not None
        return max(0, -(-(total - self.first_cut) // self.cut_every))


NOT_EXACT = ExactRule(holds=False)
"""Passes as they come, where nothing makes them exact or nothing has to."""
