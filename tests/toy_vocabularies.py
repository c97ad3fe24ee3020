"""Small byte-level BPE tokenizers with random merges over three letters and a space."""

from typing import Any

import numpy as np

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.vocabulary import Vocabulary

ALPHABET = "abcĠ"


def toy_document(rng: np.random.Generator, num_merges: int) -> dict[str, Any]:
    """A `tokenizer.json`: pad, BOS and EOS first, then tokens in random order."""
    tokens = list(ALPHABET)
    merges: list[list[str]] = []
    while len(merges) < num_merges:
        pair = [tokens[i] for i in rng.integers(len(tokens), size=2)]
        if "".join(pair) not in tokens and len("".join(pair)) <= 8:
            tokens.append("".join(pair))
            merges.append(pair)
    order = rng.permutation(len(tokens))
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": content,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, content in enumerate(("<pad>", "<s>", "</s>"))
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": bool(rng.integers(2)),
            "trim_offsets": True,
            "use_regex": bool(rng.integers(2)),
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {tokens[i]: 3 + n for n, i in enumerate(order)},
            "merges": merges,
        },
    }


def toy_encoder(
    rng: np.random.Generator, num_merges: int, *, num_padding: int = 0, has_bos: bool = True
) -> PieceEncoder:
    """Such a tokenizer with its vocabulary, and rows without a token after the real ones."""
    document = toy_document(rng, num_merges)
    vocabulary = Vocabulary.from_tokenizer_json(
        document,
        size=3 + len(ALPHABET) + num_merges + num_padding,
        eos_token_ids=(2,),
        bos_token_id=1 if has_bos else None,
    )
    return PieceEncoder(document, vocabulary)
