"""The text of a run: the target answers prompts and reads the corpus, shard by shard."""

import itertools
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from .processes import Processes
from .request import DistillRequest, Watcher
from .target import DistillTarget
from .teacher import Question, Teacher
from .teacher_text import shard_path, shard_tokens, write_shard
from .written_prompts import written_prompts

logger = logging.getLogger(__name__)

_CHUNK_TOKENS = 512
"""Tokens of a corpus that the teacher reads at once."""
_WARM_SHARE, _TEMPERATURE = 4, 0.6
"""One in so many answers is drawn at this temperature, for variety."""


def text_folders(output: Path) -> tuple[Path, Path]:
    """Where a run keeps the answers, and the texts that were read."""
    return output / "text", output / "corpus"


class TextStage:
    """Writes what is missing; shards that are there stay as they are."""

    def __init__(
        self,
        request: DistillRequest,
        target: DistillTarget,
        processes: Processes,
        watcher: Watcher,
    ) -> None:
        self._request, self._target = request, target
        self._processes, self._watcher = processes, watcher

    def answer_prompts(self) -> None:
        """Answer prompts until there is text enough, or no prompt is left.

        A shard holds the answers to the prompts of its number, whoever writes it: the text
        is the same for any number of processes.
        """
        folder, _ = text_folders(self._request.output)
        folder.mkdir(parents=True, exist_ok=True)
        questions = self._questions()
        size, count, rank = self._request.batch_size, self._processes.count, self._processes.rank
        for first in itertools.count(0, count):
            written = sum(shard_tokens(path) for path in folder.glob("[0-9]*.safetensors"))
            wanted = self._request.text_tokens
            self._tell("text", min(written, wanted), wanted)
            has_none_left = first * size >= len(questions)
            if self._processes.agree(written >= wanted or has_none_left):
                if written < wanted and self._processes.is_first:
                    logger.warning(
                        "the %d prompts gave %d tokens of the %d asked for: training goes on with "
                        "these; more prompts give more (--prompts, and --resume)",
                        len(questions),
                        written,
                        wanted,
                    )
                return
            number = first + rank
            batch = questions[number * size :][:size]
            if batch and not shard_path(folder, number).is_file():
                seed = self._request.training.seed * 1_000_003 + number
                answers = self._teacher.answer(batch, self._request.max_new_tokens, seed)
                write_shard(folder, number, answers)
            self._processes.wait()

    def read_corpus(self, texts: list[str]) -> None:
        """Have the target read texts that others wrote."""
        _, folder = text_folders(self._request.output)
        folder.mkdir(parents=True, exist_ok=True)
        chunks, size = list(self._chunks(texts)), self._request.batch_size
        num_shards = -(-len(chunks) // size)
        for number in range(self._processes.rank, num_shards, self._processes.count):
            self._tell("corpus", number + 1, num_shards)
            if not shard_path(folder, number).is_file():
                part = chunks[number * size :][:size]
                write_shard(folder, number, [self._teacher.read("text", ids) for ids in part])
        self._processes.wait()

    @cached_property
    def _teacher(self) -> Teacher:
        """Loaded when something is to be written."""
        checkpoint = self._target.checkpoint
        return Teacher(
            checkpoint,
            self._target.files.eos_token_ids,
            self._processes.device,
            min(self._target.vocabulary.size, checkpoint.config.num_logits),
        )

    def _questions(self) -> list[Question]:
        """Every prompt as the target sees it; those too long are left out."""
        tokenizer = self._target.tokenizer
        room = self._target.checkpoint.config.context_length - self._request.max_new_tokens
        prompts = self._request.prompts or tuple(written_prompts(self._request.training.seed))
        rng = np.random.default_rng(self._request.training.seed)
        questions = []
        for prompt in prompts:
            text = prompt.prompt
            if tokenizer.has_chat_template:
                text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
            ids = tokenizer.encode(text, add_special=True)
            is_warm = rng.integers(_WARM_SHARE) == 0
            if len(ids) <= room:
                question = Question(
                    task=prompt.task,
                    prompt=prompt.prompt,
                    ids=tuple(ids),
                    temperature=_TEMPERATURE if is_warm else 0.0,
                )
                questions.append(question)
        return questions

    def _chunks(self, texts: list[str]) -> Iterator[list[int]]:
        limit = min(_CHUNK_TOKENS, self._target.checkpoint.config.context_length)
        for text in texts:
            ids = self._target.tokenizer.encode(text, add_special=False)
            yield from (ids[i : i + limit] for i in range(0, len(ids) - 1, limit - 1))

    def _tell(self, name: str, done: int, total: int) -> None:
        if self._processes.is_first:
            self._watcher.stage(name, done, total)
