"""From checkpoints to a bundle: stages that finish or leave nothing, and can be resumed."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft_npu import __version__
from omnidraft_npu.bundle import MANIFEST, Bundle, open_bundle
from omnidraft_npu.errors import CheckpointError, ConfigError, ExportError, TokenizerError
from omnidraft_npu.files import sha256_of, write_json
from omnidraft_npu.manifest import FileEntry, Manifest, ModelEntry

from .model_stage import ModelRequest, export_model
from .spelling_stage import export_spelling
from .stages import Stages

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the items done and their total."""


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What one export makes: a drafter and at least one target."""

    drafter: ModelRequest
    targets: tuple[ModelRequest, ...]

    def __post_init__(self) -> None:
        if not self.targets:
            raise ConfigError("an export needs a target: add --target NAME")
        names = [target.name for target in self.targets]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"two targets are named {repeated[0]!r}: rename one of the folders or files"
            )


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export made, and what it took."""

    bundle: Bundle
    stage_s: dict[str, float]
    """Wall seconds of each stage that ran; one finished by an earlier run is left out."""
    seconds: float


def export_bundle(
    request: ExportRequest, output: Path, *, force: bool = False, progress: Progress
) -> ExportReport:
    """Write a bundle for a drafter and its targets.

    Everything is written beside `output` and moved there when it is complete. An interrupted
    export keeps its finished stages; the same request picks them up.

    Args:
        request: The models and how to export them.
        output: The bundle's directory.
        force: Replace a bundle that is there; what it learned (`state/`) is carried over.
        progress: Told about every step.

    Raises:
        ExportError: `output` exists (without `force`), is not a bundle, or cannot be written.
        CheckpointError, TokenizerError: a model cannot be read; nothing is left behind.
    """
    started = time.perf_counter()
    _check_output(output, force)
    stages = Stages(output.with_name(output.name + ".partial"), _identity(request))
    try:
        manifest = _run_stages(request, stages, progress)
        _put_in_place(stages, manifest, output)
    except (CheckpointError, TokenizerError, ConfigError):
        stages.discard()
        raise
    except OSError as error:
        stages.discard_if_empty()
        raise ExportError(
            f"cannot write {output}: {error.strerror or error}. Free space or choose another "
            f"--output; {stages.resume_hint()}"
        ) from error
    except BaseException:
        stages.discard_if_empty()
        raise
    return ExportReport(
        bundle=open_bundle(output),
        stage_s=stages.seconds,
        seconds=time.perf_counter() - started,
    )


def _identity(request: ExportRequest) -> dict[str, Any]:
    """What must be equal for finished stages to be taken over."""
    models = (request.drafter, *request.targets)
    return {"tool_version": __version__, "models": [model.identity() for model in models]}


def _check_output(output: Path, force: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / MANIFEST).is_file()):
        raise ExportError(f"{output} exists and is not a bundle: choose another --output")
    if not force and any(output.iterdir()):
        raise ExportError(f"{output} exists: use --force to replace it, or another --output")


def _run_stages(request: ExportRequest, stages: Stages, progress: Progress) -> Manifest:
    drafter = _model(request.drafter, "drafter", stages, progress)
    targets = {m.name: _model(m, f"targets/{m.name}", stages, progress) for m in request.targets}
    for target in targets.values():
        if target.tokenizer_sha256 != drafter.tokenizer_sha256:
            _spell(drafter, target, stages, progress)
    return Manifest(
        tool_version=__version__,
        drafter=drafter,
        targets=targets,
        files=_hash(stages, progress),
    )


def _model(request: ModelRequest, folder: str, stages: Stages, progress: Progress) -> ModelEntry:
    facts = stages.run(
        f"{folder.split('/')[0].removesuffix('s')} {request.name}",
        folder,
        lambda root, tell: export_model(request, root, folder, tell),
        progress,
    )
    return ModelEntry.from_json(facts)


def _spell(drafter: ModelEntry, target: ModelEntry, stages: Stages, progress: Progress) -> None:
    stages.run(
        f"spelling {target.name} with {drafter.name}",
        f"spellings/{target.name}",
        lambda root, tell: export_spelling(root, stages.root, drafter, target, tell),
        progress,
    )


def _hash(stages: Stages, progress: Progress) -> dict[str, FileEntry]:
    entries = {}
    files = stages.files()
    for i, path in enumerate(files):
        progress("hashing", i, len(files))
        relative = path.relative_to(stages.root).as_posix()
        entries[relative] = FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
    progress("hashing", len(files), len(files))
    return entries


def _put_in_place(stages: Stages, manifest: Manifest, output: Path) -> None:
    write_json(stages.root / MANIFEST, manifest.to_json())
    stages.close()
    if not output.exists():
        stages.root.replace(output)
        return
    replaced = output.with_name(output.name + ".replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    output.replace(replaced)
    stages.root.replace(output)
    if (replaced / "state").is_dir():
        (replaced / "state").replace(output / "state")
    shutil.rmtree(replaced)
