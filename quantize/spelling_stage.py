"""The spelling trie of one target in one drafter's pieces, made once at export."""

from pathlib import Path

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import full_spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.manifest import ModelEntry
from omnidraft_npu.text.tokenizer import Tokenizer

from .stages import Facts, Tell

SPELLINGS = "spelling.safetensors"


def export_spelling(
    root: Path, bundle: Path, drafter: ModelEntry, target: ModelEntry, tell: Tell
) -> Facts:
    """Spell every token of the target in the drafter's pieces.

    Args:
        root: Folder to write to.
        bundle: The bundle under way; both models' tokenizers are read from it.
        drafter: The model whose pieces spell.
        target: The model whose tokens are spelled.
        tell: Told before and after.

    Raises:
        TokenizerError: a tokenizer of a kind whose bytes are not known.
    """
    tell(0, 1)
    documents = {
        model.folder: Tokenizer.from_folder(bundle / model.folder).json
        for model in (drafter, target)
    }
    vocabularies = {
        model.folder: Vocabulary.from_tokenizer_json(
            documents[model.folder],
            size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
        )
        for model in (drafter, target)
    }
    encoder = PieceEncoder(documents[drafter.folder], vocabularies[drafter.folder])
    spellings = full_spellings(encoder, vocabularies[target.folder])
    trie = SpellingTrie.build(spellings, target.vocab_size)
    trie.save(
        root / SPELLINGS,
        drafter_sha256=drafter.tokenizer_sha256,
        target_sha256=target.tokenizer_sha256,
    )
    tell(1, 1)
    return {"nodes": trie.num_nodes}
