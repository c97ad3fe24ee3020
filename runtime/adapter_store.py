"""Adapter versions of one target: `state/adapters/<target>/` of a bundle.

A version is a `.onnx_adapter` file and the record beside it, which is written last and holds
the file's hash: a version without a record, or of another hash, is not there. Which one is in
use stands in `current.json`; going back moves only that. Every file is written beside its
place and renamed into it, so a crash leaves the last good state.
"""

import contextlib
import dataclasses
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.documents import Count, read_document
from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import bytes_of, private_folder, sha256_of, write_json
from omnidraft_npu.state_folder import learned_in

from .adapter_files import AdapterKey, Tensors, check_tensors, read_adapter, write_adapter
from .adapter_record import AdapterRecord, read_adapter_record

logger = logging.getLogger(__name__)

BASE = 0
"""The version without an adapter."""

DEFAULT_MAX_BYTES = 256 * 2**20

_KEY_WORDS = {
    "drafter_sha256": "drafter",
    "target_tokenizer_sha256": "target tokenizer",
    "rank": "rank",
}
_MAX_ANCESTORS = 8
_RECORD = re.compile(r"v(\d{4,})\.json")


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """`current.json`."""

    version: Count
    ancestors: tuple[Count, ...] = ()


class AdapterStore:
    """Lists, reads and adds versions.

    Any number of processes may read. One at a time may write: it holds
    `omnidraft_npu.state_folder.learning`.
    """

    def __init__(
        self, folder: Path, key: AdapterKey, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        """Open the versions in `folder`, which need not exist, for one drafter and target.

        Args:
            folder: `omnidraft_npu.state_folder.adapters_path` of the target.
            key: What the adapters must be for.
            max_bytes: The oldest versions go where all would take more.
        """
        self.folder = folder
        self.key = key
        self.max_bytes = max_bytes
        self._told: set[str] = set()

    def records(self) -> list[AdapterRecord]:
        """All versions that are whole, the oldest first; others are said, and passed over."""
        found = []
        for version in self._numbers():
            try:
                found.append(self._record(version))
            except BundleError as error:
                self._tell(f"an adapter is passed over: {error}")
        return found

    def record(self, version: int) -> AdapterRecord:
        """One version.

        Raises:
            BundleError: there is none of that number, or it is damaged.
        """
        try:
            return self._record(version)
        except BundleError as error:
            there = ", ".join(_name(record.version) for record in self.records())
            advice = f"name one of {there}" if there else "learn one with `omnidraft-npu run`"
            raise BundleError(f"{error}: {advice}") from error

    @property
    def current(self) -> int:
        """The version in use: the one chosen last, or its nearest ancestor that can be used."""
        why = ""
        for version in self._chosen():
            if version == BASE:
                break
            try:
                found = self.misfit(self._record(version))
            except BundleError as error:
                found = str(error)
            if not found:
                break
            why = why or found
        if why:
            self._tell(f"{why}: {self._instead(version)}")
        return version

    def load(self, version: int) -> dict[str, npt.NDArray[np.float32]]:
        """Tensors by graph input, and those of the acceptance head; none for `BASE`.

        Raises:
            BundleError: there is no such version, it is damaged, or was made for another
                drafter, target or rank.
        """
        if version == BASE:
            return {}
        if why := self.misfit(self.record(version)):
            raise BundleError(f"{why}, so it cannot be used here: name another version")
        return read_adapter(self.path(version), self.key)

    def misfit(self, record: AdapterRecord) -> str:
        """What else than the store's pair a version was made for; empty where it fits."""
        for field, what in _KEY_WORDS.items():
            mine, its = getattr(self.key, field), getattr(record.key, field)
            if mine != its:
                return (
                    f"adapter {_name(record.version)} was made for another {what} "
                    f"({str(its)[:12]}, here {str(mine)[:12]})"
                )
        return ""

    def add(self, tensors: Tensors, *, parent: int, **facts: Any) -> AdapterRecord:
        """Write a new version; which one is in use stays.

        Args:
            tensors: By graph input, and those of the acceptance head.
            parent: The version that it goes on from.
            facts: Other fields of its record.

        Raises:
            BundleError: a tensor holds values that are no numbers.
            OSError: it cannot be written; all is as it was.
        """
        check_tensors(tensors, "the new adapter")
        private_folder(self.folder)
        # What has no record was left by a crash: the next takes its name.
        version = 1 + max(parent, *self._chosen(), *self._numbers())
        path = self.path(version)
        write_adapter(path, tensors, self.key, private=True)
        try:
            record = AdapterRecord(
                version=version, parent=parent, key=self.key, sha256=sha256_of(path), **facts
            )
            write_json(self._record_path(version), dataclasses.asdict(record), private=True)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._evict(keep=version)
        return record

    def use(self, version: int) -> None:
        """Make a version the one in use.

        Raises:
            BundleError: it is not there, damaged, or for something else.
            OSError: it cannot be written.
        """
        self.load(version)
        private_folder(self.folder)
        write_json(
            self.folder / "current.json",
            {"version": version, "ancestors": self._ancestors(version)},
            private=True,
        )

    def forget(self) -> int:
        """Erase every version, and what crashes left of others; gives their number."""
        count = len(self._numbers())
        for path in learned_in(self.folder):
            path.unlink(missing_ok=True)
        return count

    def path(self, version: int) -> Path:
        """Where a version's tensors lie."""
        return self.folder / f"{_name(version)}.onnx_adapter"

    def _record_path(self, version: int) -> Path:
        return self.folder / f"{_name(version)}.json"

    def _numbers(self) -> list[int]:
        """Of the versions that have a record."""
        matches = (_RECORD.fullmatch(path.name) for path in self.folder.glob("v*.json"))
        return sorted(int(match[1]) for match in matches if match)

    def _chosen(self) -> list[int]:
        """The version chosen last, and those that it goes on from; the last is always `BASE`."""
        path = self.folder / "current.json"
        if not path.exists():
            return [BASE]
        try:
            advice = "the newest adapter that helps is used"
            chosen = read_document(path, _Chosen, advice=advice)
            return [chosen.version, *chosen.ancestors, BASE]
        except BundleError as error:
            self._tell(str(error))
            helps = [r.version for r in self.records() if not r.is_worse]
            return [*reversed(helps), BASE]

    def _ancestors(self, version: int) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(BundleError):
            while len(found) < _MAX_ANCESTORS:
                version = self._record(version).parent
                if version == BASE:
                    break
                found.append(version)
        return found

    def _record(self, version: int) -> AdapterRecord:
        if version not in self._numbers():
            raise BundleError(f"there is no adapter {_name(version)}")
        return read_adapter_record(self._record_path(version), version, self.path(version))

    def _instead(self, version: int) -> str:
        """What is used in place of a chosen version that is damaged or does not fit."""
        if version != BASE:
            return f"{_name(version)} is used"
        fitting = [record.version for record in self.records() if not self.misfit(record)]
        other = f", or until you roll back to {_name(fitting[-1])}, which fits" if fitting else ""
        if not self.key.rank:
            return "the drafter is used as it was exported, without LoRA inputs: it cannot learn"
        return f"the drafter is used as it was exported until it has learned again{other}"

    def _evict(self, *, keep: int) -> None:
        """Remove the oldest versions over the budget, but not `keep`, nor what is in use."""
        kept = {keep, *self._chosen()[:2]}
        sizes = {n: bytes_of(self.path(n)) for n in self._numbers()}
        excess = sum(sizes.values()) - self.max_bytes
        for version, size in sizes.items():
            if excess <= 0:
                return
            if version not in kept:
                # Windows keeps a file that another process reads; a later add removes it.
                with contextlib.suppress(PermissionError):
                    self._record_path(version).unlink(missing_ok=True)
                    self.path(version).unlink(missing_ok=True)
                excess -= size

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)


def _name(version: int) -> str:
    return f"v{version:04}"
