"""What the user can choose about decoding; one frozen class a concern."""

from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The target's own sampling; the law that decoding preserves."""

    temperature: float = 0.0
    """0 decodes greedily."""

    def __post_init__(self) -> None:
        if self.temperature != 0.0:
            raise ConfigError(
                f"temperature {self.temperature} is not supported yet: only greedy decoding is. "
                "Use --temperature 0"
            )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How one response is decoded."""

    max_new_tokens: int = 128
    max_draft_tokens: int = 4
    """The k of a round: drafter pieces drawn before the target verifies."""
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
                f"draft_tokens is {self.max_draft_tokens}, must be at least 1: "
                "use --draft-tokens 1 or more, or --no-draft to decode with the target alone"
            )
