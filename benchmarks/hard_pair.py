"""Draft modes compared where drafter and target cut text very differently.

    python benchmarks/hard_pair.py --bundle BUNDLE --pieces 8192 --text FILE FILE...
    python benchmarks/hard_pair.py --bundle BUNDLE --tokenizer FOLDER

No drafter with a small vocabulary comes with weights here, so one is made of the bundle's
drafter: in every context its law over its own tokens is summed up by the pieces that spell
them, exactly, in the pieces of a byte-level BPE trained on the files, or of another tokenizer.
The bundle's target verifies. All modes draft with as many drafter passes a round.
"""

import argparse
import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from omnidraft_npu.bridge.following import ByteBridge
from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import direct_spellings, full_spellings
from omnidraft_npu.bridge.text_walk import TextWalk
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.bridge.walk import TrieWalk, Walk
from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.prompts import builtin_prompts, first_of_each
from omnidraft_npu.proposal import ROOT
from omnidraft_npu.runtime.opened_pair import OpenedModel, OpenedPair, open_pair
from omnidraft_npu.speculative import CausalLM, generate

_MAX_SCORED = 8


class RespelledModel:
    """A language model over tokens as one over the pieces that spell them.

    Inside a token the law is the token law's, given the pieces so far; where a token may
    end there, the law after that token is mixed in with the probability that it does.
    """

    def __init__(self, opened: OpenedModel, encoder: PieceEncoder, trie: SpellingTrie) -> None:
        """Speak in pieces of `encoder` for the model of a bundle; `trie` spells its tokens."""
        self._model: CausalLM = opened.graph.begin(is_exact=False)
        self._pieces_of = encoder.vocabulary
        self._tokens_of = opened.vocabulary
        self._tokens = PieceEncoder(opened.tokenizer.json, opened.vocabulary)
        self._trie = trie
        self._fed: list[int] = []
        self._pieces: list[int] = []
        self.context_length = self._model.context_length
        self.vocab_size = encoder.vocabulary.size

    @property
    def length(self) -> int:
        return len(self._pieces)

    def prefill(self, token_ids: Sequence[int]) -> None:
        self._pieces += token_ids

    def rewind(self, length: int) -> None:
        del self._pieces[length:]

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits after the last piece, in every row."""
        self._pieces += token_ids
        law = self._law()
        return np.tile(np.log(law + 1e-30).astype(np.float32), (len(token_ids), 1))

    def _law(self) -> np.ndarray:
        context, node = self._parse()
        ending = self._trie.tokens(node)[:1].tolist() if node != ROOT else []
        laws = self._token_laws(context, ending)
        law = np.zeros(self.vocab_size)
        starts, _ = self._trie.children(ROOT)
        if node == ROOT:
            law[starts] = self._trie.branch_masses(ROOT, laws[0])[:-1]
            return law
        masses = self._trie.branch_masses(node, laws[0])
        masses = masses / max(masses.sum(), 1e-30)
        if ending:
            law[starts] = masses[-1] * self._trie.branch_masses(ROOT, laws[1])[:-1]
        law[self._trie.children(node)[0]] += masses[:-1]
        return law

    def _token_laws(self, context: list[int], ending: list[int]) -> list[np.ndarray]:
        """The model's laws after the context, and after the token that may end there."""
        wanted = context + ending
        common = 0
        while common < min(len(self._fed), len(context) - 1):
            if self._fed[common] != wanted[common]:
                break
            common += 1
        self._model.rewind(common)
        missing = wanted[common:]
        if len(missing) > _MAX_SCORED:
            self._model.prefill(missing[: -1 - len(ending)])
            missing = missing[-1 - len(ending) :]
        rows = self._model.score(missing)[-1 - len(ending) :].astype(np.float64)
        self._fed = wanted
        laws = np.exp(rows - rows.max(axis=1, keepdims=True))
        return list(laws / laws.sum(axis=1, keepdims=True))

    def _parse(self) -> tuple[list[int], int]:
        """Tokens of the text up to its last word, then the longest that its pieces spell."""
        spelled = [self._pieces_of.token_bytes(piece) for piece in self._pieces]
        word = max((i for i, data in enumerate(spelled) if data[:1].isspace()), default=0)
        bos = self._tokens_of.bos_token_id
        context = [] if bos is None else [bos]
        context += self._tokens.encode(b"".join(spelled[:word]))[0]
        node, run = ROOT, b""
        for piece, data in zip(self._pieces[word:], spelled[word:], strict=True):
            step = self._child(node, piece)
            if step is None and run:
                context += self._ending(node, run)
                run, step = b"", self._child(ROOT, piece)
            node, run = (ROOT, b"") if step is None else (step, run + data)
        if not context:  # a model without BOS needs something to continue
            context, node = self._ending(node, run), ROOT
        return context, node

    def _ending(self, node: int, run: bytes) -> list[int]:
        """The token that ends at a node, else shorter ones that spell what led there."""
        return self._trie.tokens(node)[:1].tolist() or self._tokens.encode(run)[0]

    def _child(self, node: int, piece: int) -> int | None:
        pieces, nodes = self._trie.children(node)
        at = int(pieces.searchsorted(piece))
        return int(nodes[at]) if at < len(pieces) and pieces[at] == piece else None


def train_pieces(paths: Sequence[Path], num_pieces: int) -> dict:
    """The `tokenizer.json` of a byte-level BPE; id 0 ends a response."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_pieces,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in paths], trainer)
    return json.loads(tokenizer.to_str())


def first_pieces(document: dict, count: int) -> dict:
    """A BPE tokenizer after `count` pieces of its training; id `count` ends a response."""
    model = document["model"]
    vocab = {piece: i for piece, i in model["vocab"].items() if i < count}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = [(a, b) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
    end = {"id": count, "content": "</s>", "special": True, "single_word": False}
    end |= {"lstrip": False, "rstrip": False, "normalized": False}
    return document | {
        "added_tokens": [end],
        "post_processor": None,
        "model": model | {"vocab": vocab, "merges": merges},
    }


def add_pieces(parser: argparse.ArgumentParser) -> None:
    """Options that say which pieces the drafter is made one of; `open_pieces` reads them."""
    parser.add_argument("--text", type=Path, nargs="+", help="Learn the pieces from these files.")
    parser.add_argument("--pieces", type=int, default=8192, help="So many.")
    parser.add_argument("--tokenizer", type=Path, help="Take the pieces of this folder's.")
    parser.add_argument("--first", type=int, help="Only its first, of a byte-level BPE.")


def open_pieces(arguments: argparse.Namespace) -> PieceEncoder:
    """The drafter's vocabulary."""
    if arguments.tokenizer:
        text = (arguments.tokenizer / "tokenizer.json").read_text(encoding="utf-8")
        document = json.loads(text)
        if arguments.first:
            document = first_pieces(document, arguments.first)
            ends, bos = (arguments.first,), None
        else:
            ids = {entry["content"]: entry["id"] for entry in document["added_tokens"]}
            ends, bos = (ids["</s>"],), ids.get("<s>")
    else:
        document, ends, bos = train_pieces(arguments.text, arguments.pieces), (0,), None
    vocabulary = Vocabulary.from_tokenizer_json(document, eos_token_ids=ends, bos_token_id=bos)
    return PieceEncoder(document, vocabulary)


def drafters(pair: OpenedPair, encoder: PieceEncoder) -> dict[str, ModelDrafter]:
    """One for each mode, each with a cache of its own."""
    assert pair.drafter is not None
    target, tokens = pair.target.vocabulary, pair.drafter.vocabulary
    spelled = SpellingTrie.build(full_spellings(encoder, tokens), tokens.size)
    tries = {
        "direct": SpellingTrie.build(direct_spellings(encoder.vocabulary, target), target.size),
        "full": SpellingTrie.build(full_spellings(encoder, target), target.size),
    }
    num_pieces = encoder.vocabulary.size
    walks: dict[str, Walk] = {mode: TrieWalk(trie, num_pieces) for mode, trie in tries.items()}
    cutter = PieceEncoder(pair.target.tokenizer.json, target)
    walks["text"] = TextWalk(encoder.vocabulary, cutter)
    return {
        mode: ModelDrafter(
            RespelledModel(pair.drafter, encoder, spelled),
            ByteBridge(encoder, target),
            walk,
            end_token_ids=frozenset(pair.target.entry.eos_token_ids),
        )
        for mode, walk in walks.items()
    }


def measure(
    pair: OpenedPair, drafter: ModelDrafter, prompts: Sequence[list[int]], config: DecodeConfig
) -> tuple[collections.Counter[str], list[int]]:
    """Counts over all responses, and what the target wrote."""
    target, lengths = pair.target.graph.begin(), pair.target.vocabulary.lengths
    counts: collections.Counter[str] = collections.Counter()
    written: list[int] = []
    for seed, prompt in enumerate(prompts):
        target.rewind(0)
        sampling = dataclasses.replace(config.sampling, seed=seed)
        for one in generate(
            drafter, target, prompt, dataclasses.replace(config, sampling=sampling)
        ):
            counts["rounds"] += 1
            counts["proposed"] += one.num_proposed
            counts["accepted"] += one.verdict.num_accepted
            counts["bytes"] += int(lengths[list(one.verdict.token_ids)].sum())
            written += one.verdict.token_ids
    return counts, written


def main() -> None:
    """Measure every mode and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--target")
    add_pieces(parser)
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    if not arguments.text and not arguments.tokenizer:
        parser.error("give --text, files to train pieces on, or --tokenizer, a folder")
    pair = open_pair(arguments.bundle, target=arguments.target, threads=arguments.threads)
    encoder = open_pieces(arguments)
    prompts = [
        pair.target.tokenizer.encode(one.prompt, add_special=True)
        for one in first_of_each(builtin_prompts(), arguments.per_task)
    ]
    config = DecodeConfig(
        max_new_tokens=arguments.max_new_tokens,
        max_draft_tokens=arguments.draft_tokens,
        stop_token_ids=frozenset(pair.target.entry.eos_token_ids),
        sampling=SamplingConfig(temperature=arguments.temperature),
    )
    assert pair.drafter is not None
    print(
        f"{pair.drafter.entry.name} in {encoder.vocabulary.size} pieces drafts for "
        f"{pair.target.entry.name}; {len(prompts)} prompts, {arguments.max_new_tokens} new tokens, "
        f"{arguments.draft_tokens} pieces a round, temperature {arguments.temperature}\n\n"
        "| mode | accepted | tokens per target forward | bytes per target forward "
        "| over direct | tokens that are single pieces |\n|---" + "|---:" * 5 + "|",
        flush=True,
    )
    direct_bytes = 0.0
    for mode, drafter in drafters(pair, encoder).items():
        counts, written = measure(pair, drafter, prompts, config)
        bytes_per_forward = counts["bytes"] / counts["rounds"]
        direct_bytes = direct_bytes or bytes_per_forward
        spelled = [pair.target.vocabulary.token_bytes(i) for i in written]
        num_single = sum(data in encoder.vocabulary.by_bytes for data in spelled)
        print(
            f"| {mode} | {100 * counts['accepted'] / counts['proposed']:.0f} % "
            f"| {len(written) / counts['rounds']:.2f} | {bytes_per_forward:.2f} "
            f"| {100 * (bytes_per_forward / direct_bytes - 1):+.0f} % "
            f"| {100 * num_single / len(written):.0f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
