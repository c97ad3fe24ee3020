"""Answers of a target with its laws, recorded once to be learned from many times.

A file for each answer, named by its prompt and written as a whole: a recording that was broken
off goes on where it ended. It holds ids of the prompt and of the answer, and the ids and
probabilities of the likeliest tokens before each one.
"""

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from omnidraft_npu.commands.measuring import encode_prompts
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.distillation import TokenLaws
from omnidraft_npu.files import write_safetensors
from omnidraft_npu.prompts import TaskPrompt
from omnidraft_npu.runtime.learner_recorder import Answer
from omnidraft_npu.runtime.session import open_session


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One answer and the task of its prompt."""

    task: str
    answer: Answer


class _Catch:
    """Keeps the latest answer."""

    def __init__(self) -> None:
        self.answer: Answer | None = None

    def observe(self, answer: Answer) -> bool:
        """Keep it."""
        self.answer = answer
        return True


def record(
    folder: Path,
    bundle: Path,
    target: str,
    prompts: Sequence[TaskPrompt],
    config: DecodeConfig,
    *,
    raw: bool = False,
    threads: int | None = None,
) -> list[Recorded]:
    """Answers to the prompts in their order, those that are in `folder` and new ones.

    Args:
        folder: Of recordings of this target, made with the same limits.
        bundle: Holds the target; drafts only make it faster.
        target: Its name.
        prompts: What is answered.
        config: Limits.
        raw: Bare prompts, without a chat template.
        threads: Threads of one operator.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = f"{config.max_new_tokens} {config.sampling} {raw}"
    paths = [folder / f"{_digest(settings, one.prompt)}.safetensors" for one in prompts]
    missing = [i for i, path in enumerate(paths) if not path.is_file()]
    if missing:
        session = open_session(bundle, target=target, threads=threads)
        session.observer = catch = _Catch()
        ids = encode_prompts(session, [prompts[i] for i in missing], raw=raw)
        started = time.perf_counter()
        for done, (i, prompt_ids) in enumerate(zip(missing, ids, strict=True), start=1):
            session.reset()
            for _ in session.generate(prompt_ids, config):
                pass
            if catch.answer is None:
                raise SystemExit(f"the target said what is no number to {prompts[i].prompt!r}")
            write_answer(paths[i], catch.answer)
            if done % 8 == 0 or done == len(missing):
                left = (time.perf_counter() - started) / done * (len(missing) - done)
                line = f"{target}: {done} of {len(missing)} answers recorded"
                print(f"{line}, {left / 60:.0f} min left", file=sys.stderr)
    return [
        Recorded(task=one.task, answer=read_answer(path))
        for one, path in zip(prompts, paths, strict=True)
    ]


def write_answer(path: Path, answer: Answer) -> None:
    """Write an answer, atomically."""
    tensors: dict[str, Any] = {
        "prompt_ids": np.array(answer.prompt_ids, np.int32),
        "token_ids": answer.laws.token_ids,
        "top_ids": answer.laws.top_ids,
        "probs": answer.laws.probs,
    }
    write_safetensors(path, tensors, {"format_version": "1"})


def read_answer(path: Path) -> Answer:
    """What `write_answer` wrote."""
    with safe_open(path, "numpy") as file:
        prompt_ids = tuple(file.get_tensor("prompt_ids").tolist())
        names = ("token_ids", "top_ids", "probs")
        laws = TokenLaws(**{name: file.get_tensor(name) for name in names})
    return Answer(prompt_ids=prompt_ids, laws=laws)


def _digest(settings: str, prompt: str) -> str:
    return hashlib.sha256(f"{settings}\n{prompt}".encode()).hexdigest()[:24]
