"""The model drafter in `cache` mode: it learns spellings between rounds."""

from collections.abc import Sequence, Set

from .bridge.following import Bridge
from .bridge.ngram_cache import NgramCache
from .bridge.walk import TrieWalk
from .drafting import ModelDrafter
from .speculative import CausalLM


class CachedDrafter(ModelDrafter):
    """A model drafter whose walk knows the direct map and what the target has emitted."""

    def __init__(
        self,
        model: CausalLM,
        bridge: Bridge,
        cache: NgramCache,
        *,
        num_pieces: int,
        end_token_ids: Set[int] = frozenset(),
    ) -> None:
        """Draft with these parts, see `ModelDrafter`.

        Args:
            model: The drafter; its cache belongs to this object from now on.
            bridge: The target's context in the drafter's pieces.
            cache: Is taught by this object, only between rounds.
            num_pieces: Pieces that the drafter gives logits for.
            end_token_ids: Target ids that end a response.
        """
        self._ngrams = cache
        self._trie_walk = TrieWalk(cache.trie, num_pieces)
        super().__init__(model, bridge, self._trie_walk, end_token_ids=end_token_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context by what the target decided, and learn to spell it."""
        super().observe(token_ids)
        self._ngrams.observe(token_ids)
        if self._trie_walk.trie is not self._ngrams.trie:
            self._trie_walk.use(self._ngrams.trie)
