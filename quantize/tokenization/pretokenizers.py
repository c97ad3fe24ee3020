"""How byte-level vocabularies split text, by the name GGUF files give it.

The files keep no more than this name. A name that is not in the table is refused: a
wrong split gives ids that look right and are not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A digit run is taken three at a time by Llama 3 and one at a time by Qwen 2.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """One way to split a text before it is merged."""

    document: Mapping[str, Any]
    """The `pre_tokenizer` of a `tokenizer.json`."""
    splits: Mapping[str, tuple[str, ...]]
    """Known text -> its parts; checked whenever a tokenizer is rebuilt."""
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    """A part that is a token as a whole is not merged from its bytes."""
    adds_bos: bool = False
    """Whether BOS begins a sequence where the file does not say."""


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _in_turn(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(digits: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": _SPLIT % digits},
        "behavior": "Isolated",
        "invert": False,
    }


_COMMON = {
    "": (),
    "Hello world": ("Hello", " world"),
    "a  b": ("a", " ", " b"),
    "   ": ("   ",),
    "naïve café": ("naïve", " café"),
    "it's": ("it", "'s"),
    "日本語 です": ("日本語", " です"),
    "end.": ("end", "."),
    " 😀!": (" 😀!",),
}
_GPT2 = _COMMON | {
    "year 2024": ("year", " 2024"),
    "IT'S": ("IT", "'", "S"),
    "x\n\n  y": ("x", "\n\n ", " y"),
    "f(x)\n": ("f", "(", "x", ")", "\n"),
    "\tif (a)": ("\t", "if", " (", "a", ")"),
    "_name": ("_", "name"),
    "a1b": ("a", "1", "b"),
}
_WORDS = _COMMON | {
    "IT'S": ("IT", "'S"),
    "x\n\n  y": ("x", "\n\n", " ", " y"),
    "f(x)\n": ("f", "(x", ")\n"),
    "\tif (a)": ("\tif", " (", "a", ")"),
    "_name": ("_name",),
    "a1b": ("a", "1", "b"),
}
_LLAMA3 = PreTokenizer(
    document=_in_turn(_split(r"\p{N}{1,3}"), _byte_level(use_regex=False)),
    splits=_WORDS | {"year 2024": ("year", " ", "202", "4"), "1234567": ("123", "456", "7")},
    ignore_merges=True,
    adds_bos=True,
)

PRETOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(document=_byte_level(use_regex=True), splits=_GPT2),
    "smollm": PreTokenizer(
        document=_in_turn(
            {"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)
        ),
        splits=_GPT2
        | {"year 2024": ("year", " ", "2", "0", "2", "4"), "3.14": ("3", ".", "1", "4")},
    ),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(
        document=_in_turn(_split(r"\p{N}"), _byte_level(use_regex=False)),
        splits=_WORDS
        | {"year 2024": ("year", " ", "2", "0", "2", "4"), "3.14": ("3", ".", "1", "4")},
        normalizer={"type": "NFC"},
    ),
}
