"""The target as a teacher: it answers prompts in batches, or reads texts, and tells its laws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from .llama import LayerCache, Llama
from .teacher_text import Response

Ids = npt.NDArray[np.int32]
NUM_TOP = 32
"""Likeliest tokens that are stored a position; the rest is under 3 % of the mass on average."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt ready to be answered."""

    task: str
    prompt: str
    ids: tuple[int, ...]
    """With the chat template."""
    temperature: float
    """0 takes the likeliest token."""


class Teacher:
    """The target in torch, in bfloat16 on either device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        end_ids: Sequence[int],
        device: torch.device,
        num_tokens: int,
    ) -> None:
        """Args: a checkpoint, ids that end an answer, where to run, ids that may be written."""
        config = checkpoint.config
        model = Llama(config)
        model.load_state_dict(
            {
                f"{name}.weight": torch.from_numpy(checkpoint.tensor(name))
                for name in config.tensor_shapes()
                if name != "lm_head"
            }
        )
        self._model = model.to(device, torch.bfloat16).eval()
        # Ties between likely tokens must not come from rounding: the head stays in float32.
        self._head = torch.from_numpy(
            checkpoint.tensor("embed_tokens" if config.has_tied_head else "lm_head")
        ).to(device)[:num_tokens]
        self._ends = frozenset(end_ids)
        self._device = device

    @torch.no_grad()
    def answer(
        self, questions: Sequence[Question], max_new_tokens: int, seed: int
    ) -> list[Response]:
        """Answers to all questions, written side by side."""
        generator = torch.Generator(self._device).manual_seed(seed)
        temperatures = torch.tensor([q.temperature for q in questions], device=self._device)
        lengths = [len(q.ids) for q in questions]
        rows = _Rows(self._model, lengths, max(lengths) + max_new_tokens, self._device)
        ids = torch.zeros(len(questions), max(lengths), dtype=torch.long, device=self._device)
        for row, q in enumerate(questions):
            ids[row, : lengths[row]] = torch.tensor(q.ids)
        states = rows.prefill(ids)
        answers: list[list[tuple[int, Ids, npt.NDArray[np.float16]]]] = [[] for _ in questions]
        alive = list(range(len(questions)))
        for _ in range(max_new_tokens):
            top_ids, log_probs = self._law(states)
            chosen = _choose(log_probs, temperatures[alive], generator)
            new = top_ids.gather(1, chosen[:, None])[:, 0]
            told = new.tolist(), top_ids.int().cpu().numpy(), log_probs.half().cpu().numpy()
            for i, token, top, law in zip(alive, *told, strict=True):
                answers[i].append((token, top, law))
            left = [n for n, token in enumerate(told[0]) if token not in self._ends]
            if not left:
                break
            if len(left) < len(alive):
                rows.keep(left)
                alive, new = [alive[n] for n in left], new[left]
            states = rows.step(new)
        return [_response(q, answer) for q, answer in zip(questions, answers, strict=True)]

    @torch.no_grad()
    def read(self, task: str, ids: Sequence[int]) -> Response:
        """A text that somebody else wrote, with what the teacher expected after each token."""
        tokens = torch.tensor([ids], device=self._device)
        states = self._model(tokens)[0, :-1]
        top_ids, log_probs = self._law(states)
        return Response(
            task=task,
            prompt="",
            source=str(hash(tuple(ids[:16])) & 0xFFFFFFFF),
            is_greedy=False,
            prompt_ids=np.array(ids[:1], np.int32),
            token_ids=np.array(ids[1:], np.int32),
            top_ids=top_ids.int().cpu().numpy(),
            log_probs=log_probs.half().cpu().numpy(),
        )

    def _law(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """``[rows, top]`` likeliest tokens and their log-probabilities."""
        logits = states.float() @ self._head.T
        top, ids = logits.topk(min(NUM_TOP, logits.shape[1]))
        return ids, top - logits.logsumexp(-1, keepdim=True)


class _Rows:
    """The caches of the answers under way."""

    def __init__(
        self, model: Llama, lengths: Sequence[int], num_slots: int, device: torch.device
    ) -> None:
        config = model.config
        shape = len(lengths), config.num_kv_heads, num_slots, config.head_dim
        self._model = model
        self._prompts = torch.tensor(lengths, device=device)
        self._keys, self._values = (
            [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in model.layers]
            for _ in range(2)
        )
        self._lengths = torch.zeros_like(self._prompts)

    def prefill(self, ids: Tensor) -> Tensor:
        """``[rows, hidden]`` states after each prompt; ``[rows, longest]`` ids are padded."""
        states = self._run(ids)
        self._lengths = self._prompts
        return states[torch.arange(len(ids)), self._prompts - 1]

    def step(self, ids: Tensor) -> Tensor:
        """``[rows, hidden]`` states after one more token of each row."""
        states = self._run(ids[:, None])
        self._lengths = self._lengths + 1
        return states[:, 0]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        self._keys = [k[rows] for k in self._keys]
        self._values = [v[rows] for v in self._values]
        self._lengths = self._lengths[rows]

    def _run(self, ids: Tensor) -> Tensor:
        positions = self._lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        caches = [
            LayerCache(k, v, self._lengths) for k, v in zip(self._keys, self._values, strict=True)
        ]
        states: Tensor = self._model(ids, caches, positions)
        return states


def _choose(log_probs: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """``[rows]`` ranks: the first where the temperature is 0, else drawn."""
    noise = torch.rand(log_probs.shape, generator=generator, device=log_probs.device)
    gumbel = -torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
    warm = log_probs / temperatures.clamp(min=1e-3)[:, None] + gumbel
    return torch.where(temperatures > 0, warm.argmax(1), 0)


def _response(
    question: Question, answer: list[tuple[int, Ids, npt.NDArray[np.float16]]]
) -> Response:
    tokens, tops, laws = zip(*answer, strict=True)
    return Response(
        task=question.task,
        prompt=question.prompt,
        is_greedy=question.temperature == 0,
        prompt_ids=np.array(question.ids, np.int32),
        token_ids=np.array(tokens, np.int32),
        top_ids=np.stack(tops),
        log_probs=np.stack(laws),
    )
