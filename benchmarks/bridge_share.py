"""What the bridge costs: host time of a round outside both models, per sampling option.

    python benchmarks/bridge_share.py --bundle BUNDLE

The bundle's models decode in earnest, drafter alone. Their passes count as `--target-ms` and
`--draft-ms` instead of the time they took; all the rest of a round is what it was: drawing
the drafts, the target's law, verification, following the context.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from omnidraft_npu.commands.measuring import encode_prompts
from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.prompts import builtin_prompts, first_of_each
from omnidraft_npu.runtime.session import Session, open_session
from omnidraft_npu.speculative import Round, generate

OPTIONS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "repetition penalty 1.1": {"temperature": 1.0, "repetition_penalty": 1.1},
    "all of them": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    },
}


def rounds(session: Session, prompts: Sequence[list[int]], config: DecodeConfig) -> Iterator[Round]:
    """Rounds of responses to one prompt after the other, the first one of each left out."""
    for seed in itertools.count():
        sampling = dataclasses.replace(config.sampling, seed=seed)
        target = session.pair.target.graph.begin()
        proposer = session.pair.new_proposer()
        one = dataclasses.replace(config, sampling=sampling)
        yield from itertools.islice(
            generate(proposer, target, prompts[seed % len(prompts)], one), 1, None
        )


def main() -> None:
    """Print a Markdown table of shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--target-ms", type=float, default=20.0)
    parser.add_argument("--draft-ms", type=float, default=2.0)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", choices=OPTIONS, help="One row.")
    arguments = parser.parse_args()
    k = arguments.draft_tokens
    session = open_session(arguments.bundle, target=arguments.target, proposer="model", threads=1)
    prompts = encode_prompts(session, first_of_each(builtin_prompts(), 2), raw=False)
    models_ms = arguments.target_ms + k * arguments.draft_ms
    print(
        f"{session.target_name}, {k} draft tokens, {models_ms:g} ms a round in both models\n\n"
        "| sampling | host time a round, mean | median | share of decode time "
        "| tokens a round |\n|---" + "|---:" * 4 + "|"
    )
    for name, options in OPTIONS.items():
        if arguments.only in (None, name):
            config = DecodeConfig(
                max_new_tokens=48, max_draft_tokens=k, sampling=SamplingConfig(**options)
            )
            found = list(itertools.islice(rounds(session, prompts, config), arguments.rounds))
            host = [1000 * (r.total_s - r.draft_model_s - r.verify_s) for r in found]
            tokens = sum(len(r.verdict.token_ids) for r in found) / len(found)
            mean = float(np.mean(host))
            print(
                f"| {name} | {mean:.2f} ms | {np.median(host):.2f} ms "
                f"| {100 * mean / (mean + models_ms):.1f} % | {tokens:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
