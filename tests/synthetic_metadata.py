"""GGUF metadata made from a `tokenizer.json`, the way llama.cpp's converter writes it."""

from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def metadata_of(document: dict[str, Any], *, pre: str | None, rows: int | None = None) -> dict:
    """Fields of a tokenizer; rows without a token are padded with unused ones.

    Args:
        document: A parsed `tokenizer.json`.
        pre: Name of a byte-level pre-tokenizer; None for a vocabulary with scores.
        rows: Rows of the model; None for one a token.
    """
    vocab, merges = document["model"]["vocab"], _pairs(document["model"]["merges"])
    unknown = document["model"].get("unk_token")
    added = {token["id"]: token for token in document["added_tokens"]}
    texts = {i: text for text, i in vocab.items()} | {i: t["content"] for i, t in added.items()}
    rows = rows or max(texts) + 1
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [_kind(i, texts, added, unknown, has_bytes=pre is None) for i in range(rows)]
    fields: dict[str, Any] = {"tokens": tokens, "token_type": kinds}
    if pre is not None:
        fields |= {"model": "gpt2", "pre": pre, "merges": [f"{a} {b}" for a, b in merges]}
    else:
        first: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            first.setdefault(left + right, rank)
        fields |= {"model": "llama", "scores": [-float(first.get(t, 10**6)) for t in tokens]}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def alphabet() -> list[str]:
    """The 256 one-byte tokens of a byte-level vocabulary, in no order that matters."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _pairs(merges: list) -> list[tuple[str, str]]:
    return [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]


def _kind(
    i: int, texts: dict[int, str], added: dict[int, dict], unknown: str | None, has_bytes: bool
) -> int:
    if i not in texts:
        return UNUSED
    if texts[i] == unknown:
        return UNKNOWN
    if i in added:
        return CONTROL if added[i]["special"] else USER_DEFINED
    return BYTE if has_bytes and texts[i].startswith("<0x") else NORMAL
