"""Open an exported directory and check that it is what its manifest says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .documents import read_document
from .errors import BundleError, ConfigError
from .files import sha256_of
from .manifest import MANIFEST, FileEntry, Manifest, ModelEntry
from .manifest_checks import check_manifest, is_inside, required_files
from .replacement import restore

HASHED_BYTES = 64 * 2**20
"""Files up to this size are hashed at every opening; larger ones with `verify` only."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle; nothing in it is changed outside `state/`."""

    root: Path
    manifest: Manifest
    elsewhere: Path | None = None
    """Folder with the `state/` to use; None for the bundle's own."""

    @property
    def state_root(self) -> Path:
        """Folder with the `state/` that is used."""
        return self.root if self.elsewhere is None else self.elsewhere

    def path(self, relative: str) -> Path:
        """Where a file named in the manifest lies on this machine."""
        return self.root / relative

    def target(self, name: str | None) -> ModelEntry:
        """The target of that name, or the default one.

        Raises:
            ConfigError: the bundle holds no target of that name; lists those it has.
        """
        targets = self.manifest.targets
        if name is None:
            return next(iter(targets.values()))
        if name not in targets:
            raise ConfigError(
                f"the bundle has no target {name!r}, it has {', '.join(targets)}: use one of these"
            )
        return targets[name]


def open_bundle(root: Path, *, verify: bool = False) -> Bundle:
    """Read a bundle's manifest and check its files.

    What an export that was interrupted while it replaced the bundle left is mended first.

    Args:
        root: The exported directory.
        verify: Hash every file; otherwise the sizes of all and the hashes of files up to
            `HASHED_BYTES` are checked.

    Raises:
        BundleError: not a bundle, a format this tool does not read, a value that cannot be, or
            a file that is missing, changed or outside the bundle; the message names it.
    """
    restore(root)
    manifest = _read_manifest(root)
    check_manifest(manifest)
    for relative, entry in manifest.files.items():
        _check_file(root, relative, entry, verify)
    for relative, name in required_files(manifest):
        if relative not in manifest.files:
            raise BundleError(
                f"{root}: manifest.json lists no file {relative!r} though {name} "
                "needs it: export the bundle again"
            )
    return Bundle(root=root, manifest=manifest)


def _read_manifest(root: Path) -> Manifest:
    path = root / MANIFEST
    if not path.is_file():
        what = "holds no manifest.json" if root.is_dir() else "is not a directory"
        is_model = (root / "config.json").is_file() or (root.is_file() and root.suffix == ".gguf")
        hint = ", or give this model as --target and no bundle" if is_model else ""
        raise BundleError(
            f"{root} {what}, so it is not a bundle: make one with `omnidraft-npu export`{hint}"
        )
    return Manifest.from_json(read_document(path, dict[str, Any]))


def _check_file(root: Path, relative: str, entry: FileEntry, verify: bool) -> None:
    if not is_inside(relative):
        raise BundleError(f"{root}: manifest.json names {relative!r}, a path outside the bundle")
    path = root / relative
    if not path.is_file():
        raise BundleError(f"{root}: {relative} is missing: export the bundle again")
    size = path.stat().st_size
    if size != entry.size:
        raise BundleError(
            f"{root}: {relative} has {size} bytes, the manifest says {entry.size}: "
            "the file was altered or cut; export the bundle again"
        )
    if (verify or size <= HASHED_BYTES) and sha256_of(path) != entry.sha256:
        raise BundleError(
            f"{root}: {relative} is not the file that was exported (its SHA-256 differs): "
            "export the bundle again"
        )
