"""Training examples on disk: bounded, erasable, and safe against a crash at any moment.

Each response is a file of its own, written beside its place and renamed into it, so an
example is there as a whole or not at all, and none is lost that `append` returned from. Files
are numbered as they come; no clock has a say in what is old. Two processes that append at the
same moment may take the same number, but never the same name. A file holds what the update
needs and no more; of a response and what led to it, numbers only:

==============  ==================================================================
`pieces`        the drafter's pieces of the response and of what led to it
`top_ids`       for each piece of the response, the pieces that the target held likeliest
`top_probs`     and their probabilities
`tokens`        which token of the response each piece belongs to
`is_drafted`    whether the piece lies on the spelling of that token
`is_direct`     whether it is the whole token
==============  ==================================================================
"""

import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .array_files import read_arrays
from .distillation import Ids, PieceLaws
from .documents import shown_value
from .errors import BundleError
from .files import bytes_of, private_folder, write_safetensors
from .state_folder import learned_in

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
DEFAULT_MAX_BYTES = 64 * 2**20

TRAINING_FILE = "training.safetensors"
"""Beside the examples: an adapter that is still under training, forgotten with them."""
LEARNER_FILE = "learner.json"
"""Beside the examples: what learning did last, forgotten with them."""

Flags = npt.NDArray[np.bool_]

_LAWS = ("top_ids", "top_probs")
_OTHERS = ("pieces", "tokens", "is_drafted", "is_direct")
_KINDS: dict[str, tuple[type[np.generic], int]] = {
    "top_ids": (np.int32, 2),
    "top_probs": (np.float16, 2),
    "pieces": (np.int32, 1),
    "tokens": (np.int32, 1),
    "is_drafted": (np.bool_, 1),
    "is_direct": (np.bool_, 1),
}
_NAME = re.compile(r"(\d{8})(-[0-9a-f]{16})?\.safetensors")


@dataclass(frozen=True, eq=False, kw_only=True)
class Example:
    """One response in the drafter's pieces, and what the target said before each of them."""

    pieces: Ids
    """``[context + response]``"""
    laws: PieceLaws
    """``[response, top]`` for the last pieces."""
    tokens: Ids
    """``[response]`` index of the target's token that each piece begins in."""
    is_drafted: Flags
    """``[response]`` whether the piece lies on the spelling of its token."""
    is_direct: Flags
    """``[response]`` whether the piece is a whole token."""

    @property
    def num_response(self) -> int:
        """Pieces at the end that are the response's."""
        return len(self.laws.ids)


@dataclass(frozen=True, kw_only=True)
class ReplayBuffer:
    """The examples of one target: `state/replay/<target>/` of a bundle."""

    folder: Path
    pair: str
    """Content hashes of drafter and target; examples of others are passed over."""
    max_bytes: int = DEFAULT_MAX_BYTES
    num_pieces: int | None = None
    """Pieces of the drafter; an example with others is damaged. None where that is not known."""

    def append(self, example: Example) -> None:
        """Keep an example; the oldest go where all would take more than `max_bytes`.

        Raises:
            OSError: it cannot be written; the others are as they were.
        """
        private_folder(self.folder)
        tensors: dict[str, npt.NDArray[Any]] = {
            "top_ids": example.laws.ids,
            "top_probs": example.laws.probs.astype(np.float16),
            **{name: getattr(example, name) for name in _OTHERS},
        }
        metadata = {
            "format_version": str(FORMAT_VERSION),
            "pair": self.pair,
            "sha256": _digest(tensors),
        }
        files = self._files()
        number = 1 + (int(files[-1].name[:8]) if files else 0)
        path = self.folder / f"{number:08}-{secrets.token_hex(8)}.safetensors"
        write_safetensors(path, tensors, metadata, private=True)
        self._evict([*files, path])

    def examples(self) -> Iterator[Example]:
        """All that can be read, the oldest first; a damaged file is said, and passed over."""
        for _, example in self.numbered():
            yield example

    def numbered(self, *, after: int = 0) -> Iterator[tuple[int, Example]]:
        """The same with their numbers, which rise.

        Args:
            after: Those up to this number are left out.
        """
        return self._read_all(path for path in self._files() if int(path.name[:8]) > after)

    def latest(self, *, max_examples: int, max_tokens: int) -> list[Example]:
        """The latest examples that can be read, the oldest of them first.

        Args:
            max_examples: How many at most.
            max_tokens: Most drafter tokens of their responses together, but for the first.
        """
        found: list[Example] = []
        num_tokens = 0
        for _, example in self._read_all(self._files()[: -max_examples - 1 : -1]):
            found.append(example)
            num_tokens += example.num_response
            if num_tokens >= max_tokens:
                break
        return found[::-1]

    def _read_all(self, paths: Iterable[Path]) -> Iterator[tuple[int, Example]]:
        """Those that can be read; one line names the first of those that cannot."""
        damaged: list[BundleError] = []
        try:
            for path in paths:
                try:
                    example = self._read(path)
                except BundleError as error:
                    damaged.append(error)
                    continue
                if example is not None:
                    yield int(path.name[:8]), example
        finally:
            if damaged:
                others = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
                logger.warning("a training example is passed over%s: %s", others, damaged[0])

    def numbers(self, *, after: int) -> Iterator[int]:
        """Numbers of this pair's examples above `after`, rising; what they hold is not checked."""
        from safetensors import SafetensorError, safe_open

        for path in self._files():
            number = int(path.name[:8])
            # Opening a pipe would wait for a writer.
            if number > after and path.is_file():
                with (
                    contextlib.suppress(SafetensorError, OSError),
                    safe_open(path, "numpy") as file,
                ):
                    if (file.metadata() or {}).get("pair") == self.pair:
                        yield number

    @property
    def newest(self) -> int:
        """Number of the newest example; 0 for none."""
        files = self._files()
        return int(files[-1].name[:8]) if files else 0

    def has(self, number: int) -> bool:
        """Whether an example of this number is there."""
        return any(int(path.name[:8]) == number for path in self._files())

    def forget(self) -> int:
        """Erase all examples and what training made of them; gives the number of examples."""
        count = len(self)
        for path in learned_in(self.folder):
            path.unlink(missing_ok=True)
        return count

    @property
    def num_bytes(self) -> int:
        """What the examples take on disk."""
        return sum(map(bytes_of, self._files()))

    def __len__(self) -> int:
        return len(self._files())

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def _evict(self, files: list[Path]) -> None:
        sizes = list(map(bytes_of, files))
        excess = sum(sizes) - self.max_bytes
        for path, size in zip(files[:-1], sizes, strict=False):
            if excess <= 0:
                return
            # Windows keeps a file that another process reads; a later append evicts it.
            with contextlib.suppress(PermissionError):
                path.unlink(missing_ok=True)
            excess -= size

    def _read(self, path: Path) -> Example | None:
        """One example; None for another pair's, and for one that was evicted meanwhile.

        Raises:
            BundleError: the file is damaged or of another format.
        """
        if not path.exists():
            return None
        tensors, metadata = read_arrays(path, _KINDS, advice="delete it", what="an example")
        if (version := metadata.get("format_version")) != str(FORMAT_VERSION):
            raise BundleError(f"{path} has format version {shown_value(version)}: delete it")
        if metadata.get("pair") != self.pair:
            return None
        if _digest(tensors) != metadata.get("sha256"):
            raise BundleError(f"{path} was changed since it was written: delete it")
        ids, probs = (tensors.pop(name) for name in _LAWS)
        laws = PieceLaws(ids=ids, probs=probs.astype(np.float32))
        example = Example(laws=laws, **tensors)
        if not _fits(example, self.num_pieces):
            raise BundleError(f"{path} holds arrays that do not fit together: delete it")
        return example


def _digest(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """Of all that the file holds: a flipped bit can make another piece of one."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _fits(example: Example, num_pieces: int | None) -> bool:
    pieces, ids, probs = example.pieces, example.laws.ids, example.laws.probs
    others = (example.tokens, example.is_drafted, example.is_direct)
    return (
        ids.shape == probs.shape
        and 0 < len(ids) <= len(pieces)
        and ids.shape[1] > 0
        and all(other.shape == (len(ids),) for other in others)
        and min(pieces.min(), ids.min()) >= 0
        and (num_pieces is None or max(pieces.max(), ids.max()) < num_pieces)
        and bool(np.isfinite(probs).all())
        and float(probs.min()) >= 0
        and bool((np.diff(example.tokens, prepend=0) >= 0).all())
    )
