"""The decoder graph of the CPU flavour: dynamic lengths, ONNX Runtime's fused operators.

Its signature is onnxruntime-genai's, so a target built there and one built here are the
same to the runtime:

===============================  ================================  =========================
`input_ids`                      int64 ``[batch, length]``         tokens to append
`attention_mask`                 int64 ``[batch, total]``          ones; total = kept + length
`past_key_values.{i}.key|value`  ``[batch, kv_heads, past, dim]``  cache; may be `present`
`logits_from`                    int64 ``[1]``, 0 if not fed       first position with logits
`attention_rows`                 int64 ``[1]``, 1 if not fed       least rows that attention sees
`lora.layers.{i}.{module}.A|B`   ``[in, rank]``, ``[rank, out]``   where a rank is declared
`logits`                         ``[batch, n, num_logits]``        n = length - logits_from
`present.{i}.key|value`          as the past, grown if not shared
`hidden_states`                  ``[batch, length, hidden]``       where asked; after final norm
===============================  ================================  =========================
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lora import MODULES
from omnidraft_npu.precision import Precision

from .architecture import DecoderConfig
from .cpu_decoder_graph import CpuDecoderGraph
from .graph_writer import new_graph
from .lora_branch import check_lora

Floats = npt.NDArray[np.float32]
Tensors = Callable[[str], Floats]

_OPSET = 21


@dataclass(frozen=True, kw_only=True)
class CpuGraphOptions:
    """What a CPU graph can do beyond its model."""

    precision: Precision = "int8"
    context_length: int
    """Rows of the rotary tables: the most tokens a cache can hold."""
    lora_rank: int = 0
    """Rank of the LoRA inputs; 0 leaves them out."""
    lora_modules: tuple[str, ...] = MODULES
    """Projections with LoRA inputs, where there is a rank."""
    has_hidden_states: bool = False
    """Whether the graph also gives `hidden_states`."""
    has_attention_rows: bool = True
    """Whether attention can see more rows than there are tokens: a target's exact passes need
    it, a drafter's do not and are cheaper without."""

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ConfigError(
                f"context_length is {self.context_length}, must be at least 1: "
                "use --context-length 16 or more"
            )
        check_lora(self.lora_rank, self.lora_modules)


def build_cpu_decoder(
    config: DecoderConfig,
    tensors: Tensors,
    folder: Path,
    options: CpuGraphOptions,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write ``model.onnx`` and ``model.onnx.data`` into `folder`, one tensor after another.

    Args:
        config: Shape and variant of the model.
        tensors: Gives a tensor by its canonical name; each is asked for once.
        folder: Made if absent. Nothing is left in it if the build fails.
        options: Precision, context, LoRA, hidden states.
        progress: Told the name of each tensor that is read.

    Returns:
        Path of the graph.

    Raises:
        ExportError: the folder cannot be written.
    """

    def read(name: str) -> Floats:
        if progress is not None:
            progress(name)
        return tensors(name)

    with new_graph(folder, opset=_OPSET) as graph:
        CpuDecoderGraph(
            config,
            read,
            graph,
            precision=options.precision,
            context_length=options.context_length,
            lora_rank=options.lora_rank,
            lora_modules=options.lora_modules,
            has_hidden_states=options.has_hidden_states,
            has_attention_rows=options.has_attention_rows,
        ).build()
    return graph.model_path
