"""Adapter versions of one target: `state/adapters/<target>/` of a bundle.

A version is a `.onnx_adapter` file and the record beside it, which is written last and holds
the file's hash: a version without a record, or of another hash, is not there. Which one is in
use stands in `current.json`; going back moves only that. Every file is written beside its
place and renamed into it, so a crash leaves the last good state.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import atomic_path, sha256_of, write_json
from omnidraft_npu.manifest import read_record

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
BASE = 0
"""The version without an adapter."""

Tensors = Mapping[str, npt.NDArray[np.float32]]

_RECORD = re.compile(r"v(\d{4,})\.json")


@dataclass(frozen=True, kw_only=True)
class AdapterKey:
    """What an adapter was made for; it is of no use to anything else."""

    drafter_sha256: str
    """Of the drafter's weights."""
    target_tokenizer_sha256: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """What is known of a version."""

    format_version: int = FORMAT_VERSION
    version: int
    parent: int
    """The version that it goes on from; `BASE` for the drafter as it was exported."""
    key: AdapterKey
    sha256: str
    """Of the `.onnx_adapter` file."""
    num_examples: int = 0
    """Responses that it learned from, its parents' left out."""
    num_updates: int = 0
    acceptance_before: float | None = None
    """Of drafts on held-back responses with the parent; None where it was not measured."""
    acceptance_after: float | None = None
    origin: str = "learned"
    """`learned`, or what it was imported from."""


class AdapterStore:
    """Lists, reads and adds versions. One process writes at a time; any number may read."""

    def __init__(self, folder: Path, key: AdapterKey) -> None:
        """Open the versions in `folder`, which need not exist, for one drafter and target."""
        self.folder = folder
        self.key = key

    def records(self) -> list[AdapterRecord]:
        """All versions that are whole, the oldest first; others are said, and passed over."""
        found = []
        for path in sorted(self.folder.glob("v*.json")):
            if _RECORD.fullmatch(path.name) is None:
                continue
            try:
                found.append(self._record(path))
            except BundleError as error:
                logger.warning("an adapter is passed over: %s", error)
        return found

    def record(self, version: int) -> AdapterRecord:
        """One version.

        Raises:
            BundleError: there is none of that number, or it is damaged.
        """
        path = self.folder / f"{_name(version)}.json"
        if not path.is_file():
            there = ", ".join(_name(r.version) for r in self.records()) or "none"
            raise BundleError(f"there is no adapter {_name(version)}, there is {there}")
        return self._record(path)

    @property
    def current(self) -> int:
        """The version in use: the one chosen last, or its nearest whole ancestor; else `BASE`."""
        versions = {record.version: record for record in self.records()}
        chosen = self._chosen()
        if chosen in versions or chosen == BASE:
            return chosen
        older = [v for v in versions if v < chosen]
        fallback = max(older, default=BASE)
        logger.warning("adapter %s is damaged: %s is used", _name(chosen), _name(fallback))
        return fallback

    def load(self, version: int) -> dict[str, npt.NDArray[np.float32]]:
        """Tensors by graph input; none for `BASE`.

        Raises:
            BundleError: there is no such version, it is damaged, or was made for another
                drafter, target or rank.
        """
        if version == BASE:
            return {}
        record = self.record(version)
        for field in dataclasses.fields(AdapterKey):
            mine, its = getattr(self.key, field.name), getattr(record.key, field.name)
            if mine != its:
                raise BundleError(
                    f"adapter {_name(version)} was made for {field.name} {_short(its)}, this is "
                    f"{_short(mine)}: roll back to another, or forget it"
                )
        return read_adapter(self.path(version))

    def add(self, tensors: Tensors, *, parent: int, **facts: Any) -> AdapterRecord:
        """Write a new version; `current` stays.

        Args:
            tensors: By graph input.
            parent: The version that it goes on from.
            facts: Other fields of its record.

        Raises:
            OSError: it cannot be written; all is as it was.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(p.stem[1:]) for p in self.folder.glob("v*.*") if p.stem[1:].isdigit()]
        version = 1 + max([parent, *numbers])
        path = self.path(version)
        with atomic_path(path) as temporary:
            write_adapter(temporary, tensors)
        record = AdapterRecord(
            version=version, parent=parent, key=self.key, sha256=sha256_of(path), **facts
        )
        write_json(self.folder / f"{_name(version)}.json", dataclasses.asdict(record))
        return record

    def use(self, version: int) -> None:
        """Make a version the one in use.

        Raises:
            BundleError: it is not there, damaged, or for something else.
            OSError: it cannot be written.
        """
        self.load(version)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "current.json", {"version": version})

    def forget(self) -> int:
        """Erase every version; gives their number."""
        count = len(list(self.folder.glob("v*.onnx_adapter")))
        for pattern in ("current.json", "v*.json", "v*.onnx_adapter", ".*.tmp"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        return count

    def path(self, version: int) -> Path:
        """Where a version's tensors lie."""
        return self.folder / f"{_name(version)}.onnx_adapter"

    def _chosen(self) -> int:
        path = self.folder / "current.json"
        try:
            chosen = json.loads(path.read_text(encoding="utf-8"))["version"]
        except FileNotFoundError:
            return BASE
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s cannot be read (%s): the newest adapter is used", path, error)
            return max((record.version for record in self.records()), default=BASE)
        return int(chosen)

    def _record(self, path: Path) -> AdapterRecord:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            record: AdapterRecord = read_record(AdapterRecord, document, "adapter")
            found = sha256_of(self.path(record.version))
        except (OSError, ValueError, BundleError) as error:
            raise BundleError(f"{path} cannot be read ({error})") from error
        if found != record.sha256:
            raise BundleError(f"{self.path(record.version)} was changed since it was written")
        return record


def write_adapter(path: Path, tensors: Tensors) -> None:
    """Write an `.onnx_adapter` file."""
    import onnxruntime as ort

    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor, np.float32))
        for name, tensor in tensors.items()
    }
    adapter.set_parameters(values)
    adapter.export_adapter(str(path))


def read_adapter(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors of an `.onnx_adapter` file.

    Raises:
        BundleError: it is none, or damaged, or holds numbers that are none.
    """
    import onnxruntime as ort

    try:
        parameters = ort.AdapterFormat.read_adapter(str(path)).get_parameters()
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise BundleError(f"{path} is not an adapter that can be read ({reason})") from error
    tensors = {name: np.array(value.numpy(), np.float32) for name, value in parameters.items()}
    if any(not np.isfinite(tensor).all() for tensor in tensors.values()):
        raise BundleError(f"{path} holds values that are no numbers")
    return tensors


def _name(version: int) -> str:
    return f"v{version:04}"


def _short(value: object) -> str:
    return str(value)[:12]
