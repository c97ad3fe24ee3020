"""The model drafter in `text` mode: it writes freely, and its text is cut into target tokens."""

from collections.abc import Sequence, Set

from .bridge.following import Bridge
from .bridge.text_walk import TextWalk
from .bridge.walk import Walk
from .drafting import ModelDrafter
from .sampling import Draw
from .speculative import CausalLM


class TextDrafter(ModelDrafter):
    """A model drafter whose pieces need not spell single tokens of the target.

    What it proposes is certain, so greedy decoding accepts more of it than of a walk
    through the trie, and sampling less, which can weigh what the walk was drawn from.
    """

    def __init__(
        self,
        model: CausalLM,
        bridge: Bridge,
        text: TextWalk,
        *,
        sampled: Walk | None = None,
        end_token_ids: Set[int] = frozenset(),
    ) -> None:
        """Draft with these parts, see `ModelDrafter`.

        Args:
            model: The drafter; its cache belongs to this object from now on.
            bridge: The target's context in the drafter's pieces.
            text: The drafter's text as target tokens; follows the context from now on.
            sampled: In place of `text` in rounds that draw at random.
            end_token_ids: Target ids that end a response.
        """
        self._text = text
        self._sampled = sampled
        super().__init__(model, bridge, text, end_token_ids=end_token_ids)

    def begin(self, context: Sequence[int]) -> None:
        """Follow a new context and prefill the model with it."""
        self._text.retokeniser.begin(context)
        super().begin(context)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context by what the target decided."""
        self._text.retokeniser.extend(token_ids)
        super().observe(token_ids)

    def _walk_for(self, draw: Draw | None) -> Walk:
        return self._text if draw is None or self._sampled is None else self._sampled
