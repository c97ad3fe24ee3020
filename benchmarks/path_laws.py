"""Laws of target and drafter along the target's own text, recorded for `draft_modes.py`."""

import argparse
from dataclasses import dataclass

import hard_pair
import numpy as np

from omnidraft_npu.bridge.following import ByteBridge
from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import direct_spellings, full_spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.commands.measuring import encode_prompts
from omnidraft_npu.prompts import TaskPrompt
from omnidraft_npu.proposal import ROOT
from omnidraft_npu.runtime.session import Session, open_session
from omnidraft_npu.speculative import CausalLM


@dataclass(frozen=True, kw_only=True)
class Way:
    """A token's way through a trie and the target's masses on it."""

    pieces: list[int]
    nodes: list[int]
    """From the root on."""
    under: list[float]
    """Of all tokens under each node."""
    ending: list[float]
    """Of those that end there."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a text; no path in a mode without a spelling of it."""

    token_id: int
    paths: dict[str, Way | None]
    laws: np.ndarray
    """``[pieces of its path in full, pieces of the drafter]`` logits before each."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What the laws are read with."""

    tries: dict[str, SpellingTrie]
    num_pieces: int
    lengths: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Text:
    """What the target wrote after one prompt."""

    task: str
    tokens: list[Token]


class Recorder:
    """A target and a drafter of a bundle, and the tries between them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Open both."""
        self.session = self._open(arguments, arguments.target)
        pair = self.session.pair
        drafter = pair.drafter
        if arguments.drafter:
            drafter = self._open(arguments, arguments.drafter).pair.target
        assert drafter is not None
        if arguments.text or arguments.tokenizer:
            encoder = hard_pair.open_pieces(arguments)
            spelled = full_spellings(encoder, drafter.vocabulary)
            trie = SpellingTrie.build(spelled, drafter.vocabulary.size)
            self._drafter: CausalLM = hard_pair.RespelledModel(drafter, encoder, trie)
        else:
            encoder = PieceEncoder(drafter.tokenizer.json, drafter.vocabulary)
            self._drafter = drafter.graph.begin(is_exact=False)
        target = pair.target.vocabulary
        self.pair = Pair(
            tries={
                "direct": SpellingTrie.build(
                    direct_spellings(encoder.vocabulary, target), target.size
                ),
                "full": SpellingTrie.build(full_spellings(encoder, target), target.size),
            },
            num_pieces=encoder.vocabulary.size,
            lengths=target.lengths.astype(np.float64),
        )
        self._bridge = ByteBridge(encoder, target)
        self._target = pair.target.graph.begin(is_exact=False)
        self._stops = frozenset(pair.target.entry.eos_token_ids)
        self._temperature = arguments.temperature

    @staticmethod
    def _open(arguments: argparse.Namespace, name: str | None) -> Session:
        return open_session(
            arguments.bundle, target=name, proposer="model", threads=arguments.threads
        )

    def record(self, prompt: TaskPrompt, num_tokens: int, seed: int) -> Text:
        """Continue one prompt; up to a token that the drafter's pieces cannot spell."""
        (ids,) = encode_prompts(self.session, [prompt], raw=False)
        rng = np.random.default_rng(seed)
        self._target.rewind(0)
        self._target.prefill(ids[:-1])
        self._bridge.begin(ids)
        *head, last = self._bridge.pieces
        self._drafter.rewind(0)
        self._drafter.prefill(head)
        token, tokens, fed = ids[-1], [], [last]
        while len(tokens) < num_tokens and token not in self._stops:
            law = np.exp(shifted(self._target.score([token])[-1]) / (self._temperature or 1))
            law /= law.sum()
            token = int(rng.choice(len(law), p=law) if self._temperature else law.argmax())
            paths = {mode: _path(trie, token, law) for mode, trie in self.pair.tries.items()}
            path = paths["full"]
            if path is None:
                break
            laws = []
            for piece in path.pieces:
                laws.append(self._drafter.score(fed)[-1].copy())
                fed = [piece]
            tokens.append(Token(token_id=token, paths=paths, laws=np.array(laws)))
        return Text(task=prompt.task, tokens=tokens)


def _path(trie: SpellingTrie, token: int, law: np.ndarray) -> Way | None:
    end = int(trie.token_nodes[token])
    if end < 0:
        return None
    nodes, pieces = [ROOT], []
    while nodes[-1] != end:
        starts, below = trie.children(nodes[-1])
        branch = int(below.searchsorted(end, side="right")) - 1
        pieces.append(int(starts[branch]))
        nodes.append(int(below[branch]))
    return Way(
        pieces=pieces,
        nodes=nodes,
        under=[1.0, *(float(law[trie.subtree_tokens(node)].sum()) for node in nodes[1:])],
        ending=[float(law[trie.tokens(node)].sum()) for node in nodes],
    )


def shifted(logits: np.ndarray) -> np.ndarray:
    """Logits of which the largest is 0, in float64."""
    wide = logits.astype(np.float64)
    return wide - wide.max()
