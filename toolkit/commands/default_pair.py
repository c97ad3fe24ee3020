"""The bundle that a command makes and uses when none is named."""

import hashlib
from pathlib import Path

from ..bundle import Bundle, open_bundle
from ..drafters import DEFAULT_DRAFTER, packaged_drafter
from ..errors import BundleError, ConfigError, StoreError
from ..files import sha256_of
from ..locks import exclusive
from ..lora import DEFAULT_RANK
from ..printing import echo
from ..replacement import restore
from ..store.builtin_models import find_builtin
from ..store.local import store_folder
from .pull import fetch_model

# The first is the default one; the drafter is the same for all.
DEFAULT_TARGETS = ("smollm2-135m", "gemma3-270m")


def choose_bundle(
    bundle: Path | None, target: str | None, *, accept_terms: bool
) -> tuple[Path, str | None]:
    """The bundle that was named, and the target in it; or a default bundle and its only one.

    Raises:
        ConfigError, CheckpointError, StoreError, ExportError: as `default_bundle`.
    """
    if bundle is not None:
        return bundle, target
    return default_bundle(target, accept_terms=accept_terms), None


def default_bundle(target: str | None, *, accept_terms: bool) -> Path:
    """The default bundle of a target: found in the local store, or fetched and exported once.

    Raises:
        ConfigError: there is no default pair for `target`.
        CheckpointError: the package that reads the models is not installed.
        StoreError, ExportError: a model cannot be fetched or exported.
    """
    target = target or DEFAULT_TARGETS[0]
    builtin = find_builtin(target)
    target = builtin.name if builtin is not None else target
    if target not in DEFAULT_TARGETS:
        raise ConfigError(
            f"there is no default pair for target {target!r}, there is one for "
            f"{' and '.join(DEFAULT_TARGETS)}: use one of these, or --bundle"
        )
    bundle = store_folder() / "bundles" / f"{target}-{_drafter_version()}-r{DEFAULT_RANK}"
    if _reason_to_make(bundle) is None:
        return bundle
    try:
        bundle.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(bundle.with_name(f".{target}.making"), _say_busy):
            # Asked again: another process may have made it meanwhile.
            if (reason := _reason_to_make(bundle)) is not None:
                if reason:
                    echo(reason, err=True)
                _make(bundle, target, accept_terms)
                _name_older(bundle, target)
    except OSError as error:
        raise StoreError(
            f"the local store {store_folder()} cannot be written ({error.strerror or error}): "
            "free some space or set OMNIDRAFT_HOME to another folder"
        ) from error
    return bundle


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


def _reason_to_make(bundle: Path) -> str | None:
    """Why a bundle is to be made, or made again; empty where there is none, None for no reason."""
    restore(bundle)
    if not bundle.exists():
        return ""
    try:
        opened = open_bundle(bundle)
    except BundleError as error:
        return f"{error}; making it again"
    if not _learns_as_now(opened):
        return f"{bundle} was made to learn by other steps; making it again (what it learned stays)"
    return None


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


def _name_older(bundle: Path, target: str) -> None:
    """Name what was made for other drafters: it is used no more, but may have learned something."""
    for older in sorted(bundle.parent.glob(f"{target}*/")):
        if older.name != bundle.name:
            echo(
                f"{older} was made with another drafter or version and is used no more: "
                "delete it to free its space, or go on with it by --bundle",
                err=True,
            )


def _say_busy() -> None:
    echo("another process is making the default bundle: waiting for it", err=True)


def _make(bundle: Path, target: str, accept_terms: bool) -> None:
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
