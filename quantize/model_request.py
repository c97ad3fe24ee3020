"""One model to export: what the user named, and how its graphs are to be."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.manifest import MAX_CONTEXT_LENGTH
from omnidraft_npu.precision import Precision
from omnidraft_npu.store.local import resolve_model

from .htp_request import HtpRequest
from .optimum_export import require_optimum
from .stages import Facts
from .training_stage import TrainingShape

DEFAULT_CONTEXT_LENGTH = 4096

Exporter = Literal["builder", "optimum"]


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One model to export, and how."""

    name: str
    """Name in the bundle."""
    path: Path
    """Checkpoint: a Hugging Face folder or a GGUF file."""
    source: str
    """What the manifest says of its origin: a built-in name, a hub id or a file name."""
    precision: Precision = "int8"
    exporter: Exporter = "builder"
    context_length: int = DEFAULT_CONTEXT_LENGTH
    """Most tokens of prompt and response; a model trained for less gets its own limit."""
    lora_rank: int = 0
    """Rank of the LoRA inputs; 0 for none."""
    has_hidden_states: bool = False
    training: TrainingShape | None = None
    """Batches of the training graph of a model with LoRA inputs; None for no such graph."""
    htp: HtpRequest | None = None
    """None for no NPU flavour."""

    def __post_init__(self) -> None:
        if self.context_length > MAX_CONTEXT_LENGTH:
            raise ConfigError(
                f"context_length is {self.context_length}, must be at most {MAX_CONTEXT_LENGTH}: "
                f"use --context-length {MAX_CONTEXT_LENGTH} or less"
            )
        if self.context_length < 16:
            raise ConfigError(
                f"context_length is {self.context_length}, must be at least 16: "
                "use --context-length 16 or more"
            )
        if self.lora_rank < 0:
            raise ConfigError(
                f"lora_rank is {self.lora_rank}, must not be negative: use --lora-rank 0 for a "
                "drafter that does not learn"
            )
        if self.exporter == "optimum" and self.htp is not None:
            raise ConfigError(
                f"{self.name} is not built by our own builder, so it has no graphs for the NPU: "
                "leave out --soc, or choose a model of a supported architecture"
            )

    def fitted_context(self, longest: int | None) -> int:
        """Tokens of the exported context: as many as were asked for, if the model has them."""
        return self.context_length if longest is None else min(self.context_length, longest)

    def identity(self) -> Facts:
        """What decides the exported files, for taking over finished stages."""
        return {
            "name": self.name,
            "source": self.source,
            "files": _fingerprint(self.path),
            "precision": self.precision,
            "exporter": self.exporter,
            "context_length": self.context_length,
            "lora_rank": self.lora_rank,
            "has_hidden_states": self.has_hidden_states,
            "training": None if self.training is None else str(self.training),
            "htp": None if self.htp is None else self.htp.identity(),
        }


def model_request(
    name: str,
    *,
    precision: Precision,
    context_length: int,
    exporter: Exporter = "builder",
    lora_rank: int = 0,
    training: TrainingShape | None = None,
    htp: HtpRequest | None = None,
) -> ModelRequest:
    """A request for a model the user named: a path, a built-in name or a hub id.

    With a `lora_rank` it can learn: it has LoRA inputs and gives its hidden states.

    Raises:
        StoreError: there is no such path, and no such model in the local store.
        ConfigError, CheckpointError: see `require_optimum`.
    """
    path = resolve_model(name)
    stem = path.name.removesuffix(".gguf") if path.is_file() else path.resolve().name
    is_path = Path(name).exists()
    last = stem if is_path else name.split("/")[-1]
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")
    request = ModelRequest(
        name=plain or "model",
        path=path,
        source=path.resolve().name if is_path else name,
        precision=precision,
        exporter=exporter,
        context_length=context_length,
        lora_rank=lora_rank,
        has_hidden_states=lora_rank > 0,
        training=training if lora_rank > 0 else None,
        htp=htp,
    )
    if exporter == "optimum":
        require_optimum(path)
    return request


def _fingerprint(path: Path) -> list[Any]:
    """Name, size and time of a checkpoint's files: enough to see that it changed."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.is_file()]
