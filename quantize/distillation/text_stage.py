"""The text of a run: the target answers prompts and reads the corpus, shard by shard."""

import itertools
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from omnidraft_npu.errors import ConfigError

from .processes import Processes
from .request import DistillRequest, Watcher
from .target import DistillTarget
from .teacher import Question, Teacher
from .teacher_text import Response, shard_path, shard_tokens, shards_of, write_shard

logger = logging.getLogger(__name__)

_CHUNK_TOKENS = 512
"""Tokens of a corpus that the teacher reads at once."""
_FIRST_SHARD, _LARGEST_SHARD = 16, 256
"""Questions of one file."""
_CORPUS_SHARD = 64
"""Chunks of one file."""
_WARM_SHARE, _TEMPERATURE = 4, 0.6
"""One in so many answers is drawn at this temperature, for variety."""


def shard_range(number: int) -> tuple[int, int]:
    """The first question of a shard, and the first one after it.

    16 in the first one, so that a short run does not write more than it needs, then twice as
    many each time until a shard takes a minute or two: what an interruption loses.
    """
    first, size = 0, _FIRST_SHARD
    for _ in range(number):
        first, size = first + size, min(2 * size, _LARGEST_SHARD)
    return first, first + size


def text_folders(output: Path) -> tuple[Path, Path]:
    """Where a run keeps the answers, and the texts that were read."""
    return output / "text", output / "corpus"


def text_shards(request: DistillRequest) -> list[Path]:
    """The shards that a run learns from: answers, as many as were asked for, and texts.

    Several processes may have written more answers than one would have.
    """
    answers, texts = text_folders(request.output)
    return [*shards_of(answers, request.text_tokens), *shards_of(texts)]


class TextStage:
    """Writes what is missing; shards that are there stay as they are."""

    def __init__(
        self,
        request: DistillRequest,
        target: DistillTarget,
        processes: Processes,
        watcher: Watcher,
    ) -> None:
        """Prepare the prompts; nothing is written yet.

        Raises:
            ConfigError: none of them fits the target's context.
        """
        self._request, self._target = request, target
        self._processes, self._watcher = processes, watcher
        self._questions = _questions(request, target)

    def answer_prompts(self) -> None:
        """Answer prompts until there is text enough, or no prompt is left.

        A shard holds the answers to the prompts of its number, whoever writes it: the text
        is the same for any number of processes.
        """
        folder, _ = text_folders(self._request.output)
        folder.mkdir(parents=True, exist_ok=True)
        questions, wanted = self._questions, self._request.text_tokens
        for first in itertools.count(0, self._processes.count):
            written = sum(map(shard_tokens, shards_of(folder)))
            self._tell("text", min(written, wanted), wanted)
            has_none_left = shard_range(first)[0] >= len(questions)
            if self._processes.agree(written >= wanted or has_none_left):
                if written < wanted and self._processes.is_first:
                    logger.warning(
                        "the %d prompts gave %d tokens of the %d asked for: training goes on with "
                        "these; more text needs more prompts: all of these and others in "
                        "--prompts, and --resume",
                        len(questions),
                        written,
                        wanted,
                    )
                return
            number = first + self._processes.rank
            part = questions[slice(*shard_range(number))]
            if part and not shard_path(folder, number).is_file():
                write_shard(folder, number, self._answers(part, written))
            self._processes.wait()

    def _answers(self, questions: list[Question], written: int) -> list[Response]:
        """The answers of one shard, where the others hold `written` tokens."""
        count, wanted = self._processes.count, self._request.text_tokens

        def tell(new: int) -> None:
            self._tell("text", min(written + new * count, wanted - 1), wanted)

        return self._teacher.answer(
            questions, self._request.max_new_tokens, num_rows=self._request.batch_size, tell=tell
        )

    def read_corpus(self, texts: list[str]) -> None:
        """Have the target read texts that others wrote."""
        _, folder = text_folders(self._request.output)
        chunks, size = list(self._chunks(texts)), _CORPUS_SHARD
        if not chunks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        num_shards = -(-len(chunks) // size)
        for number in range(self._processes.rank, num_shards, self._processes.count):
            if not shard_path(folder, number).is_file():
                first = number * size
                read: list[Response] = []
                for ids in chunks[first : first + size]:
                    self._tell("corpus", first + len(read), len(chunks))
                    read.append(self._teacher.read("text", ids))
                write_shard(folder, number, read)
        self._tell("corpus", len(chunks), len(chunks))
        self._processes.wait()

    @cached_property
    def _teacher(self) -> Teacher:
        """Loaded when something is to be written."""
        checkpoint = self._target.checkpoint
        return Teacher(
            checkpoint,
            end_ids=self._target.files.eos_token_ids,
            num_tokens=min(self._target.vocabulary.size, checkpoint.config.num_logits),
            device=self._processes.device,
            dtype=self._processes.dtype,
        )

    def _chunks(self, texts: list[str]) -> Iterator[list[int]]:
        limit = min(_CHUNK_TOKENS, self._target.checkpoint.config.context_length)
        for text in texts:
            ids = self._target.tokenizer.encode(text, add_special=False)
            yield from (ids[i : i + limit] for i in range(0, len(ids) - 1, limit - 1))

    def _tell(self, name: str, done: int, total: int) -> None:
        if self._processes.is_first:
            self._watcher.stage(name, done, total)


def _questions(request: DistillRequest, target: DistillTarget) -> list[Question]:
    """Every prompt as the target sees it; those too long are left out.

    Raises:
        ConfigError: all of them are.
    """
    tokenizer = target.tokenizer
    room = target.checkpoint.config.context_length - request.max_new_tokens
    rng = np.random.default_rng(request.training.seed)
    questions = []
    for number, prompt in enumerate(request.all_prompts()):
        text = prompt.prompt
        if tokenizer.has_chat_template:
            ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        else:
            ids = tokenizer.encode(text, add_special=True)
        is_warm = rng.integers(_WARM_SHARE) == 0
        if 0 < len(ids) <= room:
            question = Question(
                task=prompt.task,
                prompt=prompt.prompt,
                ids=tuple(ids),
                temperature=_TEMPERATURE if is_warm else 0.0,
                seed=request.training.seed * 1_000_003 + number,
            )
            questions.append(question)
    if not questions:
        raise ConfigError(
            f"no prompt and {request.max_new_tokens} new tokens fit the target's "
            f"{target.checkpoint.config.context_length}: use fewer --max-new-tokens"
        )
    return questions
