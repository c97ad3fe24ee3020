"""What a bundle says about itself: `manifest.json`, format version 1."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from .documents import Count, Size, TokenId, convert_document, shown_value
from .errors import BundleError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

MAX_CONTEXT_LENGTH = 2**21
ContextLength = Annotated[int, Meta(ge=1, le=MAX_CONTEXT_LENGTH)]
"""Slots of a cache; buffers of this many ids are made before anything else is known."""
Cache = Literal["shared", "concat"]
Exporter = Literal["builder", "optimum", "external"]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file of the bundle."""

    size: Count
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
    lora_rank: Count = 0
    """Rank of the LoRA inputs; 0 for a graph without them."""
    has_hidden_states: bool = False
    """Whether the graph also gives `hidden_states`, `[1, length, hidden]`."""


@dataclass(frozen=True, kw_only=True)
class TrainingEntry:
    """The graph that gives the losses of a drafter and their gradients, for learning.

    It runs on the CPU and shares the data file of the drafter's CPU graph.
    """

    path: str
    """Relative to the bundle, with forward slashes."""
    lora_rank: Size
    batch: Size
    """Responses of an update."""
    length: Size
    """Pieces of a response and what led to it."""
    num_top: Size
    """Pieces that a law names."""
    gradient_error: float | None = None
    """Largest error against torch's gradients, relative to each one's largest element; None where
    the export had no torch and looked at changes of the loss instead."""


@dataclass(frozen=True, kw_only=True)
class HtpPart:
    """A run of layers of a model that fits no single context of an NPU."""

    num_layers: Count
    graphs: dict[str, str]
    """Paths by length, relative to the bundle."""
    compiled: dict[str, dict[str, str]] = field(default_factory=dict)
    """Graphs that hold a context binary, by key of the chip and by length."""


@dataclass(frozen=True, kw_only=True)
class HtpEntry:
    """The static graphs of a model for the NPU, one for each number of tokens in a pass."""

    precision: str
    """Name of the recipe: `fp16`, `w8a16` and so on."""
    context_length: ContextLength
    """Slots of the cache that the host owns."""
    graphs: dict[str, str] = field(default_factory=dict)
    """Paths by length, relative to the bundle; all have the same weights."""
    parts: tuple[HtpPart, ...] = ()
    """In order of their layers; then the graphs and binaries are those of the parts."""
    lora_rank: Count = 0
    """Rank of the LoRA inputs; 0 for graphs without them."""
    has_hidden_states: bool = False
    """Whether the graphs also give `hidden_states`."""
    sliding_window: Size | None = None
    """Tokens that a sliding layer sees, itself included, for the mask that the host fills."""
    compiled: dict[str, dict[str, str]] = field(default_factory=dict)
    """Graphs that hold a context binary, by key of the chip and by length."""
    loads_on_simulator: bool = True
    """False for binaries that share weights or are for several chips: the simulator dies of them,
    only a device loads them."""
    qnn_version: str = ""
    """Of the QNN that made the binaries."""
    calibration: str = ""
    """What the ranges of the activations were taken from; empty for a float recipe."""
    report: dict[str, float] = field(default_factory=dict)
    """What the recipe costs, by name of the measure."""
    is_accurate: bool | None = None
    """Whether that is within the recipe's bound; None where it was not measured."""

    def pieces(self) -> tuple[HtpPart, ...]:
        """The parts, or the whole model as the only one."""
        whole = HtpPart(num_layers=0, graphs=self.graphs, compiled=self.compiled)
        return self.parts or (whole,)


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A drafter or a target."""

    name: str
    source: str
    """Where it came from: a built-in name, a hub id or a file name; never a machine path."""
    architecture: str
    exporter: Exporter
    folder: str
    """Folder of the model in the bundle; tokenizer and config files lie there."""
    vocab_size: Size
    """Real token ids: the tokenizer's size, at most the rows of the logits."""
    num_logits: Size
    """Rows of the logits, padding included."""
    context_length: ContextLength
    max_context_length: Size | None = None
    """Most tokens the model is made for; None where that is not known."""
    eos_token_ids: tuple[TokenId, ...]
    bos_token_id: TokenId | None
    """First id of every sequence, where the model wants one."""
    tokenizer_sha256: str
    """Content hash: equal for equal tokenizers, whatever the file's layout."""
    graphs: dict[str, GraphEntry] = field(default_factory=dict)
    """By flavour; `cpu` is the only one with a graph of any length."""
    htp: HtpEntry | None = None
    """None where the model was not exported for an NPU."""
    training: TrainingEntry | None = None
    """None for a model that does not learn: a target, or a drafter without LoRA inputs."""

    @property
    def is_as_long_as_can_be(self) -> bool:
        """Whether another export would hold no more tokens either."""
        return self.max_context_length is not None and (
            self.context_length >= self.max_context_length
        )

    def to_json(self) -> dict[str, Any]:
        """The record as plain dictionaries, lists and scalars."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> "ModelEntry":
        """Read a record that `to_json` gave; raises `BundleError` for one that does not fit."""
        return convert_document(document, cls, "the model", is_closed=True)


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

    @classmethod
    def from_json(cls, document: Any) -> "Manifest":
        """Read a parsed `manifest.json`.

        Raises:
            BundleError: a newer format version; or a key that is unknown, missing or of
                another type, named by its path in the document.
        """
        if not isinstance(document, dict) or "format_version" not in document:
            raise BundleError("manifest.json has no format_version: it is not a bundle's manifest")
        version = document["format_version"]
        if version != FORMAT_VERSION:
            raise BundleError(
                f"manifest.json has format_version {shown_value(version)}, this tool reads "
                f"{FORMAT_VERSION}: update omnidraft-npu, or export the bundle again"
            )
        manifest = convert_document(document, cls, "manifest.json", is_closed=True)
        if not manifest.targets:
            raise BundleError("manifest.json names no target: export the bundle again")
        return manifest
