"""A checkpoint whose tensors lie in files: the part that every format shares."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

from ..architecture import DecoderConfig
from ..tokenization.tokenizer_checks import fitted_to_model
from .checkpoint import SourceFiles, TokenizerFiles
from .stored_tensor import BLOCK_ENCODINGS, FLOAT_ENCODINGS, StoredTensor

Tensor = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A description and the places of its tensors; see `Checkpoint`."""

    path: Path
    config: DecoderConfig
    source_files: SourceFiles
    stored: Mapping[str, StoredTensor] = field(repr=False)
    """Exactly the tensors of ``config.tensor_shapes()``, by canonical name."""
    to_canonical: Callable[[str, Tensor], Tensor] = field(repr=False)
    """Brings a tensor from the file's convention (rotary layout, norms) to ours."""
    read_tokenizer: Callable[[], TokenizerFiles] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """The tensor of a canonical name, as float32; see `Checkpoint.tensor`."""
        if name not in self.stored:
            raise CheckpointError(
                f"{self.path.name}: a {self.config.architecture} decoder of this shape has no "
                f"tensor {name!r}"
            )
        return self.to_canonical(name, self.stored[name].read())

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer, found to belong to this model; see `Checkpoint.tokenizer`."""
        return fitted_to_model(self.read_tokenizer(), self.config, self.path.name)


def match_tensors(
    config: DecoderConfig, names: Mapping[str, str], found: Mapping[str, StoredTensor], source: str
) -> dict[str, StoredTensor]:
    """The stored tensor of every canonical name, of the right shape.

    Args:
        config: what the checkpoint should hold.
        names: the file's name of every canonical name.
        found: what it does hold, by the file's names.
        source: what to call the checkpoint in an error.

    Raises:
        CheckpointError: a tensor is missing, has another shape or an encoding that is not read.
    """
    matched = {}
    for name, shape in config.tensor_shapes().items():
        stored = found.get(names[name])
        if stored is None:
            raise CheckpointError(
                f"{source}: tensor {names[name]} is missing, of shape {list(shape)}; "
                "get the checkpoint again"
            )
        if stored.encoding not in FLOAT_ENCODINGS + BLOCK_ENCODINGS and stored.scale is None:
            raise CheckpointError(
                f"{source}: tensor {names[name]} is stored as {stored.encoding}, which is not "
                f"supported; supported are {', '.join(FLOAT_ENCODINGS + BLOCK_ENCODINGS)}"
            )
        if stored.shape != shape:
            raise CheckpointError(
                f"{source}: tensor {names[name]} has shape {list(stored.shape)}, the "
                f"configuration asks for {list(shape)}; they are not of one model"
            )
        matched[name] = stored
    return matched


def refuse_unused(
    unused: Iterable[str], config: DecoderConfig, source: str, *, other_way: str
) -> None:
    """Refuse a checkpoint with weights that the described decoder would leave out.

    Args:
        unused: their names.
        config: the decoder.
        source: what to call the checkpoint in an error.
        other_way: what to do instead.

    Raises:
        CheckpointError: there is one.
    """
    name = min(unused, default=None)
    if name is not None:
        raise CheckpointError(
            f"{source}: tensor {shown_text(name)} has no place in a {config.architecture} decoder "
            f"of this configuration, so the model computes something else; {other_way}"
        )
