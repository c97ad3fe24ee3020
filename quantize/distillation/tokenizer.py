"""The drafter's own vocabulary: a byte-level BPE learned from the target's tokens in text."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.vocabulary import END_ROLES, Role, Vocabulary
from omnidraft_npu.documents import TokenId, read_bytes, read_document
from omnidraft_npu.errors import CheckpointError, ConfigError
from omnidraft_npu.files import write_json

from ..checkpoints.checkpoint import TokenizerFiles

MIN_PIECES = 256
"""One piece a byte, so that every text can be spelled."""


def train_tokenizer(
    counts: Mapping[int, int], target: Vocabulary, files: TokenizerFiles, num_pieces: int
) -> TokenizerFiles:
    """A tokenizer of at most `num_pieces` pieces, and documents that say the same as the target's.

    The words that merges are learned from are the target's tokens. So hardly any piece lies
    across the border of two tokens, where the bridge could not use it. The target's markup
    and its chat template are taken over.

    Args:
        counts: Target id -> how often it is in the text.
        target: The target's vocabulary.
        files: The target's tokenizer.
        num_pieces: Rows of the drafter's embedding.

    Raises:
        ConfigError: `num_pieces` leaves no room for the bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = _markup(target, counts, files)
    if num_pieces < MIN_PIECES + len(special) + 1:
        raise ConfigError(
            f"vocab_size is {num_pieces}, must be at least {MIN_PIECES + len(special) + 1}: "
            "one piece a byte, and the markup"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_pieces,
        special_tokens=[AddedToken(content, special=True, normalized=False) for content in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(counts, target), trainer)
    config = {
        key: value
        for key, value in files.tokenizer_config.items()
        if key in ("chat_template", "eos_token", "bos_token", "clean_up_tokenization_spaces")
    }
    pieces: dict[str, int] = tokenizer.get_vocab()
    ends = [target.special_contents.get(i, "") for i in files.eos_token_ids]
    bos = "" if files.bos_token_id is None else target.special_contents.get(files.bos_token_id, "")
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        tokenizer_config=config | {"add_bos_token": bos in pieces},
        eos_token_ids=tuple(pieces[content] for content in ends if content in pieces),
        bos_token_id=pieces.get(bos),
    )


def write_files(folder: Path, files: TokenizerFiles) -> None:
    """Keep tokenizer documents in a folder of their own, all or nothing."""
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    (making / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
    write_json(making / "tokenizer_config.json", files.tokenizer_config)
    write_json(making / "ids.json", [list(files.eos_token_ids), files.bos_token_id])
    making.replace(folder)


def read_files(folder: Path) -> TokenizerFiles:
    """What `write_files` kept."""
    advice = f"delete {folder} and run the same command with --resume"
    wanted: dict[str, Any] = {"error": CheckpointError, "advice": advice}
    ids = read_document(folder / "ids.json", tuple[tuple[TokenId, ...], TokenId | None], **wanted)
    config = read_document(folder / "tokenizer_config.json", dict[str, Any], **wanted)
    document = read_bytes(folder / "tokenizer.json", max_bytes=2**27, **wanted)
    return TokenizerFiles(
        tokenizer_json=document.decode(errors="replace"),
        tokenizer_config=config,
        eos_token_ids=ids[0],
        bos_token_id=ids[1],
    )


def vocabulary_of(files: TokenizerFiles) -> Vocabulary:
    """The vocabulary of tokenizer documents."""
    return Vocabulary.from_tokenizer_json(
        json.loads(files.tokenizer_json),
        eos_token_ids=files.eos_token_ids,
        bos_token_id=files.bos_token_id,
    )


def encoder_of(files: TokenizerFiles) -> PieceEncoder:
    """Spells bytes in the pieces of tokenizer documents."""
    return PieceEncoder(json.loads(files.tokenizer_json), vocabulary_of(files))


def count_tokens(texts: Iterator[Any]) -> Counter[int]:
    """How often each id is in some arrays of ids."""
    counts: Counter[int] = Counter()
    for ids in texts:
        counts.update(ids.tolist())
    return counts


def _markup(target: Vocabulary, counts: Mapping[int, int], files: TokenizerFiles) -> list[str]:
    """Contents of the special tokens worth a piece: ends, BOS, and markup seen in the text."""
    wanted = {*target.special_ids(*END_ROLES), *files.eos_token_ids}
    wanted |= {i for i in target.special_ids(Role.OTHER) if counts.get(i)}
    if files.bos_token_id is not None:
        wanted.add(files.bos_token_id)
    found = [target.special_contents[i] for i in sorted(wanted) if i in target.special_contents]
    return list(dict.fromkeys(found))


def _words(counts: Mapping[int, int], target: Vocabulary) -> Iterator[str]:
    tokens = target.all_bytes()
    for i, count in sorted(counts.items()):
        try:
            word = tokens[i].decode()
        except UnicodeDecodeError:
            continue
        for _ in range(count if word else 0):
            yield word
