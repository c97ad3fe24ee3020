"""A decoder graph that was not built here, with what the manifest needs to know of it."""

from dataclasses import dataclass
from typing import Literal

from omnidraft_npu.manifest import Cache

from .checkpoints.checkpoint import SourceFiles, TokenizerFiles


@dataclass(frozen=True, kw_only=True)
class ForeignGraph:
    """Facts of a ``model.onnx`` that another exporter made."""

    exporter: Literal["optimum", "external"]
    architecture: str
    precision: str
    cache: Cache
    num_logits: int
    context_length: int | None
    """Positions the model has; None if it does not say."""
    source_files: SourceFiles
    tokenizer: TokenizerFiles
