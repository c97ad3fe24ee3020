"""What a run needs, looked at before it starts; imports no torch."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from omnidraft_npu.bridge.vocabulary import Vocabulary, kind_of
from omnidraft_npu.errors import ConfigError, PromptError, TokenizerError
from omnidraft_npu.extras import install_hint
from omnidraft_npu.text.tokenizer import Tokenizer

from ..architecture import DecoderConfig

_TEXT_BYTES_A_TOKEN = 250
_RUN_BYTES_A_TOKEN = 900
"""Examples in memory for each token of text."""
_BYTES_A_PARAMETER = 20
"""Weights, gradients and two moments, and the copy that a checkpoint is written from."""


def require_torch() -> None:
    """Pass if torch is installed.

    Raises:
        ConfigError: it is not; says which extra brings it.
    """
    if find_spec("torch") is None:
        raise ConfigError(f"distill needs torch: {install_hint('train')}")


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers from an option such as ``0,1,-1``.

    Raises:
        ConfigError: a part is not a whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"layers is {text!r}, must be whole numbers with commas between, 0,1,-1 for example"
        ) from error


def require_plain_decoder(config: DecoderConfig, name: str) -> None:
    """Pass if the teacher's architecture is one that is trained from here.

    Raises:
        ConfigError: it is not.
    """
    has_more = (
        config.has_qkv_bias
        or config.has_output_bias
        or config.has_mlp_bias
        or config.has_qk_norm
        or config.has_sandwich_norms
        or config.rope.llama3 is not None
        or "sliding" in config.layer_types
        or config.activation != "silu"
    )
    if has_more:
        raise ConfigError(
            f"{name} is a {config.architecture} that distill cannot run as a teacher: "
            "it takes plain llama and mistral decoders. A drafter made for one of them drafts "
            "for any target: export --drafter FOLDER"
        )


def require_byte_fallback(tokenizer: Tokenizer, vocabulary: Vocabulary, name: str) -> None:
    """Pass if a tokenizer can write what it has no token for; byte-level BPE always can.

    Raises:
        TokenizerError: it cannot, so the text the target writes is not what was meant.
    """
    found = int(vocabulary.is_fallback.sum())
    if kind_of(tokenizer.json) == "space_mark" and found < 256:
        raise TokenizerError(
            f"the tokenizer of {name} has no byte fallback (tokens for {found} of 256 bytes), so "
            "its texts hold unknown tokens that no drafter can spell: distil for a target with "
            "byte fallback or byte-level BPE"
        )


def require_room(
    folder: Path,
    *,
    text_tokens: int,
    target_parameters: int,
    drafter_parameters: int,
    cache_bytes: int,
) -> None:
    """Pass if the run fits on the disk and in memory.

    Raises:
        ConfigError: it does not; says how much is needed and how much there is.
    """
    disk = text_tokens * _TEXT_BYTES_A_TOKEN + 2 * drafter_parameters * _BYTES_A_PARAMETER
    place = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < disk:
        raise ConfigError(
            f"the run writes up to {_gib(disk)} but {place} has {_gib(free)} free: "
            "free some space, or use fewer --text-tokens"
        )
    memory = 6 * target_parameters + drafter_parameters * _BYTES_A_PARAMETER
    memory += text_tokens * _RUN_BYTES_A_TOKEN + cache_bytes
    there = _memory_bytes()
    if there is not None and there < memory:
        raise ConfigError(
            f"the run needs about {_gib(memory)} of memory but this machine has {_gib(there)}: "
            "use fewer --text-tokens, or a smaller target"
        )


def read_corpus(paths: tuple[Path, ...]) -> list[str]:
    """The texts of some files.

    Raises:
        PromptError: a file is missing, empty, binary or not UTF-8.
    """
    texts = []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PromptError(f"cannot read {path}: {error.strerror}") from error
        if not data.strip():
            raise PromptError(f"{path} is empty: leave it out of --corpus")
        if b"\0" in data:
            raise PromptError(f"{path} is a binary file: --corpus takes UTF-8 text")
        try:
            texts.append(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise PromptError(
                f"{path} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): "
                "convert it first"
            ) from error
    return texts


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
