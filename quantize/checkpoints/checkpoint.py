"""The one face of every checkpoint format: a description, lazy tensors, a tokenizer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..architecture import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the bundle needs to turn text into this model's ids and back."""

    tokenizer_json: str
    """A `tokenizers` JSON document."""
    tokenizer_config: dict[str, Any]
    """`tokenizer_config.json`: special tokens by role, `chat_template` where there is one."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a response (generation config and end-of-turn included)."""
    bos_token_id: int | None
    """First id of every sequence, None where the model wants none."""


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """Configuration documents copied into the bundle as they are."""

    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)


class Checkpoint(Protocol):
    """An opened checkpoint; tensors are read one at a time."""

    @property
    def path(self) -> Path:
        """File or folder it was read from."""
        ...

    @property
    def config(self) -> DecoderConfig:
        """Shape and variant."""
        ...

    @property
    def source_files(self) -> SourceFiles:
        """Hugging Face style documents; made from the metadata for a GGUF."""
        ...

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor of a canonical name (`DecoderConfig.tensor_shapes`), as float32.

        Raises:
            CheckpointError: it is missing, has the wrong shape or holds NaN or infinity.
        """
        ...

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer, from the folder or rebuilt from the metadata.

        Raises:
            TokenizerError: there is none, or it cannot be rebuilt exactly.
        """
        ...
