"""What a bundle says about itself: `manifest.json`, format version 1."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import BundleError

FORMAT_VERSION = 1

Cache = Literal["shared", "concat"]
Exporter = Literal["builder", "optimum", "external"]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file of the bundle."""

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
class TrainingEntry:
    """The graph that gives the losses of a drafter and their gradients, for learning.

    It runs on the CPU and shares the data file of the drafter's CPU graph.
    """

    path: str
    """Relative to the bundle, with forward slashes."""
    lora_rank: int
    batch: int
    """Responses of an update."""
    length: int
    """Pieces of a response and what led to it."""
    num_top: int
    """Pieces that a law names."""
    gradient_error: float | None = None
    """Largest error against torch's gradients, relative to each one's largest element; None where
    the export had no torch and looked at changes of the loss instead."""


@dataclass(frozen=True, kw_only=True)
class HtpPart:
    """A run of layers of a model that fits no single context of an NPU."""

    num_layers: int
    graphs: dict[str, str]
    """Paths by length, relative to the bundle."""
    compiled: dict[str, dict[str, str]] = field(default_factory=dict)
    """Graphs that hold a context binary, by key of the chip and by length."""


@dataclass(frozen=True, kw_only=True)
class HtpEntry:
    """The static graphs of a model for the NPU, one for each number of tokens in a pass."""

    precision: str
    """Name of the recipe: `fp16`, `w8a16` and so on."""
    context_length: int
    """Slots of the cache that the host owns."""
    graphs: dict[str, str] = field(default_factory=dict)
    """Paths by length, relative to the bundle; all have the same weights."""
    parts: tuple[HtpPart, ...] = ()
    """In order of their layers; then the graphs and binaries are those of the parts."""
    lora_rank: int = 0
    """Rank of the LoRA inputs; 0 for graphs without them."""
    has_hidden_states: bool = False
    """Whether the graphs also give `hidden_states`."""
    sliding_window: int | None = None
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
    """By flavour; `cpu` is the only one with a graph of any length."""
    htp: HtpEntry | None = None
    """None where the model was not exported for an NPU."""
    training: TrainingEntry | None = None
    """None for a model that does not learn: a target, or a drafter without LoRA inputs."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain dictionaries, lists and scalars."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> "ModelEntry":
        """Read a record that `to_json` gave; raises `BundleError` for one that does not fit."""
        entry: ModelEntry = read_record(cls, document, "model")
        return entry


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
                f"manifest.json has format_version {version!r}, this tool reads {FORMAT_VERSION}: "
                "update omnidraft-npu, or export the bundle again"
            )
        manifest: Manifest = read_record(cls, document, "manifest")
        if not manifest.targets:
            raise BundleError("manifest.json names no target: export the bundle again")
        return manifest


def read_record(kind: Any, value: Any, where: str) -> Any:
    """`value` as an instance of the annotation `kind`, strictly.

    Raises:
        BundleError: it does not fit; says where, starting from `where`.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _fields_of(kind, value, where)
    if origin is dict and isinstance(value, dict):
        return {
            key: read_record(arguments[1], item, f"{where}.{key}") for key, item in value.items()
        }
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(
            read_record(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)
        )
    if origin is types.UnionType:
        return None if value is None else read_record(arguments[0], value, where)
    if origin is Literal and value in arguments:
        return value
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float):
        return value
    raise BundleError(f"manifest.json: {where} is {value!r}, which does not fit: export again")


def _fields_of(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise BundleError(f"manifest.json: {where} is not an object: export again")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(value) - set(fields)):
        raise BundleError(
            f"manifest.json: {where} has the unknown key {unknown[0]!r}: "
            "it was written by another version; update omnidraft-npu or export again"
        )
    for name, record in fields.items():
        no_default = (
            record.default is dataclasses.MISSING and record.default_factory is dataclasses.MISSING
        )
        if no_default and name not in value:
            raise BundleError(f"manifest.json: {where} lacks {name!r}: export the bundle again")
    read = {key: read_record(hints[key], item, f"{where}.{key}") for key, item in value.items()}
    return kind(**read)
