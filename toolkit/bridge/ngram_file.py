"""Where the learned spellings of one pair of tokenizers are kept between runs."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ..array_files import read_arrays
from ..documents import convert_document
from ..errors import BundleError
from ..files import write_safetensors
from ..state_folder import saving_ngrams
from .ngram_cache import DEFAULT_MAX_BYTES
from .ngram_entries import NgramEntries

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_ARRAYS = ("token_ids", "offsets", "pieces", "uses")


@dataclass(frozen=True, kw_only=True)
class PairKey:
    """Content hashes of the two tokenizers that an entry joins."""

    drafter_sha256: str
    target_sha256: str

    def __str__(self) -> str:
        return f"drafter {self.drafter_sha256[:12]}, target {self.target_sha256[:12]}"


def write_entries(path: Path, entries: NgramEntries, key: PairKey) -> None:
    """Write one safetensors file, for its user alone, with both tokenizers' content hashes."""
    metadata = {
        "format": "omnidraft-npu n-grams",
        "format_version": str(FORMAT_VERSION),
        "drafter_tokenizer_sha256": key.drafter_sha256,
        "target_tokenizer_sha256": key.target_sha256,
    }
    arrays = {name: getattr(entries, name) for name in _ARRAYS}
    write_safetensors(path, arrays, metadata, private=True)


def read_entries(path: Path) -> tuple[NgramEntries, PairKey]:
    """The entries of a file, and the pair of tokenizers that they belong to.

    Raises:
        BundleError: the file is no n-gram cache, is damaged or of a newer format.
    """
    advice = "move it away"
    what = "an n-gram cache"
    kinds = dict.fromkeys(_ARRAYS, (np.int32, 1))
    arrays, metadata = read_arrays(path, kinds, advice=advice, what=what)
    where = f"{path} is not {what} that this tool can read: it"
    marks = convert_document(metadata, _Marks, where, advice=advice)
    entries = NgramEntries(**arrays)
    if not _fits(entries):
        raise BundleError(f"{path} is not {what} that is whole: {advice}")
    key = PairKey(
        drafter_sha256=marks.drafter_tokenizer_sha256,
        target_sha256=marks.target_tokenizer_sha256,
    )
    return entries, key


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """The file's metadata."""

    format_version: Literal["1"]
    drafter_tokenizer_sha256: str
    target_tokenizer_sha256: str


def _fits(entries: NgramEntries) -> bool:
    """Whether the arrays fit together."""
    return (
        len(entries.offsets) == len(entries) + 1
        and len(entries.uses) == len(entries) == len(np.unique(entries.token_ids))
        and entries.offsets[0] == 0
        and entries.offsets[-1] == len(entries.pieces)
        and bool((np.diff(entries.offsets.astype(np.int64)) >= 2).all())
        and min(entries.uses.min(initial=1) - 1, entries.token_ids.min(initial=0)) >= 0
        and entries.pieces.min(initial=0) >= 0
    )


@dataclass(kw_only=True)
class NgramStore:
    """The cache file of one target. What goes wrong with it is said once, and decoding goes on."""

    path: Path
    """`state/ngrams/<target>.safetensors` of the bundle."""
    key: PairKey
    max_bytes: int = DEFAULT_MAX_BYTES
    _told: set[str] = field(default_factory=set)

    @property
    def own_path(self) -> Path:
        """Where this pair's entries are: beside `path` where that holds those of another pair."""
        try:
            _, key = read_entries(self.path)
        except BundleError:
            return self.path
        if key == self.key:
            return self.path
        tag = f"{self.key.drafter_sha256[:8]}-{self.key.target_sha256[:8]}"
        return self.path.with_name(f"{self.path.stem}.{tag}.safetensors")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process save between a `read` and the `replace` that builds on it.

        Raises:
            OSError: the folder cannot be written.
        """
        with saving_ngrams(self.path):
            yield

    def read(self) -> NgramEntries:
        """The entries saved for this pair; none where none were.

        Raises:
            BundleError: there is a file that cannot be read.
        """
        path = self.own_path
        return read_entries(path)[0] if path.exists() else NgramEntries.EMPTY

    def replace(self, entries: NgramEntries) -> None:
        """Save exactly these entries, but no more than the budget holds; `locked`.

        Raises:
            OSError: it cannot be written.
        """
        path = self.own_path
        write_entries(path, entries.pruned(self.max_bytes), self.key)

    def load(self) -> NgramEntries:
        """The entries saved for this pair; none where there is no file that can be used."""
        path = self.own_path
        if path != self.path:
            self._tell(
                f"{self.path} was learned with other tokenizers: it is left as it is, "
                f"{path.name} is used"
            )
        try:
            return self.read()
        except BundleError as error:
            self._tell(f"starting without learned spellings: {error}")
            return NgramEntries.EMPTY

    def save(self, fresh: NgramEntries) -> None:
        """Add entries to those saved, which others may have added to, and keep the budget.

        A file that cannot be read is kept under another name.
        """
        if not len(fresh):
            return
        try:
            with self.locked():
                self._add(fresh)
        except OSError as error:
            self._tell(
                f"learned spellings cannot be saved ({error.strerror}: {self.path.parent}): "
                "they are lost at the end of this run; make that folder writable to keep them"
            )

    def _add(self, fresh: NgramEntries) -> None:
        try:
            saved = self.read()
        except BundleError:
            self.own_path.replace(_free_name(self.own_path))
            saved = NgramEntries.EMPTY
        self.replace(saved.merged(fresh))

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)


def _free_name(path: Path) -> Path:
    """A name beside `path` that no file has."""
    number = 1
    while (free := path.with_name(f"{path.stem}.unreadable-{number}{path.suffix}")).exists():
        number += 1
    return free
