"""How a drafter learns from what its target writes."""

from dataclasses import dataclass

from omnidraft_npu.errors import ConfigError

from .adamw import AdamWConfig
from .lora_trainer import Loss

_OPTIMIZER = AdamWConfig(learning_rate=2e-3, warmup_steps=5, averaging=0.97)

NUM_TOP = 32
"""Pieces of a law that an example keeps."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """When a drafter learns, from what, and how fast."""

    loss: Loss = "overlap"
    """What is rejected: `trie` alone first flattens the drafter's law, which costs acceptance
    before it gains some."""
    batch: int = 8
    """New responses that make a lesson."""
    max_new: int = 32
    """New responses that one lesson learns from, the latest ones; the others count as older."""
    passes: int = 4
    """Responses that a lesson learns from, over its new ones: the others are older."""
    num_recent: int = 512
    """Responses that those others are drawn from, the latest ones."""
    num_anchors: int = 2
    """Rows of an update that hold it to what it drafted before, see `learner_anchors`."""
    held_out_every: int = 5
    """One in so many responses is not learned from, it judges the others."""
    max_held_out: int = 32
    """Responses that judge an adapter, the latest ones; older ones are learned from."""
    num_latest: int = 8
    """Of those, the ones that judge it by themselves too: what is asked may have changed."""
    min_judged: int = 200
    """Tokens of held-back responses before an adapter can be judged."""
    min_tokens: int = 8
    """Shorter responses are not kept."""
    max_context: int = 512
    """Pieces kept of what led to a response."""
    num_context: int = 64
    """Pieces that a row of the training graph has before what it learns, at least."""
    is_joint: bool = False
    """Whether the acceptance head's loss moves the adapter too."""
    optimizer: AdamWConfig = _OPTIMIZER
    seed: int = 0

    def is_held_out(self, number: int) -> bool:
        """Whether the example of this number evaluates the others, at first."""
        return number % self.held_out_every == 0

    def __post_init__(self) -> None:
        lowest = {
            "batch": 1,
            "max_new": self.batch,
            "passes": 1,
            "num_recent": 1,
            "num_anchors": 0,
            "held_out_every": 2,
            "max_held_out": 1,
            "num_latest": 1,
            "min_judged": 1,
            "min_tokens": 1,
            "max_context": 0,
            "num_context": 1,
            "seed": 0,
        }
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least {least}")
