"""The model drafter: a small model that drafts for the target through the bridge."""

import time
from collections.abc import Sequence, Set

from .bridge.following import Bridge
from .bridge.walk import Walk
from .proposal import Proposal, Rule, Stop
from .sampling import Draw
from .speculative import CausalLM, DraftControl, Logits

_MAX_SCORED = 16
"""Pieces that are scored at once; of more, all but the last are prefilled first."""


class ModelDrafter:
    """A proposer that follows the context in the drafter's own pieces and drafts from its logits.

    Up to `max_draft_tokens` pieces are drawn a round; the walk turns them into target
    tokens. Drafting stops after an end-of-response token.

    The model's cache is cropped to what the new context has in common with the old. A
    context that outgrows the drafter's own context length is followed in its later
    part: half the length is kept, and prefilled anew each time the window is full.
    """

    def __init__(
        self,
        model: CausalLM,
        bridge: Bridge,
        walk: Walk,
        *,
        greedy_walk: Walk | None = None,
        end_token_ids: Set[int] = frozenset(),
        rule: Rule = "lossless",
    ) -> None:
        """Draft with these parts.

        Args:
            model: The drafter; its cache belongs to this object from now on.
            bridge: The target's context in the drafter's pieces.
            walk: The drafter's pieces as target tokens.
            greedy_walk: In place of `walk` in rounds that draw nothing at random.
            end_token_ids: Target ids that end a response.
            rule: How the target verifies the proposals.
        """
        self._model = model
        self._bridge = bridge
        self._walk = walk
        self._greedy_walk = greedy_walk or walk
        self._end_token_ids = end_token_ids
        self._rule: Rule = rule
        self._cached: list[int] = []
        """Pieces in the model's cache."""
        self._settled = 0
        """Leading pieces of the bridge that are as they were when `_cached` last followed them."""
        self._window = bridge.num_head
        """First piece after the head that the model sees."""
        self._model_s = 0.0
        model.rewind(0)

    def begin(self, context: Sequence[int]) -> None:
        """Follow a new context and prefill the model with it."""
        self._bridge.begin(context)
        self._settled = self._window = self._bridge.num_head
        missing = self._crop(1 + self._model.context_length // 8)
        if len(missing) > 1 and len(self._cached) + len(missing) <= self._model.context_length:
            self._model.prefill(missing[:-1])
            self._cached += missing[:-1]

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context by what the target decided."""
        self._settled = min(self._settled, self._bridge.extend(token_ids))

    def propose(
        self,
        max_draft_tokens: int,
        draw: Draw | None = None,
        control: DraftControl | None = None,
    ) -> Proposal:
        """Draw up to `max_draft_tokens` pieces and give the target tokens that they spell.

        Empty where there is no context to draft from, it does not fit into the model, or
        the pieces spell nothing.
        """
        walk, self._model_s = self._greedy_walk if draw is None else self._walk, 0.0
        walk.begin()
        stop = self._draw_pieces(max_draft_tokens, walk, draw, control)
        walk.finish()
        return Proposal(
            token_ids=tuple(walk.token_ids[:max_draft_tokens]),
            walk=tuple(walk.visits),
            trie=walk.trie,
            rule=self._rule,
            model_s=self._model_s,
            stop=stop,
        )

    def _draw_pieces(
        self, max_pieces: int, walk: Walk, draw: Draw | None, control: DraftControl | None
    ) -> Stop:
        """Let the walk take pieces; why it took no more."""
        stop = None if control is None else control.before_pass()
        if stop is not None:
            return stop
        missing = self._crop(max_pieces)
        if not missing:
            return "nothing"
        room = self._model.context_length - len(self._cached) - len(missing) + 1
        for i in range(min(max_pieces, room)):
            if control is not None and i > 0 and (stop := control.before_pass()) is not None:
                return stop
            logits = self._score(missing)
            if control is not None:
                hidden = self._model.hidden_states
                state = None if hidden is None else hidden[-1]
                if (stop := control.before_draw(logits, state)) is not None:
                    return stop
            piece = walk.step(logits, draw)
            if piece is None or (walk.token_ids and walk.token_ids[-1] in self._end_token_ids):
                return "end"
            missing = [piece]
        return "budget" if room >= max_pieces else "context"

    def _score(self, pieces: Sequence[int]) -> Logits:
        """``[pieces]`` logits after these, which join the cache."""
        start = time.perf_counter()
        at_once = pieces
        if len(pieces) > _MAX_SCORED:
            self._model.prefill(pieces[:-1])
            at_once = pieces[-1:]
        logits: Logits = self._model.score(at_once)[-1]
        # Not before: an interrupted pass must not leave more here than the model holds.
        self._cached += pieces
        self._model_s += time.perf_counter() - start
        return logits

    def _crop(self, num_new: int) -> Sequence[int]:
        """Crop the cache to what it shares with the context; the pieces that it lacks.

        At least one, so that there are logits to draft from, unless the context is empty.
        Leaves room to draw `num_new` pieces, where the context length allows.
        """
        pieces, head = self._bridge.pieces, self._bridge.num_head
        limit = self._model.context_length
        if len(pieces) <= self._window:
            self._move_window(head)
        if head + len(pieces) - self._window + num_new - 1 > limit:
            self._move_window(len(pieces) - max(1, limit // 2 - head))
        shift = self._window - head
        num_visible = len(pieces) - shift
        common = min(len(self._cached), max(self._settled - shift, head))
        end = min(len(self._cached), num_visible - 1)
        while common < end and self._cached[common] == pieces[common + shift]:
            common += 1
        common = max(0, min(common, end))
        self._settled = len(pieces)
        del self._cached[common:]
        self._model.rewind(common)
        return [*pieces[common:head], *pieces[max(common, head) + shift :]]

    def _move_window(self, window: int) -> None:
        self._window = max(window, self._bridge.num_head)
        del self._cached[self._bridge.num_head :]
