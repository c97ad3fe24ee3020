"""The same pair and prompts through Hugging Face's cross-vocabulary decoding and through ours.

    python benchmarks/huggingface_uag.py --bundle BUNDLE --drafter smollm2.gguf \\
        --target gemma3-270m.gguf --tokenizers FOLDER [--temperature 1]

Both stacks decode the same prompt ids in float32, in this one process, in turns prompt by
prompt, so that whatever else the machine does slows all of them.
The bundle is an fp32 export of the same two GGUF files; FOLDER holds exact `smollm2` and
`gemma3` tokenizers, because those that transformers rebuilds from a GGUF file are not exact.
At temperature 0 Hugging Face decodes by universal assisted generation (text re-tokenised,
exact match), above it by speculation over the intersection of the vocabularies (TLI).
Every figure is over whole responses, prefill included, in both stacks alike; of several
repeats the one of median time counts. The first target forward of Hugging Face is its prefill
too, so forwards are counted alike.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.machine import describe_machine
from omnidraft_npu.prompts import builtin_prompts, first_of_each
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.session import Session


@dataclasses.dataclass(kw_only=True)
class Response:
    """One response and what it took."""

    token_ids: list[int]
    seconds: float
    forwards: int
    proposed: int = 0
    accepted: int = 0


Decode = Callable[[list[int], int], Response]
"""A response to prompt ids; the number seeds it."""


class HuggingFace:
    """The pair in transformers, with counters around the target and the candidates."""

    def __init__(self, arguments: argparse.Namespace, stops: Sequence[int]) -> None:
        import torch

        torch.set_num_threads(arguments.threads)
        self.drafter = _load_gguf(arguments.drafter)
        self.target = _load_gguf(arguments.target)
        self.tokenizers = [
            _load_tokenizer(arguments.tokenizers / name) for name in ("gemma3", "smollm2")
        ]
        settings = self.drafter.generation_config
        settings.num_assistant_tokens = arguments.draft_tokens
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        self._options: dict[str, Any] = {
            "max_new_tokens": arguments.max_new_tokens,
            "eos_token_id": list(stops),
            "pad_token_id": 0,
            "do_sample": arguments.temperature > 0,
        }
        if arguments.temperature > 0:
            self._options |= {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
        self._forwards = 0
        self._lengths: list[tuple[int, int]] = []
        self._count_forwards()
        self._count_candidates()

    def plain(self, prompt: list[int], seed: int) -> Response:
        """The target alone."""
        return self._generate(prompt, seed, {})

    def drafted(self, prompt: list[int], seed: int) -> Response:
        """With the drafter."""
        target_tokenizer, drafter_tokenizer = self.tokenizers
        return self._generate(
            prompt,
            seed,
            {
                "assistant_model": self.drafter,
                "tokenizer": target_tokenizer,
                "assistant_tokenizer": drafter_tokenizer,
            },
        )

    def _generate(self, prompt: list[int], seed: int, options: dict[str, Any]) -> Response:
        import torch

        torch.manual_seed(seed)
        self._forwards, self._lengths = 0, []
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            output = self.target.generate(
                ids, attention_mask=torch.ones_like(ids), **options, **self._options
            )
        seconds = time.perf_counter() - start
        tokens = output[0, len(prompt) :].tolist()
        ends = [before for before, _ in self._lengths[1:]] + [len(prompt) + len(tokens)]
        accepted = sum(
            min(max(end - before - 1, 0), num_candidates)
            for (before, num_candidates), end in zip(self._lengths, ends, strict=False)
        )
        return Response(
            token_ids=tokens,
            seconds=seconds,
            forwards=self._forwards,
            proposed=sum(n for _, n in self._lengths),
            accepted=accepted,
        )

    def _count_forwards(self) -> None:
        forward = self.target.forward

        def counted(*arguments: Any, **options: Any) -> Any:
            self._forwards += 1
            return forward(*arguments, **options)

        self.target.forward = counted

    def _count_candidates(self) -> None:
        from transformers.generation import candidate_generator as module

        for name in (
            "AssistedCandidateGeneratorDifferentTokenizers",
            "UniversalSpeculativeDecodingGenerator",
        ):
            kind = getattr(module, name)
            kind.get_candidates = self._counted(kind.get_candidates)

    def _counted(self, get_candidates: Callable[..., Any]) -> Callable[..., Any]:
        def counted(generator: Any, input_ids: Any, *arguments: Any, **options: Any) -> Any:
            result = get_candidates(generator, input_ids, *arguments, **options)
            before = input_ids.shape[-1]
            self._lengths.append((before, result[0].shape[-1] - before))
            return result

        return counted


def _load_gguf(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()


def _load_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {
        name: config[name]["content"] if isinstance(config[name], dict) else config[name]
        for name in ("bos_token", "eos_token", "pad_token")
        if config.get(name)
    }
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False, **special
    )


def ours(session: Session, config: DecodeConfig) -> Decode:
    """Decode in a session that forgets everything first."""

    def decode(prompt: list[int], seed: int) -> Response:
        session.reset()
        sampling = dataclasses.replace(config.sampling, seed=seed)
        tokens: list[int] = []
        start = time.perf_counter()
        delta = None
        for delta in session.generate(prompt, dataclasses.replace(config, sampling=sampling)):
            tokens += delta.token_ids
        assert delta is not None
        stats = delta.stats
        return Response(
            token_ids=tokens,
            seconds=time.perf_counter() - start,
            forwards=stats.rounds,
            proposed=stats.proposed,
            accepted=stats.accepted,
        )

    return decode


def measure(
    decoders: dict[str, Decode], prompts: list[list[int]], repeats: int
) -> dict[str, list[Response]]:
    """By decoder and prompt the response of median time; after warm-ups they take turns."""
    runs: dict[str, list[list[Response]]] = {}
    for name, decode in decoders.items():
        decode(prompts[0], 0)
        runs[name] = [[] for _ in prompts]
    for seed in range(repeats):
        for i, prompt in enumerate(prompts):
            for name, decode in decoders.items():
                runs[name][i].append(decode(prompt, seed))
            done = f"{seed * len(prompts) + i + 1} of {repeats * len(prompts)}"
            print(f"prompts decoded: {done}", file=sys.stderr)
    middle = (repeats - 1) // 2
    return {
        name: [sorted(responses, key=lambda r: r.seconds)[middle] for responses in by_prompt]
        for name, by_prompt in runs.items()
    }


def row(
    name: str,
    drafted: list[Response],
    plain: list[Response],
    num_bytes: Callable[[list[int]], int],
    is_greedy: bool,
) -> str:
    """A line of the table."""
    tokens = [sum(len(r.token_ids) for r in runs) for runs in (plain, drafted)]
    seconds = [sum(r.seconds for r in runs) for runs in (plain, drafted)]
    forwards = sum(r.forwards for r in drafted)
    speed = [n / s for n, s in zip(tokens, seconds, strict=True)]
    ratio = statistics.geometric_mean(
        (len(d.token_ids) / d.seconds) / (len(p.token_ids) / p.seconds)
        for d, p in zip(drafted, plain, strict=True)
    )
    equal = sum(d.token_ids == p.token_ids for d, p in zip(drafted, plain, strict=True))
    proposed = sum(r.proposed for r in drafted)
    cells = (
        name,
        f"{100 * sum(r.accepted for r in drafted) / proposed:.0f} %",
        f"{tokens[1] / forwards:.2f}",
        f"{sum(num_bytes(r.token_ids) for r in drafted) / forwards:.1f}",
        f"{speed[0]:.1f}",
        f"{speed[1]:.1f}",
        f"{ratio:.2f}x",
        f"{equal} of {len(plain)}" if is_greedy else "–",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure both stacks and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("bundle", "drafter", "target", "tokenizers"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    is_greedy = arguments.temperature == 0
    config = DecodeConfig(
        max_new_tokens=arguments.max_new_tokens,
        max_draft_tokens=arguments.draft_tokens,
        sampling=SamplingConfig(temperature=arguments.temperature),
    )
    pair = open_pair(arguments.bundle, threads=arguments.threads)
    alone = Session(dataclasses.replace(pair, drafter=None, proposer=None))
    prompts = [
        alone.encode(one.prompt, raw=True)
        for one in first_of_each(builtin_prompts(), arguments.per_task)
    ]
    theirs = HuggingFace(arguments, pair.target.entry.eos_token_ids)
    names = {
        "omnidraft-npu, drafter": dataclasses.replace(pair, proposer="model"),
        "omnidraft-npu, drafter and prompt lookup": pair,
    }
    if not is_greedy:
        names["omnidraft-npu, drafter, direct map only"] = open_pair(
            arguments.bundle, threads=arguments.threads, proposer="model", draft_mode="direct"
        )
    kind = "universal assisted generation" if is_greedy else "TLI"
    decoders: dict[str, Decode] = {
        _OURS: ours(alone, config),
        **{name: ours(Session(one), config) for name, one in names.items()},
        _THEIRS: theirs.plain,
        f"Hugging Face, {kind}": theirs.drafted,
    }
    results = measure(decoders, prompts, arguments.repeats)
    lengths = pair.target.vocabulary.lengths
    lines = [
        row(
            name,
            responses,
            results[_OURS if name in names else _THEIRS],
            lambda ids: int(lengths[ids].sum()),
            is_greedy,
        )
        for name, responses in results.items()
        if name not in (_OURS, _THEIRS)
    ]
    _print(arguments, prompts, lines, results[_OURS], results[_THEIRS], is_greedy)


_OURS, _THEIRS = "omnidraft-npu, target alone", "Hugging Face, target alone"


def _print(
    arguments: argparse.Namespace,
    prompts: list[list[int]],
    lines: list[str],
    our_plain: list[Response],
    their_plain: list[Response],
    is_greedy: bool,
) -> None:
    import torch
    import transformers

    machine = describe_machine()
    print(
        f"{len(prompts)} prompts, {arguments.max_new_tokens} new tokens, "
        f"{arguments.draft_tokens} draft tokens, temperature {arguments.temperature}, float32, "
        f"{arguments.threads} threads on {machine['num_cpus']} CPUs ({machine['cpu']}), "
        f"median of {arguments.repeats}; Python {platform.python_version()}, "
        f"onnxruntime {machine['onnxruntime']}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )
    print(
        "| | accepted | tokens per target forward | bytes per target forward "
        "| tok/s, target alone | tok/s | speed-up | text is the target's own |\n|---" + "|---:" * 7,
        end="|\n",
    )
    print("\n".join(lines))
    if is_greedy:
        equal = sum(
            ours_.token_ids == theirs.token_ids
            for ours_, theirs in zip(our_plain, their_plain, strict=True)
        )
        print(f"\nThe two stacks' plain texts are equal for {equal} of {len(prompts)} prompts.")


if __name__ == "__main__":
    main()
