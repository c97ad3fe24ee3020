"""What the user can choose about decoding; one frozen class a concern."""

import math
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError


def _check(is_right: bool, what: str, remedy: str) -> None:
    if not is_right:
        raise ConfigError(f"{what}: {remedy}")


MAX_PENALTY = 1000.0
"""A repetition penalty of more, or of less than its inverse, leads past what a logit can hold."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The target's own sampling; the law that decoding preserves."""

    temperature: float = 0.0
    """0 decodes greedily."""
    top_k: int = 0
    """Only the most likely tokens are drawn; 0 for all."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the prompt or response holds and multiplies
    the negative ones; 1 does nothing. Applies to greedy decoding too."""
    seed: int | None = None
    """Of the random numbers; None draws others every time."""

    def __post_init__(self) -> None:
        _check(
            0.0 <= self.temperature < math.inf,
            f"temperature is {self.temperature}, must be 0 or more, and finite",
            "use --temperature 0 for greedy decoding, 1 for the model's own probabilities",
        )
        _check(
            self.top_k >= 0,
            f"top_k is {self.top_k}, must not be negative",
            "use --top-k 0 for all tokens",
        )
        _check(
            0.0 < self.top_p <= 1.0,
            f"top_p is {self.top_p}, must be above 0 and at most 1",
            "use --top-p 1 for all tokens",
        )
        _check(
            0.0 <= self.min_p <= 1.0,
            f"min_p is {self.min_p}, must be from 0 to 1",
            "use --min-p 0 for all tokens",
        )
        _check(
            1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY,
            f"repetition_penalty is {self.repetition_penalty}, must be from {1 / MAX_PENALTY:g} to "
            f"{MAX_PENALTY:g}",
            "use --repetition-penalty 1 for none",
        )
        _check(
            self.seed is None or self.seed >= 0,
            f"seed is {self.seed}, must not be negative",
            "use --seed 0 or more",
        )


MAX_ADAPTED_LENGTH = 31
"""Most pieces of a round whose draft length is adapted: with the token before them 32 to verify."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How one response is decoded."""

    max_new_tokens: int = 128
    max_draft_tokens: int = 4
    """The k of a round: drafter pieces drawn before the target verifies."""
    adapts_draft_length: bool = False
    """Whether a round ends where another piece costs more than it promises (`DraftLength`);
    `max_draft_tokens` is only the most then."""
    stop_token_ids: frozenset[int] = frozenset()
    """Target ids that end the response; they are emitted, not shown."""
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens is {self.max_new_tokens}, must be at least 1: "
                "use --max-new-tokens 1 or more"
            )
        if self.max_draft_tokens < 1:
            raise ConfigError(
                f"draft_length is {self.max_draft_tokens}, must be at least 1: use --draft-length "
                "1 or more, or auto, or --no-draft to decode with the target alone"
            )


Device = Literal["auto", "npu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where the models run."""

    draft_device: Device = "auto"
    """`auto` takes the NPU where there is one and says why where not; `npu` insists."""
    target_device: Device = "auto"
    simulate: bool = False
    """Whether the slow simulator on x86_64 counts as an NPU."""
    soc: str | None = None
    """Name of the chip; None for the one that is found, or that the bundle was made for."""
