"""What a run of `distill` is asked for, and who is told how far it is."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.prompts import TaskPrompt

from .tokenizer import MIN_PIECES
from .training import TrainingConfig
from .written_prompts import written_prompts

if TYPE_CHECKING:
    from .training import Progress


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
    """Answers written side by side."""
    shape: DrafterShape = field(default_factory=DrafterShape)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("text_tokens", "max_new_tokens", "max_example_pieces", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")

    def all_prompts(self) -> tuple[TaskPrompt, ...]:
        """What the target really answers."""
        return self.prompts or tuple(written_prompts(self.training.seed))

    def identity(self) -> dict[str, Any]:
        """What may not change when a run is taken up again; budgets may."""
        return {
            "target": self.target.name,
            "seed": self.training.seed,
            "max_new_tokens": self.max_new_tokens,
            **json.loads(json.dumps(asdict(self.shape))),
        }


def prompts_hash(prompts: Sequence[TaskPrompt]) -> str:
    """Hex SHA-256 of prompts and their tasks, in order."""
    rows = [[p.task, p.prompt] for p in prompts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


class Watcher(Protocol):
    """Told how far a run is; by the first process only."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Items done of a stage, and their total."""
        ...

    def training(self, progress: "Progress", loss: float, seconds_left: float) -> None:
        """After every step."""
        ...
