"""The drafter before training: some of the target's layers, its embeddings, thinner MLPs."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.vocabulary import Vocabulary

from ..architecture import DecoderConfig
from ..checkpoints.checkpoint import Checkpoint
from .llama import Llama

Floats = npt.NDArray[np.float32]


def drafter_config(
    target: DecoderConfig,
    *,
    num_layers: int,
    intermediate_size: int,
    vocab_size: int,
    context_length: int,
) -> DecoderConfig:
    """The target's width, heads and rotary positions, fewer layers and pieces, a tied head."""
    return dataclasses.replace(
        target,
        architecture="llama",
        num_layers=num_layers,
        intermediate_size=intermediate_size,
        num_logits=vocab_size,
        context_length=context_length,
        layer_types=tuple("full" for _ in range(num_layers)),
        has_tied_head=True,
    )


def start_from_target(
    model: Llama,
    target: Checkpoint,
    layers: Sequence[int],
    pieces: Vocabulary,
    encoder: PieceEncoder,
    vocabulary: Vocabulary,
) -> None:
    """Fill a drafter with what the target knows.

    A piece gets the mean of the target's embeddings of its spelling. Of each MLP the neurons
    with the largest weights are kept.

    Args:
        model: The drafter; its width and heads are the target's.
        target: Is read one tensor at a time.
        layers: The target's layer that each of the drafter's begins as.
        pieces: The drafter's vocabulary.
        encoder: Spells bytes in the target's tokens.
        vocabulary: The target's vocabulary.
    """
    tensors: dict[str, Tensor] = {}
    embedding = target.tensor("embed_tokens")
    tensors["embed_tokens"] = torch.from_numpy(
        piece_embeddings(embedding, pieces, encoder, vocabulary, num_rows=model.config.num_logits)
    )
    tensors["final_norm"] = torch.from_numpy(target.tensor("final_norm"))
    inner = model.config.intermediate_size
    for i, source in enumerate(layers):
        names = [
            n.split(".")[2] for n in target.config.tensor_shapes() if n.startswith("layers.0.")
        ]
        found = {name: target.tensor(f"layers.{source}.{name}") for name in names}
        kept = largest_neurons(found, inner)
        found |= {name: found[name][kept] for name in ("gate_proj", "up_proj")}
        found["down_proj"] = found["down_proj"][:, kept]
        tensors |= {
            f"layers.{i}.{name}": torch.from_numpy(np.ascontiguousarray(values))
            for name, values in found.items()
        }
    model.load_state_dict({f"{name}.weight": values for name, values in tensors.items()})


def piece_embeddings(
    embedding: Floats,
    pieces: Vocabulary,
    encoder: PieceEncoder,
    vocabulary: Vocabulary,
    *,
    num_rows: int,
) -> Floats:
    """``[num_rows, hidden]`` the mean of the target's embeddings of each piece's spelling.

    Markup takes the row of equal markup; what has no spelling gets the mean of all rows.
    """
    markup = {content: i for i, content in vocabulary.special_contents.items()}
    rows = np.tile(embedding.mean(axis=0), (num_rows, 1))
    spellings = encoder.encode_batch(pieces.all_bytes())
    for piece, spelling in enumerate(spellings):
        same = markup.get(pieces.special_contents.get(piece, ""))
        ids = spelling if same is None else [same]
        if ids:
            rows[piece] = embedding[ids].mean(axis=0)
    return rows


def largest_neurons(layer: dict[str, Floats], num_kept: int) -> npt.NDArray[np.int64]:
    """Sorted indices of the neurons of an MLP with the largest product of weight norms."""
    size = (
        np.linalg.norm(layer["gate_proj"], axis=1)
        * np.linalg.norm(layer["up_proj"], axis=1)
        * np.linalg.norm(layer["down_proj"], axis=0)
    )
    kept: npt.NDArray[np.int64] = np.sort(np.argsort(-size, kind="stable")[:num_kept])
    return kept
