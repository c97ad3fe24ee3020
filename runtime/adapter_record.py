"""What is known of an adapter version: the document beside its file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omnidraft_npu.array_files import MAX_FILE_BYTES
from omnidraft_npu.documents import Count, check_regular, read_document
from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import sha256_of

from .adapter_files import AdapterKey

FORMAT_VERSION: Literal[1] = 1

_ADVICE = "it is of no use"


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """What is known of a version."""

    format_version: Literal[1] = FORMAT_VERSION
    version: Count
    parent: Count
    """The version that it goes on from; `BASE` for the drafter as it was exported."""
    key: AdapterKey
    sha256: str
    """Of the `.onnx_adapter` file."""
    num_examples: Count = 0
    """Responses that it learned from, its parents' left out."""
    num_updates: Count = 0
    acceptance_before: float | None = None
    """Of drafts on held-back responses with the parent; None where it was not measured."""
    acceptance_after: float | None = None
    origin: str = "learned"
    """`learned`, or what it was imported from."""

    @property
    def is_worse(self) -> bool:
        """Whether it was measured to draft worse than its parent."""
        before, after = self.acceptance_before, self.acceptance_after
        return before is not None and after is not None and after < before


def read_adapter_record(path: Path, version: int, adapter: Path) -> AdapterRecord:
    """The record of a version whose file is whole.

    Raises:
        BundleError: the record cannot be read or is of another version, or the file is not the
            one that it was written for.
    """
    record = read_document(path, AdapterRecord, advice=_ADVICE, is_closed=True)
    check_regular(adapter, advice=_ADVICE, max_bytes=MAX_FILE_BYTES)
    try:
        found = sha256_of(adapter)
    except OSError as error:
        raise BundleError(f"{adapter} cannot be read ({error.strerror}): {_ADVICE}") from error
    if record.version != version or not 0 <= record.parent < version:
        raise BundleError(f"{path} is not the record of version {version}")
    if found != record.sha256:
        raise BundleError(f"{adapter} was changed since it was written")
    return record
