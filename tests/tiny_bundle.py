"""A bundle of hand-made decoders with toy tokenizers: everything but a real model."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from decoder_graphs import NUM_LOGITS, OPTIMUM, RANK, SHARED, Variant, write_decoder
from toy_vocabularies import toy_document

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import full_spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.bundle import MANIFEST
from omnidraft_npu.files import sha256_of
from omnidraft_npu.manifest import FileEntry, GraphEntry, Manifest, ModelEntry
from omnidraft_npu.text.tokenizer import Tokenizer

CONTEXT = 96
TEMPLATE = "{{ bos_token }}{% for m in messages %}a {{ m.content }} b{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A decoder and the seed of its tokenizer."""

    variant: Variant = SHARED
    tokenizer_seed: int = 0
    num_merges: int = 30


DRAFTER = TinyModel()
OTHER = TinyModel(variant=OPTIMUM, tokenizer_seed=1, num_merges=35)
"""Another vocabulary, another kind of cache."""
SAME = TinyModel(variant=SHARED)
"""The drafter itself."""


def write_bundle(root: Path, *, eos: tuple[int, ...] = (2,)) -> Path:
    """A bundle with the targets `other` (default) and `same`."""
    drafter = _write_model(root, "drafter", "tiny", DRAFTER, eos)
    targets = {
        name: _write_model(root, f"targets/{name}", name, model, eos)
        for name, model in (("other", OTHER), ("same", SAME))
    }
    _write_spelling(root, drafter, targets["other"])
    files = {
        path.relative_to(root).as_posix(): FileEntry(
            size=path.stat().st_size, sha256=sha256_of(path)
        )
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(tool_version="0", drafter=drafter, targets=targets, files=files)
    (root / MANIFEST).write_text(json.dumps(manifest.to_json()), encoding="utf-8")
    return root


def _write_model(
    root: Path, folder: str, name: str, model: TinyModel, eos: tuple[int, ...]
) -> ModelEntry:
    (root / folder / "cpu").mkdir(parents=True)
    document = toy_document(np.random.default_rng(model.tokenizer_seed), model.num_merges)
    # Tokenizers numbers added tokens anew unless the model's vocabulary has them.
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    document["model"]["vocab"] |= added
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    (root / folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (root / folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_decoder(
        root / folder / "cpu" / "model.onnx", replace(model.variant, context_length=CONTEXT)
    )
    tokenizer = Tokenizer.from_folder(root / folder)
    return ModelEntry(
        name=name,
        source="tests",
        architecture="handmade",
        exporter="external",
        folder=folder,
        vocab_size=tokenizer.size,
        num_logits=NUM_LOGITS,
        context_length=CONTEXT,
        eos_token_ids=eos,
        bos_token_id=tokenizer.bos_token_id,
        tokenizer_sha256=tokenizer.content_sha256,
        graphs={
            "cpu": GraphEntry(
                path=f"{folder}/cpu/model.onnx",
                precision="fp32",
                cache="shared" if model.variant.is_shared else "concat",
                lora_rank=RANK if model.variant.has_lora else 0,
            )
        },
    )


def _write_spelling(root: Path, drafter: ModelEntry, target: ModelEntry) -> None:
    documents = [Tokenizer.from_folder(root / m.folder).json for m in (drafter, target)]
    vocabularies = [
        Vocabulary.from_tokenizer_json(
            document,
            size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
        )
        for document, model in zip(documents, (drafter, target), strict=True)
    ]
    spellings = full_spellings(PieceEncoder(documents[0], vocabularies[0]), vocabularies[1])
    folder = root / "spellings" / target.name
    folder.mkdir(parents=True)
    SpellingTrie.build(spellings, target.vocab_size).save(
        folder / "spelling.safetensors",
        drafter_sha256=drafter.tokenizer_sha256,
        target_sha256=target.tokenizer_sha256,
    )
