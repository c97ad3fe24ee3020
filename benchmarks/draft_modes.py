"""Draft modes `direct` and `full` task by task, computed from laws along the target's own text.

    python benchmarks/draft_modes.py --bundle BUNDLE --prompts FILE --laws FOLDER --temperature 1

The target continues every prompt once, whatever is drafted: the text has its law. Recorded are
its masses on the path of each token through both tries, and the drafter's laws along that path.
A token x of the text was an accepted draft with the probability that each branching b of its
path was drafted and accepted, given that x was emitted: the product of min(1, beta(b) / tau(b)).
So the expected number of rounds of the text follows for any draft length, without chance but
that of the text. With temperature 0 the walk itself drafts from the recorded laws.

With --text the drafter is made one of few pieces, with --tokenizer one of another tokenizer's,
as `hard_pair.py` does it. What is in the folder already is not recorded anew.
"""

import argparse
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hard_pair
import numpy as np
from path_laws import Pair, Recorder, Text, Way, shifted

from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.walk import TrieWalk
from omnidraft_npu.files import atomic_path
from omnidraft_npu.prompts import builtin_prompts, first_of_each, read_prompts
from omnidraft_npu.proposal import ROOT

MODES = ("direct", "full")


class Sampled:
    """Probabilities that the tokens of one text were accepted drafts, at its temperature."""

    def __init__(self, text: Text, trie: SpellingTrie, mode: str, temperature: float) -> None:
        self._trie = trie
        self._starts = trie.children(ROOT)[0].astype(np.int64)
        self._paths = [token.paths[mode] for token in text.tokens]
        self._weights = [np.exp(shifted(t.laws) / temperature) for t in text.tokens]
        self._known: dict[tuple[int, bool, int], float] = {}

    def round_from(self, start: int, k: int) -> np.ndarray:
        """``[tokens]`` probability that a round from a token on ends with each one."""
        ends = np.zeros(len(self._paths))
        reach, budget, before = 1.0, k, ROOT
        for i in range(start, len(ends)):
            path = self._paths[i]
            if path is None or len(path.pieces) > budget or i == len(ends) - 1:
                ends[i] += reach
                break
            budget -= len(path.pieces)
            key = (i, budget == 0, before)
            if key not in self._known:
                self._known[key] = self._accepted(i, path, is_last=budget == 0, before=before)
            ends[i] += reach * (1 - self._known[key])
            reach *= self._known[key]
            before = path.nodes[-1] if budget else ROOT
        return ends

    def _accepted(self, i: int, path: Way, *, is_last: bool, before: int) -> float:
        """Of token i, after one that ended at node `before`."""
        weights, trie = self._weights[i], self._trie
        starts = np.setdiff1d(self._starts, trie.children(before)[0]) if before else self._starts
        if path.pieces[0] not in starts:
            return 0.0
        accepted = _ratio(weights[0][path.pieces[0]], weights[0][starts].sum(), path, 0)
        for depth in range(1, len(path.pieces)):
            extending, stop = self._branches(path.nodes[depth], weights[depth])
            weight = weights[depth][path.pieces[depth]]
            accepted *= _ratio(weight, extending + stop, path, depth)
        if not is_last and len(trie.children(path.nodes[-1])[0]):
            extending, stop = self._branches(path.nodes[-1], self._weights[i + 1][0])
            share = path.ending[-1] / max(path.under[-1], 1e-300)
            accepted *= min(1.0, stop / max((extending + stop) * share, 1e-300))
        return float(accepted)

    def _branches(self, node: int, weights: np.ndarray) -> tuple[float, float]:
        """What a drafter's law has on a node's children, and on what stops there."""
        children = self._trie.children(node)[0]
        stop = 0.0
        if len(self._trie.tokens(node)):
            stop = (
                weights[self._starts].sum() - weights[np.intersect1d(children, self._starts)].sum()
            )
        return float(weights[children].sum()), float(stop)


def _ratio(weight: float, whole: float, path: Way, depth: int) -> float:
    """A branch is accepted with this probability, given that a token under it is emitted."""
    share = path.under[depth + 1] / max(path.under[depth], 1e-300)
    return min(1.0, weight / max(whole * share, 1e-300))


class Greedy:
    """Rounds of one text where nothing is drawn."""

    def __init__(self, text: Text, walk: TrieWalk) -> None:
        self._tokens, self._walk = text.tokens, walk
        self._steps = [
            (row, piece)
            for token in text.tokens
            for row, piece in zip(token.laws, token.paths["full"].pieces, strict=True)
        ]
        """Laws with the pieces of the text that come after."""
        self._first = np.cumsum([0, *(len(token.laws) for token in text.tokens)])

    def round_from(self, start: int, k: int) -> np.ndarray:
        """``[tokens]`` 1 at the token that a round from a token on ends with."""
        walk = self._walk
        walk.begin()
        steps = self._steps[self._first[start] :][:k]
        for i, (row, piece) in enumerate(steps):
            if walk.step(row) != piece or i == len(steps) - 1:
                break
        if i == len(steps) - 1:
            walk.finish()
        end = start
        for token_id in walk.token_ids:
            if end == len(self._tokens) - 1 or token_id != self._tokens[end].token_id:
                break
            end += 1
        ends = np.zeros(len(self._tokens))
        ends[end] = 1
        return ends


def expected_rounds(round_from: Callable[[int, int], np.ndarray], num_tokens: int, k: int) -> float:
    """Rounds that a text takes; the last one ends with it."""
    rounds = np.zeros(num_tokens + 1)
    for start in range(num_tokens - 1, -1, -1):
        rounds[start] = 1 + round_from(start, k) @ rounds[1:]
    return float(rounds[0])


def gain(found: np.ndarray, picked: Sequence[int]) -> float:
    """Bytes a target forward of `full` over those of `direct`, less 1."""
    _, direct, full = found[picked].sum(axis=0)
    return float(direct / full) - 1


def print_table(texts: Sequence[Text], pair: Pair, k: int, temperature: float) -> None:
    """By task and over all, with a bootstrap over prompts."""
    walks = {mode: TrieWalk(trie, pair.num_pieces) for mode, trie in pair.tries.items()}
    found = np.array(
        [
            [pair.lengths[[t.token_id for t in text.tokens]].sum()]
            + [
                expected_rounds(
                    Sampled(text, pair.tries[mode], mode, temperature).round_from
                    if temperature
                    else Greedy(text, walks[mode]).round_from,
                    len(text.tokens),
                    k,
                )
                for mode in MODES
            ]
            for text in texts
        ]
    )
    print(
        f"\n{k} pieces a round\n\n| task | prompts | bytes | bytes a forward, direct | full "
        "| full over direct (95 %) |\n|---" + "|---:" * 5 + "|"
    )
    rng = np.random.default_rng(0)
    for task in [*dict.fromkeys(text.task for text in texts), "all"]:
        chosen = [i for i, text in enumerate(texts) if task in (text.task, "all")]
        draws = [gain(found, rng.choice(chosen, len(chosen))) for _ in range(2000)]
        low, high = np.percentile(draws, (2.5, 97.5))
        num_bytes, *rounds = found[chosen].sum(axis=0)
        lengths = " | ".join(f"{num_bytes / one:.2f}" for one in rounds)
        print(
            f"| {task} | {len(chosen)} | {int(num_bytes)} | {lengths} "
            f"| {100 * gain(found, chosen):+.1f} % ({100 * low:+.1f} to {100 * high:+.1f}) |"
        )


def write_pickle(path, value):
    """Write it whole or not at all: what is there is taken over by the next run."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(pickle.dumps(value))


def main() -> None:
    """Record what is missing, then print a Markdown table for each draft length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--drafter", help="A target of the bundle [default: its drafter]")
    parser.add_argument("--prompts", type=Path, help="JSONL [default: the built-in prompts]")
    parser.add_argument("--laws", type=Path, required=True, help="Folder to record into.")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--temperature", type=float, default=0.0)
    hard_pair.add_pieces(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Stop after these.")
    arguments = parser.parse_args()
    start = time.monotonic()
    arguments.laws.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else builtin_prompts()
    recorder = None
    for i, prompt in enumerate(first_of_each(prompts, arguments.per_task)):
        path = arguments.laws / f"{i:04}.pickle"
        if path.exists() or time.monotonic() - start > arguments.seconds:
            continue
        if recorder is None:
            recorder = Recorder(arguments)
            write_pickle(arguments.laws / "pair.pickle", recorder.pair)
        write_pickle(path, recorder.record(prompt, arguments.max_new_tokens, i))
    pair = pickle.loads((arguments.laws / "pair.pickle").read_bytes())
    texts = [pickle.loads(path.read_bytes()) for path in sorted(arguments.laws.glob("0*.pickle"))]
    singles = [t.paths["direct"] is not None for text in texts for t in text.tokens]
    print(f"{100 * np.mean(singles):.0f} % of {len(singles)} tokens are single pieces")
    for k in arguments.draft_tokens:
        print_table(texts, pair, k, arguments.temperature)


if __name__ == "__main__":
    main()
