"""From a target to a drafter: text, vocabulary, training, each taken up where it ended."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.errors import CheckpointError, ConfigError
from omnidraft_npu.files import write_json
from omnidraft_npu.prompts import TaskPrompt
from omnidraft_npu.text.tokenizer import Tokenizer

from ..checkpoints.checkpoint import Checkpoint, TokenizerFiles
from ..checkpoints.open_checkpoint import open_checkpoint
from .examples import Example, ExampleMaker
from .folder import write_drafter
from .llama import Llama
from .processes import Processes, joined_processes
from .requirements import (
    read_corpus,
    require_all_bytes,
    require_plain_decoder,
    require_room,
)
from .starting import drafter_config, start_from_target
from .teacher import NUM_TOP, Question, Teacher
from .teacher_text import read_responses, shard_path, shard_tokens, write_shard
from .tokenizer import (
    MIN_PIECES,
    count_tokens,
    encoder_of,
    read_files,
    train_tokenizer,
    vocabulary_of,
    write_files,
)
from .training import Progress, Trainer, TrainingConfig
from .written_prompts import written_prompts

_CHUNK_TOKENS = 512
"""Tokens of a corpus that the teacher reads at once."""
_WARM_SHARE, _TEMPERATURE = 4, 0.6
"""One in so many answers is drawn at this temperature, for variety."""


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Size of the drafter; width and heads are the target's."""

    vocab_size: int = 8192
    layers: tuple[int, ...] = (0, 1, -1)
    """The target's layers that the drafter's begin as; negative ones count from the end."""
    intermediate_size: int = 768
    context_length: int = 2048

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("layers is empty, must name at least one of the target's layers")
        if self.vocab_size <= MIN_PIECES:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}, must be at least {MIN_PIECES + 1}: "
                "one piece a byte, and the end of a response"
            )
        for name in ("intermediate_size", "context_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")


@dataclass(frozen=True, kw_only=True)
class DistillRequest:
    """One run; a later run with the same fields goes on with it."""

    target: Path
    output: Path
    prompts: tuple[TaskPrompt, ...] = ()
    """What the target answers; none: those of `written_prompts`."""
    corpus: tuple[Path, ...] = ()
    """UTF-8 files that the target reads."""
    text_tokens: int = 1_000_000
    """Tokens that the target writes."""
    max_new_tokens: int = 320
    max_example_pieces: int = 704
    """Longer answers are cut, prompt included."""
    batch_size: int = 64
    """Answers written side by side; also those of one file of text."""
    shape: DrafterShape = field(default_factory=DrafterShape)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("text_tokens", "max_new_tokens", "max_example_pieces", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")

    def identity(self) -> dict[str, Any]:
        """What may not change when a run is taken up again; budgets may."""
        return {
            "target": self.target.name,
            "seed": self.training.seed,
            "batch_size": self.batch_size,
            "max_new_tokens": self.max_new_tokens,
            **json.loads(json.dumps(asdict(self.shape))),
        }


class Watcher(Protocol):
    """Told how far a run is; by the first process only."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Items done of a stage, and their total."""
        ...

    def training(self, progress: Progress, loss: float, seconds_left: float) -> None:
        """After every step."""
        ...


def distill(request: DistillRequest, watcher: Watcher) -> Progress | None:
    """Make or continue a drafter in ``request.output``; it lies in the folder `drafter` there.

    Returns:
        How far the training came; None in every process but the first.

    Raises:
        ConfigError: an earlier run is in the way or was asked for other things; no room.
        CheckpointError, TokenizerError: the target cannot be a teacher, or a file is damaged.
        PromptError: a corpus file is empty or binary.
    """
    target = open_checkpoint(request.target)
    corpus = read_corpus(request.corpus)
    files = target.tokenizer()
    vocabulary = vocabulary_of(files)
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    require_plain_decoder(target.config, request.target.name)
    require_all_bytes(tokenizer, vocabulary, request.target.name)
    for index in request.shape.layers:
        _layer(index, target.config.num_layers)
    model = _drafter(request, target)
    require_room(
        request.output,
        text_tokens=request.text_tokens,
        target_parameters=sum(int(np.prod(s)) for s in target.config.tensor_shapes().values()),
        drafter_parameters=sum(p.numel() for p in model.parameters()),
    )
    with joined_processes() as processes:
        _claim(request, processes)
        run = _Run(request, target, files, tokenizer, vocabulary, processes, watcher)
        run.write_text(corpus)
        progress = run.train(model)
        return progress if processes.is_first else None


def _drafter(request: DistillRequest, target: Checkpoint) -> Llama:
    shape = request.shape
    torch.manual_seed(request.training.seed)
    return Llama(
        drafter_config(
            target.config,
            num_layers=len(shape.layers),
            intermediate_size=min(shape.intermediate_size, target.config.intermediate_size),
            vocab_size=shape.vocab_size,
            context_length=shape.context_length,
        )
    )


def _claim(request: DistillRequest, processes: Processes) -> None:
    """Begin in an empty folder, or check that what is there is this run."""
    settings = request.output / "settings.json"
    if not settings.is_file():
        if request.resume:
            raise ConfigError(f"{request.output} holds no run: leave out --resume to begin one")
        if request.output.exists() and any(request.output.iterdir()):
            raise ConfigError(f"{request.output} is not empty: name a new folder with --output")
    elif not request.resume:
        raise ConfigError(
            f"{request.output} holds an earlier run: go on with --resume, or name another folder"
        )
    else:
        before = json.loads(settings.read_text(encoding="utf-8"))
        for name, value in request.identity().items():
            if before.get(name) != value:
                raise ConfigError(
                    f"the run in {request.output} has {name} {before.get(name)}, not {value}: "
                    "ask for the same, or name another folder"
                )
    processes.wait()
    if processes.is_first:
        request.output.mkdir(parents=True, exist_ok=True)
        write_json(settings, request.identity())
    processes.wait()


def _layer(index: int, count: int) -> int:
    """A layer of the target, counted from its start."""
    if not -count <= index < count:
        raise ConfigError(f"layers names {index}, but the target has {count} layers")
    return index % count


class _Run:
    """The stages of one run, in one of its processes."""

    def __init__(
        self,
        request: DistillRequest,
        target: Checkpoint,
        files: TokenizerFiles,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        processes: Processes,
        watcher: Watcher,
    ) -> None:
        self._request, self._target, self._files = request, target, files
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._processes, self._watcher = processes, watcher
        self._text = request.output / "text"
        self._corpus = request.output / "corpus"

    def write_text(self, corpus: list[str]) -> None:
        """Have the target read the corpus and answer prompts, until there is text enough."""
        teacher: Teacher | None = None
        for folder in (self._text, self._corpus):
            folder.mkdir(parents=True, exist_ok=True)
        chunks = list(self._chunks(corpus))
        questions = self._questions()
        size, count, rank = self._request.batch_size, self._processes.count, self._processes.rank
        for first in itertools.count(0, count):
            written = sum(shard_tokens(path) for path in self._text.glob("[0-9]*.safetensors"))
            self._tell("text", min(written, self._request.text_tokens), self._request.text_tokens)
            batch = questions[(first + rank) * size :][:size]
            if written >= self._request.text_tokens or first * size >= len(questions):
                break
            if batch and not shard_path(self._text, first + rank).is_file():
                teacher = teacher or self._teacher()
                seed = self._request.training.seed * 1_000_003 + first + rank
                answers = teacher.answer(batch, self._request.max_new_tokens, seed)
                write_shard(self._text, first + rank, answers)
            self._processes.wait()
        for number in range(rank, -(-len(chunks) // size), count):
            self._tell("corpus", number, -(-len(chunks) // size))
            if not shard_path(self._corpus, number).is_file():
                teacher = teacher or self._teacher()
                part = chunks[number * size :][:size]
                write_shard(self._corpus, number, [teacher.read("text", ids) for ids in part])
        self._processes.wait()

    def train(self, model: Llama) -> Progress:
        """Train the drafter on the text, from its checkpoint if there is one."""
        request = self._request
        files = self._own_tokenizer()
        pieces, encoder = vocabulary_of(files), encoder_of(files)
        examples, held_out = self._examples(ExampleMaker(encoder, self._vocabulary, NUM_TOP))
        trainer = Trainer(model, request.training, self._processes)
        checkpoint = request.output / "checkpoint.pt"
        if checkpoint.is_file():
            trainer.restore(checkpoint)
        else:
            layers = [_layer(i, self._target.config.num_layers) for i in request.shape.layers]
            start_from_target(
                model, self._target, layers, pieces, encoder_of(self._files), self._vocabulary
            )
        drafter = request.output / "drafter"
        trainer.run(
            examples,
            held_out,
            checkpoint,
            self._watcher.training if self._processes.is_first else lambda *_: None,
            lambda best: write_drafter(drafter, best, files),
        )
        return trainer.progress

    def _teacher(self) -> Teacher:
        return Teacher(
            self._target,
            self._files.eos_token_ids,
            self._processes.device,
            min(self._vocabulary.size, self._target.config.num_logits),
        )

    def _questions(self) -> list[Question]:
        """Every prompt as the target sees it, those too long left out."""
        prompts = self._request.prompts or tuple(written_prompts(self._request.training.seed))
        rng = np.random.default_rng(self._request.training.seed)
        questions = []
        for prompt in prompts:
            text = prompt.prompt
            if self._tokenizer.has_chat_template:
                text = self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
            ids = self._tokenizer.encode(text, add_special=True)
            is_warm = rng.integers(_WARM_SHARE) == 0
            if len(ids) + self._request.max_new_tokens <= self._target.config.context_length:
                questions.append(
                    Question(
                        task=prompt.task,
                        prompt=prompt.prompt,
                        ids=tuple(ids),
                        temperature=_TEMPERATURE if is_warm else 0.0,
                    )
                )
        return questions

    def _chunks(self, corpus: list[str]) -> Iterator[list[int]]:
        limit = min(_CHUNK_TOKENS, self._target.config.context_length)
        for text in corpus:
            ids = self._tokenizer.encode(text, add_special=False)
            yield from (ids[i : i + limit] for i in range(0, len(ids) - 1, limit - 1))

    def _own_tokenizer(self) -> TokenizerFiles:
        """The drafter's tokenizer, made by the first process once."""
        folder = self._request.output / "tokenizer"
        if self._processes.is_first and not folder.is_dir():
            responses = (r for f in (self._text, self._corpus) for r in read_responses(f))
            counts = count_tokens(ids for r in responses for ids in (r.prompt_ids, r.token_ids))
            size = self._request.shape.vocab_size
            write_files(folder, train_tokenizer(counts, self._vocabulary, self._files, size))
        self._processes.wait()
        return read_files(folder)

    def _examples(self, maker: ExampleMaker) -> tuple[list[Example], list[Example]]:
        """What is learned, and what is held out of it."""
        examples: list[Example] = []
        held_out: list[Example] = []
        for folder in (self._text, self._corpus):
            for response in read_responses(folder):
                example = maker.make(response, self._request.max_example_pieces)
                if example is None:
                    continue
                if not response.is_held_out:
                    examples.append(example)
                elif response.is_greedy:
                    held_out.append(example)
        if not examples:
            raise CheckpointError(
                f"{self._request.output} holds no text to learn from: ask for more --text-tokens"
            )
        return examples, held_out

    def _tell(self, name: str, done: int, total: int) -> None:
        if self._processes.is_first:
            self._watcher.stage(name, done, total)
