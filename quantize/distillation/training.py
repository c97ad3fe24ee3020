"""The training loop: batches of laws, a cosine schedule, checkpoints to go on from."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnidraft_npu.documents import convert_document
from omnidraft_npu.errors import CheckpointError, ConfigError
from omnidraft_npu.files import atomic_path

from .examples import Batch, Example, batches
from .llama import Llama
from .loss import batch_logits, held_out_acceptance, law_loss
from .processes import Processes, products_in

_WARMUP_STEPS = 30
_LAST_RATE = 0.02
"""Share of the learning rate that is left at the end."""
_MAX_NORM = 1.0
_SAVE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a drafter is trained."""

    max_pieces: int = 20_000_000
    """Pieces to go through, padding and repetitions included."""
    max_hours: float | None = None
    """Wall time after which to end, if that comes first; the schedule follows it."""
    batch_pieces: int = 3072
    """Pieces a step and process, padding included."""
    learning_rate: float = 1e-3
    """The highest, after warming up."""
    evaluate_minutes: float = 5.0
    """Wall time between two looks at the held-out text, each followed by a checkpoint."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_pieces < 1:
            raise ConfigError(
                f"max_pieces is {self.max_pieces}, must be at least 1: use --max-pieces 1 or more"
            )
        if self.max_hours is not None and not 0 < self.max_hours < math.inf:
            raise ConfigError(
                f"hours is {self.max_hours}, must be above 0: use --hours 3, say, or leave it out"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(
                f"learning_rate is {self.learning_rate}, must be above 0: "
                "use --learning-rate 1e-3, say"
            )
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}, must not be negative: use --seed 0 or more")


@dataclass(kw_only=True)
class Progress:
    """How far training is; kept in checkpoints."""

    step: int = 0
    seen_pieces: int = 0
    seconds: float = 0.0
    """Wall time of all runs."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    num_examples: int = 0
    """Examples of this epoch; with others, it begins anew."""
    best: float = -1.0
    """Best mean acceptance over the tasks so far."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """Step, pieces, seconds, loss and acceptance by task at every evaluation."""


Tell = Callable[[Progress, float, float], None]
"""Told of the progress, the recent loss, and the seconds left."""


class _LawLoss(nn.Module):
    """A drafter whose forward pass is its loss, as gradients are averaged over processes."""

    def __init__(self, model: Llama, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self._device, self._dtype = model, device, dtype

    def forward(self, batch: Batch) -> Tensor:
        with products_in(self._dtype, self._device):
            logits = batch_logits(self.model, batch, self._device)
        ids = torch.from_numpy(batch.laws.ids).long().to(self._device)
        return law_loss(logits, ids, torch.from_numpy(batch.laws.probs).to(self._device))


class Trainer:
    """One drafter under training; `run` goes on from wherever its checkpoint is."""

    def __init__(self, model: Llama, config: TrainingConfig, processes: Processes) -> None:
        self.model = model.to(processes.device)
        self.progress = Progress()
        self._config, self._processes = config, processes
        self._optimizer = _optimizer(model, config)

    def run(
        self,
        examples: list[Example],
        held_out: list[Example],
        checkpoint: Path,
        tell: Tell,
        keep: Callable[[Llama], None],
    ) -> None:
        """Train until the budget is used.

        Args:
            examples: What is learned.
            held_out: What the drafter is measured on; may be empty.
            checkpoint: File written after each evaluation, and every two minutes.
            tell: Called after every step of the first process.
            keep: Called with the model whenever it is better than ever, and at the end where
                nothing was held out.
        """
        loss_of = self._processes.wrap(
            _LawLoss(self.model, self._processes.device, self._processes.dtype)
        )
        started = last_look = last_save = time.monotonic()
        before = self.progress.seconds
        recent = 0.0
        for group in self._groups(examples):
            loss = self._step(loss_of, Batch.of(group))
            recent = loss if recent == 0 else 0.95 * recent + 0.05 * loss
            # Of the first process, as the schedule must be the same in all.
            self.progress.seconds = self._processes.first(before + time.monotonic() - started)
            is_end = self._share() >= 1
            is_due = time.monotonic() - last_look >= 60 * self._config.evaluate_minutes
            if self._processes.agree(is_end or is_due):
                self._look(held_out, recent, keep, is_end=is_end)
                self.save(checkpoint)
                last_look = last_save = time.monotonic()
            elif time.monotonic() - last_save >= _SAVE_S:
                self.save(checkpoint)
                last_save = time.monotonic()
            tell(self.progress, recent, self._seconds_left())
            if self._processes.agree(is_end):
                return

    def save(self, path: Path) -> None:
        """Write everything that a later run needs to go on; the first process does."""
        if not self._processes.is_first:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        with atomic_path(path) as temporary:
            torch.save(state, temporary)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it is damaged or of another drafter.
        """
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.progress = convert_document(
                state["progress"], Progress, "its progress", advice="it is damaged", is_closed=True
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{path} is damaged or of another drafter ({reason}): "
                "delete it to train from the start"
            ) from error

    def _step(self, loss_of: nn.Module, batch: Batch) -> float:
        self._set_rates()
        loss: Tensor = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.progress.step += 1
        self.progress.batch += self._processes.count
        seen = int(self._processes.first(batch.pieces.size))
        self.progress.seen_pieces += seen * self._processes.count
        return float(loss.detach())

    def _groups(self, examples: list[Example]) -> Iterator[list[Example]]:
        """This process's share of every batch, epoch after epoch."""
        rank, count, state = self._processes.rank, self._processes.count, self.progress
        if state.num_examples != len(examples):
            state.epoch, state.batch = state.epoch + (state.step > 0), 0
            state.num_examples = len(examples)
        while True:
            rng = np.random.default_rng((self._config.seed, state.epoch))
            groups = list(batches(examples, self._config.batch_pieces, rng))
            groups += groups[: -len(groups) % count]
            for i in range(state.batch, len(groups), count):
                yield groups[i + rank]
            state.epoch, state.batch = state.epoch + 1, 0

    def _share(self) -> float:
        """How much of the budget is used, 0 to 1."""
        share = self.progress.seen_pieces / self._config.max_pieces
        if self._config.max_hours is not None:
            share = max(share, self.progress.seconds / 3600 / self._config.max_hours)
        return min(share, 1.0)

    def _seconds_left(self) -> float:
        share = max(self._share(), 1e-6)
        return self.progress.seconds * (1 - share) / share

    def _set_rates(self) -> None:
        factor = rate_factor(self.progress.step, self._share())
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * factor

    def _look(
        self, held_out: list[Example], loss: float, keep: Callable[[Llama], None], *, is_end: bool
    ) -> None:
        """Measure the drafter, and keep it if it is the best."""
        if not self._processes.is_first:
            return
        if not held_out:
            if is_end:
                keep(self.model)
            return
        rng = np.random.default_rng(0)
        groups = batches(held_out, self._config.batch_pieces, rng)
        device = self._processes.device
        with products_in(self._processes.dtype, device):
            found = held_out_acceptance(self.model, groups, device)
        mean = sum(found.values()) / len(found)
        self.progress.curve.append(
            {
                "step": self.progress.step,
                "pieces": self.progress.seen_pieces,
                "seconds": round(self.progress.seconds),
                "loss": round(loss, 4),
                **{task: round(value, 4) for task, value in found.items()},
            }
        )
        if mean > self.progress.best:
            self.progress.best = mean
            keep(self.model)


def rate_factor(step: int, share: float) -> float:
    """Share of the learning rate: rises over the first steps, then falls along a cosine.

    Args:
        step: Steps that are done.
        share: Part of the budget that is used, 0 to 1.
    """
    warm = min(1.0, (step + 1) / _WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return warm * (_LAST_RATE + (1 - _LAST_RATE) * cosine)


def _optimizer(model: Llama, config: TrainingConfig) -> torch.optim.Optimizer:
    """Adam, with decay on the projections only."""
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
