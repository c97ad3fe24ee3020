"""The training graph of a drafter in a bundle, and what the manifest says of it."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from omnidraft_npu.documents import convert_document
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.manifest import ModelEntry, TrainingEntry
from omnidraft_npu.progress import Report

from .architecture import DecoderConfig
from .stages import Facts, Stages, Tell


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


def export_training(
    entry: ModelEntry,
    config: DecoderConfig,
    shape: TrainingShape,
    stages: Stages,
    progress: Report,
) -> TrainingEntry:
    """Write the training graph of a drafter beside its CPU graph, and check its gradients.

    Args:
        entry: Of the drafter, whose CPU graph is there.
        config: Of the drafter.
        shape: Of a batch.
        stages: Where the bundle is made.
        progress: Told of every step.

    Raises:
        ExportError: a gradient is wrong.
    """
    from .training.graph import FILE_NAME

    facts = stages.run(
        f"training graph of {entry.name}",
        f"{entry.folder}/cpu/{FILE_NAME}",
        lambda path, tell: _add_training_graph(path, entry, config, shape, tell),
        progress,
        is_file=True,
    )
    where = f"a finished part of {stages.root}"
    return convert_document(facts, TrainingEntry, where, advice="remove that", is_closed=True)


def _add_training_graph(
    path: Path, entry: ModelEntry, config: DecoderConfig, shape: TrainingShape, tell: Tell
) -> Facts:
    """The graph's `TrainingEntry` as JSON."""
    from .training.graph import TrainingGraphOptions, build_training_graph
    from .training.parity import NUM_STEPS, check_training_graph

    tell(0, 1 + NUM_STEPS)
    options = TrainingGraphOptions(
        lora_rank=entry.graphs["cpu"].lora_rank,
        batch=shape.batch,
        length=min(shape.length, entry.context_length),
    )
    build_training_graph(config, path.parent, options)
    tell(1, 1 + NUM_STEPS)
    made = TrainingEntry(
        path=f"{entry.folder}/cpu/{path.name}",
        lora_rank=options.lora_rank,
        batch=options.batch,
        length=options.length,
        num_top=options.num_top,
        gradient_error=check_training_graph(
            path, config, options, lambda done: tell(1 + done, 1 + NUM_STEPS)
        ),
    )
    return dataclasses.asdict(made)
