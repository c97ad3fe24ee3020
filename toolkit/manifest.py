"""What a bundle says about itself: `manifest.json`, format version 1."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT_VERSION = 1

Cache = Literal["shared", "concat"]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and SHA-256 of one file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class GraphEntry:
    """One decoder graph of a model, for one provider."""

    path: str
    """Relative to the bundle, with forward slashes."""
    precision: str
    """`fp32`, `int8`, `int4`, or `unknown` for a graph that was not built here."""
    cache: Cache
    """`shared`: past and present are one preallocated buffer; `concat`: present is returned."""
    lora_rank: int = 0
    """Rank of the LoRA inputs; 0 for a graph without them."""
    has_hidden_states: bool = False
    """Whether the graph also gives `hidden_states`, `[1, length, hidden]`."""


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A drafter or a target."""

    name: str
    source: str
    """Where it came from: a built-in name, a hub id or a file name; never a machine path."""
    architecture: str
    exporter: Literal["builder", "optimum", "external"]
    folder: str
    """Folder of the model in the bundle; tokenizer and config files lie there."""
    vocab_size: int
    """Real token ids: the tokenizer's size, at most the rows of the logits."""
    num_logits: int
    """Rows of the logits, padding included."""
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    """First id of every sequence, where the model wants one."""
    tokenizer_sha256: str
    """Content hash: equal for equal tokenizers, whatever the file's layout."""
    graphs: dict[str, GraphEntry] = field(default_factory=dict)
    """By flavour: `cpu`, later `htp`."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole document."""

    format_version: int = FORMAT_VERSION
    tool_version: str
    drafter: ModelEntry
    targets: dict[str, ModelEntry]
    """By name, in the order of the export; the first is the default."""
    files: dict[str, FileEntry]
    """Every file but the manifest and `state/`, by relative path."""

    def to_json(self) -> dict[str, Any]:
        """The document as plain dictionaries, lists and scalars."""
        return dataclasses.asdict(self)
