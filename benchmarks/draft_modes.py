"""Draft modes `direct` and `full` task by task, paired by prompt, with intervals.

    python benchmarks/draft_modes.py --bundle BUNDLE --prompts FILE --rows ROWS --draft-tokens 4

Greedy: every prompt is decoded in both modes, and rounds and bytes are counted. With a
temperature chance would hide small differences, so both modes draft from every context
that decoding comes to, with equal noise on every piece, and what the round yields is computed,
not drawn: the probability that the first i drafts are accepted, times the mean length of a
token of the target's law there. (Whatever was drafted, the next token has that law.) Modes
take turns in moving the context on. A drafter pass a piece, the drafter alone.

With --text the drafter is made one of few pieces, with --tokenizer one of another tokenizer's,
as `hard_pair.py` does it.

Rows are appended to ROWS as they are made; prompts that have one there are left out.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import hard_pair
import numpy as np

from omnidraft_npu.bridge import walk
from omnidraft_npu.commands.measuring import encode_prompts
from omnidraft_npu.config import SamplingConfig
from omnidraft_npu.prompts import builtin_prompts, first_of_each, read_prompts
from omnidraft_npu.proposal import STOP, Proposal
from omnidraft_npu.runtime.session import Session, open_session
from omnidraft_npu.sampling import Draw, TargetLaw, TargetRows
from omnidraft_npu.verification import verify

MODES = ("direct", "full")
Sums = dict[str, list[float]]


class Pair:
    """One target, and a drafter in each mode with a cache of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Open a bundle with one of its targets, and its drafter or one of few pieces."""
        sessions: dict[str, Session] = {
            mode: open_session(
                arguments.bundle,
                target=arguments.target,
                proposer="model",
                draft_mode=mode,
                threads=arguments.threads,
            )
            for mode in MODES
        }
        self.session = sessions["full"]
        pair = self.session.pair
        self.proposers = {mode: one.pair.new_proposer() for mode, one in sessions.items()}
        if arguments.text or arguments.tokenizer:
            encoder = hard_pair.open_pieces(arguments)
            self.proposers = hard_pair.drafters(pair, encoder)
        self.starts = CoupledStarts(max(arguments.pieces, pair.drafter.vocabulary.size))
        walk._draw_start = self.starts
        self.target = pair.target.graph.begin()
        self.lengths = pair.target.vocabulary.lengths.astype(np.float64)
        self.stops = frozenset(pair.target.entry.eos_token_ids)

    def decode(
        self,
        prompt: Sequence[int],
        modes: Sequence[str],
        sampling: SamplingConfig,
        k: int,
        end: int,
    ) -> Sums:
        """Rounds, proposed and accepted tokens and bytes of each mode, one context for all."""
        context, target = list(prompt), self.target
        target.rewind(0)
        target.prefill(context[:-1])
        law, rng = TargetLaw(sampling, context), None
        for mode in modes:
            self.proposers[mode].begin(context)
        sums: Sums = {mode: [0, 0, 0, 0] for mode in modes}
        turn = 0
        while True:
            verdicts, scored = {}, {}
            for mode in modes:
                draw = None
                if sampling.temperature > 0:
                    rng = np.random.default_rng((sampling.seed, turn))
                    draw = Draw(sampling=sampling, rng=rng)
                    self.starts.begin(sampling.seed, turn)
                proposal = self.proposers[mode].propose(k, draw)
                drafts = proposal.token_ids
                if drafts not in scored:
                    scored[drafts] = target.score([context[-1], *drafts]).copy()
                    target.rewind(len(context) - 1)
                rows = law.rows(scored[drafts], drafts)
                verdicts[mode] = verdict = verify(proposal, rows, rng).until(self.stops)
                if draw is None:
                    ids = list(verdict.token_ids)
                    accepted, num_bytes = verdict.num_accepted, self.lengths[ids].sum()
                else:
                    accepted, num_bytes = self._expect(proposal, rows)
                counted = (1, len(drafts), accepted, num_bytes)
                sums[mode] = [a + float(b) for a, b in zip(sums[mode], counted, strict=True)]
            verdict = verdicts[modes[turn % len(modes)]]
            context += verdict.token_ids
            if verdict.is_stopped or len(context) >= len(prompt) + end:
                return sums
            target.prefill(context[target.length : -1])
            law.observe(verdict.token_ids)
            for mode in modes:
                self.proposers[mode].observe(verdict.token_ids)
            turn += 1

    def _expect(self, proposal: Proposal, rows: TargetRows) -> tuple[float, float]:
        """Accepted drafts and bytes that verification of these drafts yields on average."""
        reach, accepted, num_bytes = 1.0, 0.0, 0.0
        for i in range(len(proposal.token_ids) + 1):
            weights = rows.law(i).dense.astype(np.float64)
            num_bytes += reach * float(weights @ self.lengths) / float(weights.sum())
            if i < len(proposal.token_ids):
                reach *= acceptance(proposal, i, weights)
                accepted += reach
                if proposal.token_ids[i] in self.stops:
                    break
        return accepted, num_bytes


def acceptance(proposal: Proposal, i: int, weights: np.ndarray) -> float:
    """Probability that verification emits draft token i."""
    trie, mass, prob = proposal.trie, float(weights.sum()), 1.0
    visits = proposal.walk[i] if i < len(proposal.walk) else ()
    assert trie is not None and visits, "both modes walk a trie"
    for visit in visits:
        ids = trie.tokens(visit.node)
        if visit.branch != STOP:
            ids = trie.subtree_tokens(int(trie.children(visit.node)[1][visit.branch]))
        under = float(weights[ids].sum())
        prob *= min(1.0, under / max(float(visit.branch_prob) * mass, 1e-300))
        mass = under
    return prob * float(weights[proposal.token_ids[i]]) / max(mass, 1e-300)


class CoupledStarts:
    """Draws what begins a token by noise on every piece, which is equal in all modes.

    So modes draw equal pieces where their laws are near. Takes the place of the walk's own draw.
    """

    def __init__(self, num_pieces: int) -> None:
        """Give every one of these pieces its noise."""
        self._num_pieces = num_pieces
        self._draw = walk._draw_start

    def begin(self, *seed: int) -> None:
        """Begin a round."""
        self._rng = np.random.default_rng(seed)

    def __call__(self, pieces, weights, starts, aliases, draw):  # type: ignore[no-untyped-def]
        """See `walk._draw_start`."""
        noise = self._rng.gumbel(size=self._num_pieces)[pieces]
        sums = np.cumsum(weights, dtype=np.float64)
        if len(sums) and sums[-1] > 0:
            with np.errstate(divide="ignore"):
                at = int((np.log(weights) + noise).argmax())
            draw = dataclasses.replace(draw, rng=Fixed((sums[at] - weights[at] / 2) / sums[-1]))
        return self._draw(pieces, weights, starts, aliases, draw)


class Fixed:
    """Stands in for a generator that gives one number."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        """The number."""
        return self._number


def gain(rows: Sequence[dict], picked: Sequence[int]) -> float:
    """Bytes a target forward of `full` over those of `direct`, less 1."""
    sums = {m: np.sum([rows[i][m] for i in picked], axis=0) for m in MODES}
    ratios = {m: sums[m][3] / sums[m][0] for m in MODES}
    return ratios["full"] / ratios["direct"] - 1


def print_table(rows: Sequence[dict]) -> None:
    """By task and over all, with a bootstrap over prompts."""
    print(
        "| task | prompts | rounds | accepted, direct | full | bytes a forward, direct | full "
        "| full over direct (95 %) |\n|---" + "|---:" * 7 + "|"
    )
    rng = np.random.default_rng(0)
    for task in [*dict.fromkeys(row["task"] for row in rows), "all"]:
        chosen = [row for row in rows if task in (row["task"], "all")]
        everyone = range(len(chosen))
        draws = [gain(chosen, rng.choice(len(chosen), len(chosen))) for _ in range(2000)]
        low, high = np.percentile(draws, (2.5, 97.5))
        sums = {m: np.sum([row[m] for row in chosen], axis=0) for m in MODES}
        rates = " | ".join(f"{100 * sums[m][2] / sums[m][1]:.1f} %" for m in MODES)
        lengths = " | ".join(f"{sums[m][3] / sums[m][0]:.2f}" for m in MODES)
        print(
            f"| {task} | {len(chosen)} | {int(sums['full'][0])} | {rates} | {lengths} "
            f"| {100 * gain(chosen, everyone):+.1f} % ({100 * low:+.1f} to {100 * high:+.1f}) |"
        )


def main() -> None:
    """Measure what is missing in the file of rows, then print a Markdown table of all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--prompts", type=Path, help="JSONL [default: the built-in prompts]")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--text", type=Path, nargs="+", help="Draft in pieces learned from these.")
    parser.add_argument("--pieces", type=int, default=8192)
    parser.add_argument("--tokenizer", type=Path, help="Draft in the pieces of this folder's.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Stop after these.")
    arguments = parser.parse_args()
    arguments.tokenizer = None
    start = time.monotonic()
    rows: list[dict] = []
    if arguments.rows.exists():
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    done = {row["prompt"] for row in rows}
    prompts = read_prompts(arguments.prompts) if arguments.prompts else builtin_prompts()
    missing = [p for p in first_of_each(prompts, arguments.per_task) if p.prompt not in done]
    pair = Pair(arguments) if missing else None
    for seed, prompt in enumerate(missing, start=len(done)):
        if pair is None or time.monotonic() - start > arguments.seconds:
            break
        sampling = SamplingConfig(temperature=arguments.temperature, seed=seed)
        (ids,) = encode_prompts(pair.session, [prompt], raw=False)
        groups = [MODES] if arguments.temperature > 0 else [[mode] for mode in MODES]
        row: dict = {"task": prompt.task, "prompt": prompt.prompt}
        for modes in groups:
            row |= pair.decode(
                ids, modes, sampling, arguments.draft_tokens, arguments.max_new_tokens
            )
        rows.append(row)
        with arguments.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
