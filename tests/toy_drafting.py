"""Random toy pairs of drafter and target for exact laws."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

import numpy as np
from exact_laws import (
    BranchingGenerator,
    ExactModel,
    exact_arithmetic,
    exact_law,
    generate_exactly,
    law_of_target,
    law_of_tokens,
    total_variation,
)

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import Spellings
from omnidraft_npu.bridge.text_walk import TextWalk
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import Role, Vocabulary
from omnidraft_npu.bridge.walk import PlainWalk, TrieWalk
from omnidraft_npu.config import SamplingConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.proposal import Proposal, Rule, Stop
from omnidraft_npu.sampling import Draw

NUM_PIECES = 5
NUM_TOKENS = 6


class RunsBridge:
    """Follows target ids as runs of pieces given beforehand, after one piece that begins all."""

    num_head = 1

    def __init__(self, runs: dict[int, list[int]]) -> None:
        self.runs = runs
        self.pieces: list[int] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        self.pieces = [0]
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> int:
        length = len(self.pieces)
        for token_id in token_ids:
            self.pieces += self.runs.get(token_id, [])
        return length


class ToyPair:
    """Two models and the runs of pieces that spell some of the target's tokens.

    Pieces may be masked, inner nodes may hold no token or two, tokens may be unmapped.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.target = ExactModel(self.rng, NUM_TOKENS)
        self.drafter = ExactModel(self.rng, NUM_PIECES)
        self.runs = self._random_runs(3)
        self.aliases = {4: self.runs[0][0]} if self.rng.integers(2) else {}
        self.aliases = {a: b for a, b in self.aliases.items() if a != b}
        self.runs = {
            token: [self.aliases.get(piece, piece) for piece in run]
            for token, run in self.runs.items()
        }

    def _random_runs(self, longest: int) -> dict[int, list[int]]:
        order = self.rng.permutation(NUM_TOKENS)[: self.rng.integers(3, NUM_TOKENS + 1)].tolist()
        runs = {
            token: self.rng.integers(0, NUM_PIECES, self.rng.integers(1, longest + 1)).tolist()
            for token in order
        }
        return {0: runs.pop(0, [int(self.rng.integers(NUM_PIECES))]), **runs}

    def trie(self, runs: dict[int, list[int]]) -> SpellingTrie:
        return SpellingTrie.build(Spellings.from_runs(runs, self.aliases), NUM_TOKENS)

    def drafter_of(self, runs: dict[int, list[int]], rule: Rule = "lossless") -> ModelDrafter:
        walk = TrieWalk(self.trie(runs), NUM_PIECES)
        return ModelDrafter(self.drafter, RunsBridge(self.runs), walk, rule=rule)

    def full(self, context: Sequence[int]) -> ModelDrafter:
        """Every mapped token."""
        return self.drafter_of(self.runs)

    def direct(self, context: Sequence[int]) -> ModelDrafter:
        """Tokens of one piece only."""
        return self.drafter_of({t: run for t, run in self.runs.items() if len(run) == 1})

    def cache(self, context: Sequence[int]) -> ModelDrafter:
        """Another choice of tokens after every context."""
        known = np.random.default_rng([len(context), *context]).integers(0, 2, NUM_TOKENS)
        return self.drafter_of({t: run for t, run in self.runs.items() if known[t]})

    def paper(self, context: Sequence[int]) -> ModelDrafter:
        return self.drafter_of(self.runs, "paper")

    def plain(self, context: Sequence[int]) -> ModelDrafter:
        """Pieces taken for the tokens of equal ids."""
        same = {i: [i] for i in range(NUM_PIECES)}
        return ModelDrafter(self.drafter, RunsBridge(same), PlainWalk(NUM_PIECES))

    def text(self, context: Sequence[int]) -> ModelDrafter:
        """Pieces are letters, and their text is cut into the longest tokens."""
        letters = {i: [i] for i in range(NUM_PIECES)}
        encoder = LongestMatches(vocabulary_of(self.runs, NUM_TOKENS))
        text = TextWalk(vocabulary_of(letters, NUM_PIECES), encoder)
        return ModelDrafter(self.drafter, RunsBridge(self.runs), text)

    def point(self, context: Sequence[int]) -> "PointProposer":
        return PointProposer()

    def cascade(self, context: Sequence[int]) -> "MixedProposer":
        return MixedProposer(self.full(context))


def vocabulary_of(runs: dict[int, list[int]], size: int) -> Vocabulary:
    """Every id spelled by a letter for each piece of its run; the others are special."""
    spelled = [bytes(97 + piece for piece in runs.get(i, ())) for i in range(size)]
    return Vocabulary(
        blob=b"".join(spelled),
        offsets=np.cumsum([0, *map(len, spelled)]),
        roles=np.array([Role.TEXT if data else Role.OTHER for data in spelled], np.uint8),
        is_fallback=np.zeros(size, np.bool_),
        special_contents={i: f"<{i}>" for i in range(size) if not spelled[i]},
        bos_token_id=None,
    )


class LongestMatches(PieceEncoder):
    """Spells without a tokenizer; letters that begin no token are left out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def encode(self, data: bytes) -> tuple[list[int], list[int]]:
        return self._longest_matches(data)


class PointProposer:
    """The same tokens after every equal context, with certainty."""

    def begin(self, context: Sequence[int]) -> None:
        self.context = list(context)

    def observe(self, token_ids: Sequence[int]) -> None:
        self.context += token_ids

    def propose(
        self, max_draft_tokens: int, draw: Draw | None = None, control: object = None
    ) -> Proposal:
        rng = np.random.Generator(np.random.PCG64([len(self.context), *self.context]))
        tokens = rng.integers(0, NUM_TOKENS, rng.integers(0, max_draft_tokens + 1))
        return Proposal(token_ids=tuple(tokens.tolist()))


class MixedProposer(PointProposer):
    """After some contexts a certain token and then a model's draft, after others one of both."""

    def __init__(self, model: ModelDrafter) -> None:
        self.model = model

    def begin(self, context: Sequence[int]) -> None:
        super().begin(context)
        self.model.begin(context)

    def observe(self, token_ids: Sequence[int]) -> None:
        super().observe(token_ids)
        self.model.observe(token_ids)

    def propose(
        self, max_draft_tokens: int, draw: Draw | None = None, control: object = None
    ) -> Proposal:
        if sum(self.context) % 3 == 0:
            return super().propose(max_draft_tokens, draw)
        drafted = self.model.propose(max_draft_tokens, draw, control)
        if sum(self.context) % 3 == 1:
            return drafted
        first = (sum(self.context) + 1) % NUM_TOKENS
        return Proposal(
            token_ids=(first, *drafted.token_ids), walk=((), *drafted.walk), trie=drafted.trie
        )


class LawStops:
    """Ends drafting by what the drafter's laws so far look like: before a pass, or a draw."""

    def __init__(self) -> None:
        self._seen = 1

    def before_pass(self) -> Stop | None:
        return "cost" if self._seen % 3 == 0 else None

    def before_draw(self, logits: np.ndarray, hidden: object) -> Stop | None:
        self._seen = hash((self._seen, *logits.tolist()))
        return "cost" if self._seen % 4 == 0 else None


class StoppedProposer:
    """A proposer whose rounds end by `LawStops`."""

    def __init__(self, proposer: ModelDrafter) -> None:
        self._proposer = proposer
        self.begin, self.observe = proposer.begin, proposer.observe
        self.stops: set[Stop] = set()

    def propose(self, max_draft_tokens: int, draw: Draw | None = None) -> Proposal:
        proposal = self._proposer.propose(max_draft_tokens, draw, LawStops())
        self.stops.add(proposal.stop)
        return proposal


class PickyProposer(StoppedProposer):
    """Leaves out the last token of a draft for what it is, which is a bug."""

    def propose(self, max_draft_tokens: int, draw: Draw | None = None) -> Proposal:
        proposal = self._proposer.propose(max_draft_tokens, draw)
        if not proposal.token_ids or proposal.token_ids[-1] % 2:
            return proposal
        return replace(
            proposal,
            token_ids=proposal.token_ids[:-1],
            walk=proposal.walk[: len(proposal.token_ids) - 1],
        )


def distance(
    pair: ToyPair,
    mode: str,
    k: int,
    *,
    num_tokens: int = 2,
    max_thinned: int = 0,
    max_drawn: int = 0,
    options: Mapping[str, float] = MappingProxyType({}),
    wrap: Callable[[ModelDrafter], StoppedProposer] | None = None,
) -> Fraction:
    """Total variation of drafted from plain decoding in one toy pair."""
    make = getattr(pair, mode)
    with exact_arithmetic(max_thinned, SamplingConfig(temperature=1.0, **options), max_drawn):
        drafted = law_of_tokens(
            make if wrap is None else lambda context: wrap(make(context)),
            pair.target,
            [0],
            k,
            num_tokens,
        )
    return total_variation(drafted, law_of_target(pair.target, [0], num_tokens))


def conversation_distance(pair: ToyPair, num_tokens: int = 3) -> Fraction:
    """The same over the rounds of one `generate`, with one piece a round."""
    proposer = pair.full([0])

    def tokens(generator: BranchingGenerator) -> tuple[int, ...]:
        found: list[int] = []
        for one in generate_exactly(generator, proposer, pair.target, [0], 1):
            found += one.verdict.token_ids
            if len(found) >= num_tokens:
                break
        return tuple(found[:num_tokens])

    with exact_arithmetic():
        drafted = exact_law(tokens)
    return total_variation(drafted, law_of_target(pair.target, [0], num_tokens))
