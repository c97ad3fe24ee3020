"""Training graphs of tiny random drafters, beside the CPU graphs whose weights they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_checkpoints import save_tiny_model

if TYPE_CHECKING:
    from omnidraft_npu.precision import Precision
    from omnidraft_npu.quantize.architecture import DecoderConfig
    from omnidraft_npu.quantize.training.graph import TrainingGraphOptions


@dataclass(frozen=True)
class TinyTraining:
    """A training graph and what it was made of."""

    path: Path
    config: "DecoderConfig"
    options: "TrainingGraphOptions"


def tiny_training(
    folder: Path,
    architecture: str = "llama",
    precision: "Precision" = "fp32",
    *,
    model: Mapping[str, Any] | None = None,
    **options: Any,
) -> TinyTraining:
    """Export a tiny model to `folder` as a drafter that learns.

    Args:
        folder: Of the graphs.
        architecture: One of `tiny_models.ARCHITECTURES`.
        precision: Of the weights.
        model: Other fields of its configuration.
        options: Fields of `TrainingGraphOptions`; small ones where none are given.
    """
    from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
    from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
    from omnidraft_npu.quantize.training.graph import TrainingGraphOptions, build_training_graph

    source = folder / "source"
    save_tiny_model(source, architecture, **model or {})
    checkpoint = open_checkpoint(source)
    shapes = TrainingGraphOptions(
        **{"lora_rank": 3, "batch": 2, "length": 20, "num_top": 6} | options
    )
    build_cpu_decoder(
        checkpoint.config,
        checkpoint.tensor,
        folder,
        CpuGraphOptions(
            precision=precision,
            context_length=64,
            lora_rank=shapes.lora_rank,
            lora_modules=shapes.lora_modules,
            has_hidden_states=True,
        ),
    )
    path = build_training_graph(checkpoint.config, folder, shapes)
    return TinyTraining(path, checkpoint.config, shapes)
