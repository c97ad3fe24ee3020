"""Find and erase what was learned: our own files only, whatever else lies among them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import StateError
from .files import bytes_of
from .replay import TRAINING_FILE
from .state_folder import (
    STATE,
    changing_all,
    check_links,
    learned_files,
    ngram_files,
    state_folders,
)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The files of what was learned for some targets of a bundle."""

    target_names: tuple[str, ...]
    """Targets that something was learned for."""
    adapters: tuple[Path, ...]
    examples: tuple[Path, ...]
    caches: tuple[Path, ...]
    """Segmentations that draft mode `cache` learned."""
    others: tuple[Path, ...]
    """Records, training state, half-written files, and files where a folder belongs."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them."""
        return (*self.adapters, *self.examples, *self.caches, *self.others)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(map(bytes_of, self.files))

    def __str__(self) -> str:
        names = ", ".join(self.target_names) or "no target"
        return (
            f"{len(self.adapters)} adapters, {len(self.examples):,} examples and "
            f"{len(self.caches)} n-gram caches for {names}"
        )


def find_learned(bundle: Path, target_names: Iterable[str]) -> Learned:
    """What `erase_learned` would erase now.

    Raises:
        StateError: `state/` holds something that is neither a folder nor a regular file.
    """
    check_links(bundle)
    names = sorted(set(target_names))
    found = {
        name: [
            *learned_files(bundle, name),
            *ngram_files(bundle, name),
        ]
        for name in names
    }
    files = [path for paths in found.values() for path in paths]
    whole = [path for path in files if not path.name.startswith(".")]
    adapters = [path for path in whole if path.suffix == ".onnx_adapter"]
    tensors = [path for path in whole if path.suffix == ".safetensors"]
    caches = [path for path in tensors if path.parent.name == "ngrams"]
    examples = [p for p in tensors if p not in caches and p.name != TRAINING_FILE]
    named = {*adapters, *caches, *examples}
    return Learned(
        target_names=tuple(name for name, paths in found.items() if paths),
        adapters=tuple(adapters),
        examples=tuple(examples),
        caches=tuple(caches),
        others=(
            *_misplaced(bundle, names),
            *(path for path in files if path not in named),
        ),
    )


def erase_learned(bundle: Path, target_names: Iterable[str]) -> tuple[Learned, int]:
    """Erase all that was learned for some targets; gives what that was, and its bytes.

    Raises:
        StateError: another process is learning for one of them, and nothing was erased; or
            something cannot be erased, and the rest may be gone.
    """
    names = sorted(set(target_names))
    found = find_learned(bundle, names)
    sizes = {path: bytes_of(path) for path in found.files}
    try:
        for path in _misplaced(bundle, names):
            path.unlink()
        if (bundle / STATE).is_dir():
            with changing_all(bundle, names):
                # What came meanwhile goes as well; what a killed writer left is gone already.
                found = find_learned(bundle, names)
                sizes |= {path: bytes_of(path) for path in found.files}
                for path in found.files:
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(
            f"{error.filename} cannot be erased ({error.strerror}): make it writable, and "
            "forget again"
        ) from error
    return found, sum(sizes.values())


def _misplaced(bundle: Path, target_names: Iterable[str]) -> list[Path]:
    """Files where a folder of ours belongs."""
    return [path for path in state_folders(bundle, target_names) if path.is_file()]
