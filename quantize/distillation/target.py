"""The target as distillation sees it: opened, and found fit to be a teacher."""

from dataclasses import dataclass
from pathlib import Path

from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.text.tokenizer import Tokenizer

from ..checkpoints.checkpoint import Checkpoint, TokenizerFiles
from ..checkpoints.open_checkpoint import open_checkpoint
from ..tokenization.tokenizer_checks import check_usable
from .requirements import require_byte_fallback, require_plain_decoder
from .tokenizer import vocabulary_of


@dataclass(frozen=True, eq=False, kw_only=True)
class DistillTarget:
    """One target and what is needed of its tokenizer."""

    checkpoint: Checkpoint
    files: TokenizerFiles
    tokenizer: Tokenizer
    vocabulary: Vocabulary


def open_teacher(path: Path) -> Checkpoint:
    """The checkpoint at `path`, of an architecture that distillation can run.

    Raises:
        CheckpointError: it is damaged or not supported.
        ConfigError: its architecture cannot be run as a teacher.
    """
    checkpoint = open_checkpoint(path, other_way="choose another target")
    require_plain_decoder(checkpoint.config, path.name)
    return checkpoint


def open_target(path: Path) -> DistillTarget:
    """The target at `path`; reads no tensor.

    Raises:
        CheckpointError: it is damaged or not supported.
        ConfigError: its architecture cannot be run as a teacher.
        TokenizerError: its tokenizer is not known, or has no byte fallback, or its chat template
            cannot run.
    """
    checkpoint = open_teacher(path)
    files = checkpoint.tokenizer()
    check_usable(files, path.name)
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    vocabulary = vocabulary_of(files)
    require_byte_fallback(tokenizer, vocabulary, path.name)
    return DistillTarget(
        checkpoint=checkpoint, files=files, tokenizer=tokenizer, vocabulary=vocabulary
    )
