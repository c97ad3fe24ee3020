"""The bundle that a command makes and uses when none is named."""

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..bundle import Bundle, open_bundle
from ..decoder_inputs import ATTENTION_ROWS
from ..documents import read_document
from ..drafters import DEFAULT_DRAFTER, packaged_drafter
from ..errors import (
    BundleError,
    CheckpointError,
    ConfigError,
    ExportError,
    OmniDraftError,
    StoreError,
)
from ..files import sha256_of, write_json
from ..locks import exclusive
from ..lora import DEFAULT_RANK
from ..manifest import MANIFEST
from ..printing import echo
from ..replacement import restore
from ..store.builtin_models import find_builtin
from ..store.local import is_hub_id, resolve_model, store_folder
from .pull import fetch_model

# The first is the default one; the drafter is the same for all.
DEFAULT_TARGETS = ("smollm2-135m", "gemma3-270m")

_HEADER_BYTES = 2**20
"""Read of each file of a model to see whether it has changed."""


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A bundle of the local store, and the model that it is made for."""

    bundle: Path
    target: str
    """A default model's name, or a path."""
    older: str
    """Pattern of the names of bundles that were made for it with other drafters."""
    fingerprint: str | None = None
    """Of the model's files; None for a default model, which does not change."""

    @property
    def source_file(self) -> Path:
        """Holds the fingerprint that the bundle was made for."""
        return self.bundle.with_name(f"{self.bundle.name}.source.json")


def choose_bundle(
    bundle: Path | None, target: str | None, *, accept_terms: bool
) -> tuple[Path, str | None]:
    """The bundle that was named, and the target in it; or one of the store and its only target.

    Raises:
        ConfigError, CheckpointError, StoreError, ExportError: as `default_bundle`.
    """
    if bundle is not None:
        return bundle, target
    return default_bundle(target, accept_terms=accept_terms), None


def existing_bundle(name: Path) -> Path:
    """A bundle's folder: the one named, or the one of the store that `run --target` made for it."""
    if (name / MANIFEST).exists():
        return name
    try:
        stored = _wanted(str(name)).bundle
    except OmniDraftError:
        return name
    return stored if stored.is_dir() else name


def default_bundle(target: str | None, *, accept_terms: bool) -> Path:
    """The bundle of a target in the local store: found there, or exported once.

    Args:
        target: A default model, which is fetched if need be; a Hugging Face folder or GGUF file,
            which is exported again when it changes; or the name of a model that was pulled.
        accept_terms: Accept the terms of a default model's licence.

    Raises:
        ConfigError: there is no default pair for `target`, and no such model.
        CheckpointError: the model cannot be read, or the package that reads it is missing.
        StoreError, ExportError: a model cannot be fetched or exported.
    """
    wanted = _wanted(target)
    if _reason_to_make(wanted) is None:
        return wanted.bundle
    try:
        wanted.bundle.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(wanted.bundle.with_name(f".{wanted.bundle.name}.making"), _say_busy):
            # Asked again: another process may have made it meanwhile.
            if (reason := _reason_to_make(wanted)) is not None:
                return _made(wanted, reason, accept_terms)
    except OSError as error:
        raise StoreError(
            f"the local store {store_folder()} cannot be written ({error.strerror or error}): "
            "free some space or set OMNIDRAFT_HOME to another folder"
        ) from error
    return wanted.bundle


def _wanted(target: str | None) -> _Wanted:
    folder, version = store_folder() / "bundles", f"{_drafter_version()}-r{DEFAULT_RANK}"
    name = target if target is not None else DEFAULT_TARGETS[0]
    builtin = find_builtin(name)
    is_path = target is not None and Path(target).expanduser().exists()
    if not is_path and builtin is not None and builtin.name in DEFAULT_TARGETS:
        name = builtin.name
        return _Wanted(bundle=folder / f"{name}-{version}", target=name, older=f"{name}*/")
    path = _model_path(name).resolve()
    if (path / MANIFEST).exists():
        raise ConfigError(f"{path} is a bundle, not a model: give it as --bundle")
    stem = path.name.removesuffix(".gguf")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:64] or "model"
    own = f"{plain}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    return _Wanted(
        bundle=folder / "own" / f"{own}-{version}",
        target=str(path),
        older=f"{own}-*/",
        fingerprint=_fingerprint(path),
    )


def _model_path(name: str) -> Path:
    try:
        return resolve_model(name)
    except StoreError as error:
        is_path = Path(name).name != name or name.endswith(".gguf") or name.startswith((".", "~"))
        if is_path or is_hub_id(name) or find_builtin(name) is not None:
            raise
        raise ConfigError(
            f"there is no default pair for target {name!r}, there is one for "
            f"{' and '.join(DEFAULT_TARGETS)}: use one of these, the path of a Hugging Face "
            "folder or a GGUF file, or --bundle"
        ) from error


def _fingerprint(path: Path) -> str:
    """Of names, sizes, times and beginnings of a model's files: enough to see that it changed."""
    digest = hashlib.sha256()
    if path.is_dir() and not (path / "config.json").exists():
        return digest.hexdigest()  # No model, which the export reports.
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            found = file.stat()
            digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_HEADER_BYTES))
    return digest.hexdigest()


def _made(wanted: _Wanted, reason: str, accept_terms: bool) -> Path:
    """The bundle, now made; or one that is there already, where a default one cannot be."""
    if reason:
        echo(reason, err=True)
    try:
        _make(wanted.bundle, wanted.target, accept_terms)
    except (StoreError, ExportError, CheckpointError) as error:
        usable = None if wanted.fingerprint is not None else _usable(wanted)
        if usable is None:
            raise
        echo(f"the default bundle cannot be made now ({error}): {usable} is used", err=True)
        return usable
    if wanted.fingerprint is not None:
        write_json(wanted.source_file, {"fingerprint": wanted.fingerprint})
    _name_older(wanted)
    return wanted.bundle


def _usable(wanted: _Wanted) -> Path | None:
    """A whole bundle that an earlier version made for the same target; None for none."""
    others = sorted(_older(wanted), key=lambda path: path.stat().st_mtime, reverse=True)
    for bundle in (wanted.bundle, *others):
        with contextlib.suppress(BundleError):
            open_bundle(bundle)
            return bundle
    return None


def _drafter_version() -> str:
    """A name for the drafter's files: a package that ships others makes another bundle."""
    folder = packaged_drafter(DEFAULT_DRAFTER)
    if folder is None:
        raise StoreError(
            f"this installation lacks the drafter {DEFAULT_DRAFTER}: install the package again, "
            "or name a bundle with --bundle"
        )
    files = sorted(path for path in folder.iterdir() if path.is_file())
    hashes = "".join(f"{path.name} {sha256_of(path)}\n" for path in files)
    return hashlib.sha256(hashes.encode()).hexdigest()[:12]


def _reason_to_make(wanted: _Wanted) -> str | None:
    """Reason to make the bundle: "" if it is missing, None if it is up to date."""
    bundle = wanted.bundle
    restore(bundle)
    if not bundle.exists():
        return ""
    if wanted.fingerprint is not None and _made_for(wanted) != wanted.fingerprint:
        return f"{wanted.target} has changed; exporting it again (what was learned stays)"
    try:
        opened = open_bundle(bundle)
    except BundleError as error:
        return f"{error}; making it again"
    if not _learns_as_now(opened):
        return f"{bundle} was made to learn by other steps; making it again (what it learned stays)"
    if not _has_exact_target(opened):
        return (
            f"{bundle} was made before single tokens were scored at their own price; "
            "making it again (what it learned stays)"
        )
    return None


def _has_exact_target(bundle: Bundle) -> bool:
    """Whether the targets' graphs that are built here can add rows to attention alone.

    An input's name stands in the file as it is.
    """
    name = ATTENTION_ROWS.encode()
    targets = bundle.manifest.targets.values()
    graphs = (target.graphs.get("cpu") for target in targets if target.exporter == "builder")
    return all(g is None or name in bundle.path(g.path).read_bytes() for g in graphs)


def _learns_as_now(bundle: Bundle) -> bool:
    """Whether the drafter's adapters, updates and loss are what a new bundle's would be."""
    from omnidraft_npu.quantize.training_stage import TrainingShape
    from omnidraft_npu.runtime.learner_config import LearnerConfig
    from omnidraft_npu.runtime.lora_trainer import has_loss

    drafter = bundle.manifest.drafter
    shape, made = TrainingShape(), drafter.training
    wanted = (DEFAULT_RANK, shape.batch, min(shape.length, drafter.context_length))
    if made is None or (made.lora_rank, made.batch, made.length) != wanted:
        return False
    return has_loss(bundle.path(made.path), LearnerConfig().loss)


def _made_for(wanted: _Wanted) -> str | None:
    """Fingerprint of the model that the bundle was made from; None where it is not known."""
    with contextlib.suppress(BundleError):
        return read_document(wanted.source_file, dict[str, str]).get("fingerprint")
    return None


def _older(wanted: _Wanted) -> list[Path]:
    """Bundles for the same target that were made with other drafters."""
    found = wanted.bundle.parent.glob(wanted.older)
    # An export in progress and what it replaces end like this.
    others = (path for path in found if path.suffix not in (".partial", ".replaced"))
    return sorted(path for path in others if path.name != wanted.bundle.name)


def _name_older(wanted: _Wanted) -> None:
    """Name what was made for other drafters: it is used no more, but may have learned something."""
    for older in _older(wanted):
        echo(
            f"{older} was made with another drafter or version and is used no more: "
            "delete it to free its space, or go on with it by --bundle",
            err=True,
        )


def _say_busy() -> None:
    echo("another process is exporting this model: waiting for it", err=True)


def _make(bundle: Path, target: str, accept_terms: bool) -> None:
    if target in DEFAULT_TARGETS:
        from omnidraft_npu.quantize.checkpoints.gguf_package import require_gguf

        require_gguf()
        fetch_model(target, accept_terms=accept_terms)

    from omnidraft_npu.quantize.export import ExportRequest, export_bundle
    from omnidraft_npu.quantize.model_request import model_request
    from omnidraft_npu.quantize.training_stage import TrainingShape

    from .progress import stage_progress

    request = ExportRequest(
        drafter=model_request(
            DEFAULT_DRAFTER,
            precision="int8",
            context_length=4096,
            lora_rank=DEFAULT_RANK,
            training=TrainingShape(),
        ),
        targets=(model_request(target, precision="int8", context_length=4096),),
    )
    with stage_progress() as report:
        export_bundle(request, bundle, force=True, progress=report)
