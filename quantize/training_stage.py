"""The training graph of a drafter in a bundle, and what the manifest says of it."""

import re
from dataclasses import dataclass
from pathlib import Path

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.manifest import TrainingEntry

from .architecture import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """How many pieces one update of a drafter learns from."""

    batch: int = 8
    """Responses."""
    length: int = 256
    """Pieces of a response and what led to it."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.length < 2:
            raise ConfigError(
                f"the training shape is {self}, must be at least 1x2: use --training-shape 8x256"
            )

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}"

    @classmethod
    def parse(cls, text: str) -> "TrainingShape":
        """Read ``8x256``.

        Raises:
            ConfigError: it is no such text.
        """
        found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
        if found is None:
            raise ConfigError(
                f"the training shape is {text!r}, must be responses x pieces: "
                "use --training-shape 8x256"
            )
        return cls(batch=int(found[1]), length=int(found[2]))


def add_training_graph(
    config: DecoderConfig,
    cpu: Path,
    folder: str,
    *,
    lora_rank: int,
    shape: TrainingShape,
    context_length: int,
) -> TrainingEntry:
    """Write the training graph of a drafter beside its CPU graph, and check its gradients.

    Args:
        config: Of the drafter.
        cpu: Folder of the CPU graph.
        folder: The drafter's path in the bundle.
        lora_rank: Of the CPU graph's LoRA inputs.
        shape: Of a batch.
        context_length: Of the CPU graph; no row is longer.

    Raises:
        ExportError: a gradient is wrong.
    """
    from .training.graph import TrainingGraphOptions, build_training_graph
    from .training.parity import check_training_graph

    options = TrainingGraphOptions(
        lora_rank=lora_rank, batch=shape.batch, length=min(shape.length, context_length)
    )
    path = build_training_graph(config, cpu, options)
    return TrainingEntry(
        path=f"{folder}/{path.relative_to(cpu.parent).as_posix()}",
        lora_rank=lora_rank,
        batch=options.batch,
        length=options.length,
        num_top=options.num_top,
        gradient_error=check_training_graph(path, config, options),
    )
