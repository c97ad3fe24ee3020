"""Damage for documents, bytes and words: everything is drawn from one random generator."""

import copy
import json
from typing import Any

import numpy as np

WORDS = (
    "",
    " ",
    "\x1b[31m",
    "a\x00b",
    "a\nb\r\n",
    "\u202eabc",
    "雪" * 50,
    "\U0010ffff",
    "x" * 300,
    "y" * 100_000,
    "../../etc/passwd",
    "/dev/zero",
    "{{ 7 * 7 }}",
    "-1",
    "NaN",
    "null",
    "<|im_end|>",
    "▁",
    "<0x0A>",
    "%s%n",
)
NUMBERS = (0, 1, -1, 2, 7, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1e-45, 1e38, 1e308, -1.5, 1e30)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": {}}, [1, "a"], {"type": 1})
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1" * 5000,
    "1" * 200_000,
    "0." + "1" * 100_000,
    '"\\ud800"',
    '"\\udc00\\ud800"',
    "[" * 60 + "]" * 60,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    "[" * 100_000,
    "01",
    "'a'",
    "tru",
    "//",
)
PAGES = (
    b"",
    b"\n",
    b"{}",
    b"[]",
    b"null",
    b"3",
    b'"a"',
    b"<!DOCTYPE html><html><body>Not found</body></html>",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n",
    b"\x00" * 4096,
    b"\xff" * 64,
    b"PK\x03\x04" + b"\x00" * 60,
)

_MARK = "@@raw"


class Mutator:
    """Draws mutations; the same generator gives the same ones."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one(self, choices: Any) -> Any:
        """One of a sequence, as it is: numpy would make its own types of them."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def value(self) -> Any:
        """A value that is seldom expected; one that begins with `_MARK` is written raw."""
        kind = self.rng.integers(5)
        if kind == 0:
            return self.one(WORDS)
        if kind == 1:
            return self.one(NUMBERS)
        if kind == 2:
            return self.one(FLOATS)
        if kind == 3:
            return copy.deepcopy(self.one(OTHERS))
        return f"{_MARK}{self.rng.integers(len(RAW))}"

    def json(self, document: Any) -> bytes:
        """A document with some damage to its structure, and at times to its bytes."""
        document = copy.deepcopy(document)
        for _ in range(int(self.rng.choice([1, 1, 1, 2, 3]))):
            document = self._edited(document)
        text = json.dumps(document, ensure_ascii=self.chance(0.5))
        for i, raw in enumerate(RAW):
            text = text.replace(f'"{_MARK}{i}"', raw)
        data = text.encode("utf-8", "surrogatepass")
        return self.bytes(data) if self.chance(0.1) else data

    def _edited(self, document: Any) -> Any:
        """The document with one value changed, at a place that a random walk finds."""
        parent, key, node = None, None, document
        while isinstance(node, dict | list) and node and not self.chance(0.15):
            parent, key = node, self.one(list(node)) if isinstance(node, dict) else None
            key = int(self.rng.integers(len(node))) if key is None else key
            node = node[key]
        if parent is None:
            return self.value()
        kind = int(self.rng.integers(8))
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[str(self.one(WORDS))] = parent.pop(key)
        elif kind == 2 and isinstance(parent, dict):
            parent[self.one(WORDS)] = self.value()
        elif kind == 2:
            parent.insert(key, self.value())
        elif kind == 3 and isinstance(node, int | float):
            parent[key] = self.one([node + 1, node - 1, -node, node * 2, node + 0.5, str(node)])
        elif kind == 4:
            parent[key] = [node]
        elif kind == 5 and isinstance(node, str):
            parent[key] = self.text(node)
        elif kind == 6 and isinstance(parent, list):
            parent += [node] * self.one([1, 5, 500])
        else:
            parent[key] = self.value()
        return document

    def text(self, text: str) -> str:
        """Text with something cut out, doubled or put in."""
        i, j = sorted(self.rng.integers(len(text) + 1, size=2).tolist())
        middle = self.one(["", text[i:j] * 2, self.one(WORDS), text[i:j][::-1]])
        return text[:i] + middle + text[j:]

    def bytes(self, data: bytes, head: int = 4096) -> bytes:
        """Bytes with flipped bits, other numbers, or parts that are gone or there twice.

        Args:
            head: Half of all damage is to so many bytes at the beginning.
        """
        if self.chance(0.05):
            return bytes(self.one(PAGES))
        array = bytearray(data)
        for _ in range(int(self.rng.choice([1, 1, 2, 4, 16]))):
            end = len(array) if self.chance(0.5) else min(head, len(array))
            if not end:
                break
            at = int(self.rng.integers(end))
            kind = int(self.rng.integers(7))
            size = self.one([1, 2, 4, 8])
            if kind <= 1:
                array[at] ^= 1 << int(self.rng.integers(8))
            elif kind == 2:
                number = self.one(NUMBERS) & (2 ** (8 * size) - 1)
                array[at : at + size] = number.to_bytes(size, "little")
            elif kind == 3:
                del array[at:]
            elif kind == 4:
                del array[at : at + int(self.rng.integers(1, 64))]
            elif kind == 5:
                array[at:at] = array[at : at + int(self.rng.integers(1, 64))]
            else:
                array[at : at + size] = self.rng.bytes(size)
        return bytes(array)

    def safetensors(self, data: bytes) -> bytes:
        """A safetensors file with another header whose length fits, or with other bytes."""
        length = int.from_bytes(data[:8], "little")
        if self.chance(0.3):
            return self.bytes(data, head=8 + length)
        if self.chance(0.3):
            # Right header, wrong numbers.
            return data[: 8 + length] + self.bytes(data[8 + length :])
        header = self.json(json.loads(data[8 : 8 + length]))
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
