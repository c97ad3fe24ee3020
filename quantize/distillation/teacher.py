"""The target as a teacher: it answers prompts side by side, or reads texts, and tells its laws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from .teacher_head import TeacherHead
from .teacher_model import TeacherModel
from .teacher_text import Response

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
_Step = tuple[int, Ids, Floats]
"""A token, the likeliest ones there, and their log-probabilities."""
_FREE = -1


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt ready to be answered."""

    task: str
    prompt: str
    ids: tuple[int, ...]
    """With the chat template; at least one."""
    temperature: float
    """0 takes the likeliest token."""
    seed: int = 0
    """Of the answer's own draws: it does not depend on what is written beside it."""


class Teacher:
    """The target in torch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        end_ids: Sequence[int],
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Load the weights.

        Args:
            checkpoint: The target.
            end_ids: Tokens that end an answer.
            num_tokens: Ids below are written, and no others.
            device: Where to compute.
            dtype: Type of weights and caches; of the head's first stage.
        """
        self._model = TeacherModel(checkpoint, device, dtype)
        head = checkpoint.tensor("embed_tokens" if checkpoint.config.has_tied_head else "lm_head")
        self._head = TeacherHead(torch.from_numpy(head[:num_tokens]).to(device), dtype)
        self._ends = frozenset(end_ids)
        self._device = device

    @torch.no_grad()
    def answer(
        self,
        questions: Sequence[Question],
        max_new_tokens: int,
        *,
        num_rows: int,
        tell: Callable[[int], None] = lambda written: None,
    ) -> list[Response]:
        """Answers to all questions; a row whose answer ends goes on with the next question.

        Args:
            questions: What to answer.
            max_new_tokens: Most tokens of an answer.
            num_rows: Answers written side by side.
            tell: Told after every step how many tokens there are.
        """
        rows = _Rows(self._model, questions, max_new_tokens, num_rows, self._device)
        answers: list[list[_Step]] = [[] for _ in questions]
        written = 0
        while rows.fill():
            top_ids, log_probs = self._law(rows.states())
            ranks = rows.choose(log_probs)
            for row, number in rows.busy():
                token = int(top_ids[row, ranks[row]])
                answers[number].append((token, top_ids[row], log_probs[row]))
                written += 1
                is_end = token in self._ends or len(answers[number]) == max_new_tokens
                rows.extend(row, token, is_end=is_end)
            tell(written)
        return [_response(q, answer) for q, answer in zip(questions, answers, strict=True)]

    @torch.no_grad()
    def read(self, task: str, ids: Sequence[int]) -> Response:
        """A text that somebody else wrote, with what the teacher expected after each token."""
        states = self._model.read(torch.tensor(ids, device=self._device))
        top_ids, log_probs = self._law(states[:-1])
        return Response(
            task=task,
            prompt="",
            source=str(hash(tuple(ids[:16])) & 0xFFFFFFFF),
            is_greedy=False,
            prompt_ids=np.array(ids[:1], np.int32),
            token_ids=np.array(ids[1:], np.int32),
            top_ids=top_ids,
            log_probs=log_probs.astype(np.float16),
        )

    def _law(self, states: Tensor) -> tuple[Ids, Floats]:
        top_ids, log_probs = self._head.law(states)
        return top_ids.int().cpu().numpy(), log_probs.cpu().numpy()


class _Rows:
    """The answers under way; a free row computes what nobody reads."""

    def __init__(
        self,
        model: TeacherModel,
        questions: Sequence[Question],
        max_new_tokens: int,
        num_rows: int,
        device: torch.device,
    ) -> None:
        num_rows = min(num_rows, len(questions))
        num_slots = max((len(q.ids) for q in questions), default=0) + max_new_tokens
        self._model, self._questions, self._device = model, questions, device
        self._waiting = iter(range(len(questions)))
        self._caches = model.new_caches(num_rows, num_slots)
        self._owners = np.full(num_rows, _FREE)
        self._lengths = np.zeros(num_rows, np.int64)
        self._ids = np.zeros(num_rows, np.int64)
        self._draws = [np.random.default_rng()] * num_rows

    def fill(self) -> bool:
        """Give waiting questions to free rows; False if there is nothing left to do."""
        for row in np.flatnonzero(self._owners == _FREE).tolist():
            number = next(self._waiting, _FREE)
            if number != _FREE:
                self._begin(row, number)
        busy = np.flatnonzero(self._owners != _FREE)
        if 2 * len(busy) <= len(self._owners):
            self._keep(busy)
        return len(busy) > 0

    def busy(self) -> list[tuple[int, int]]:
        """Rows that hold an answer, and the numbers of their questions."""
        return [(row, n) for row, n in enumerate(self._owners.tolist()) if n != _FREE]

    def states(self) -> Tensor:
        """``[rows, hidden]`` states after the last token of each row."""
        ids, lengths = (
            torch.from_numpy(values).to(self._device, copy=True)
            for values in (self._ids, self._lengths)
        )
        return self._model.step(ids, lengths, int(self._lengths.max()), self._caches)

    def choose(self, log_probs: Floats) -> list[int]:
        """The rank of each row's next token: the first, or drawn where it is warm."""
        ranks = [0] * len(log_probs)
        for row, number in self.busy():
            temperature = self._questions[number].temperature
            if temperature > 0:
                weights = np.exp(log_probs[row] / temperature).cumsum()
                drawn = np.searchsorted(weights, self._draws[row].random() * weights[-1], "right")
                ranks[row] = min(int(drawn), len(weights) - 1)
        return ranks

    def extend(self, row: int, token: int, *, is_end: bool) -> None:
        """Put a token at the end of a row, or free the row whose answer it ends."""
        self._ids[row] = token
        self._lengths[row] = 0 if is_end else self._lengths[row] + 1
        if is_end:
            self._owners[row] = _FREE

    def _begin(self, row: int, number: int) -> None:
        question = self._questions[number]
        *start, last = question.ids
        if start:
            self._model.read(torch.tensor(start, device=self._device), self._caches, row)
        self._owners[row], self._lengths[row], self._ids[row] = number, len(start), last
        self._draws[row] = np.random.default_rng(question.seed)

    def _keep(self, rows: npt.NDArray[np.int64]) -> None:
        """Go on with these rows only: nothing waits, and half of the work would be for nobody."""
        self._caches.keep(rows.tolist())
        self._draws = [self._draws[row] for row in rows.tolist()]
        self._owners, self._lengths, self._ids = (
            values[rows] for values in (self._owners, self._lengths, self._ids)
        )


def _response(question: Question, answer: list[_Step]) -> Response:
    tokens, tops, laws = zip(*answer, strict=True)
    return Response(
        task=question.task,
        prompt=question.prompt,
        is_greedy=question.temperature == 0,
        prompt_ids=np.array(question.ids, np.int32),
        token_ids=np.array(tokens, np.int32),
        top_ids=np.stack(tops),
        log_probs=np.stack(laws).astype(np.float16),
    )
