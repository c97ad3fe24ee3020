"""From checkpoints to a bundle: stages that finish or leave nothing, and can be resumed."""

import dataclasses
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft_npu import __version__
from omnidraft_npu.bundle import Bundle, open_bundle
from omnidraft_npu.documents import convert_document
from omnidraft_npu.errors import CheckpointError, ConfigError, ExportError, TokenizerError
from omnidraft_npu.files import sha256_of, write_json
from omnidraft_npu.locks import exclusive
from omnidraft_npu.manifest import MANIFEST, FileEntry, Manifest, ModelEntry
from omnidraft_npu.memory import available_bytes
from omnidraft_npu.progress import Report
from omnidraft_npu.replacement import partial_path
from omnidraft_npu.state_folder import export_lock

from .htp_model import HtpModel, check_htp
from .htp_stage import export_htp
from .model_request import ModelRequest
from .model_stage import PreparedModel, check_generation, check_text, export_model, prepare_model
from .placing import check_output, put_in_place
from .preflight import check_disk, size_text
from .spelling_stage import export_spelling
from .stages import Stages
from .training_stage import export_training

logger = logging.getLogger(__name__)


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
    request: ExportRequest, output: Path, *, force: bool = False, progress: Report
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
    output = output.resolve()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(export_lock(output), lambda: _refuse(output)):
            check_output(output, force)
            stages = Stages(partial_path(output), _identity(request))
            _export(request, stages, output, progress)
    except OSError as error:
        raise ExportError(
            f"cannot write {output} ({error.strerror or error}): choose another --output"
        ) from error
    return ExportReport(
        bundle=open_bundle(output),
        stage_s=stages.seconds,
        seconds=time.perf_counter() - started,
    )


def _refuse(output: Path) -> None:
    raise ExportError(
        f"another process is exporting to {output}: wait for it, or choose another --output"
    )


def _export(request: ExportRequest, stages: Stages, output: Path, progress: Report) -> None:
    try:
        manifest = _run_stages(request, stages, progress)
        write_json(stages.root / MANIFEST, manifest.to_json())
        put_in_place(stages.root, output)
    except (CheckpointError, TokenizerError, ConfigError):
        stages.discard()
        raise
    except OSError as error:
        stages.discard_if_empty()
        raise ExportError(
            f"cannot write {output} ({error.strerror or error}); {stages.advice()}"
        ) from error
    except ExportError as error:
        stages.discard_if_empty()
        raise ExportError(f"{error}; {stages.advice()}") from error
    except BaseException:
        stages.discard_if_empty()
        raise
    Stages.forget(output)


def _identity(request: ExportRequest) -> dict[str, Any]:
    """What must be equal for finished stages to be taken over."""
    models = (request.drafter, *request.targets)
    return {"tool_version": __version__, "models": [model.identity() for model in models]}


def _run_stages(request: ExportRequest, stages: Stages, progress: Report) -> Manifest:
    requests = (request.drafter, *request.targets)
    models = []
    for i, wanted in enumerate(requests):
        progress("reading models", i, len(requests))
        models.append(prepare_model(wanted, is_drafter=i == 0))
    progress("reading models", len(requests), len(requests))
    for model in models[1:]:
        check_generation(model)
        check_text(model)
    _preflight(models, stages.root)
    drafter = _model(models[0], "drafter", stages, progress)
    targets = {
        model.request.name: _model(model, f"targets/{model.request.name}", stages, progress)
        for model in models[1:]
    }
    for target in targets.values():
        if target.tokenizer_sha256 != drafter.tokenizer_sha256:
            _spell(drafter, target, stages, progress)
    return Manifest(
        tool_version=__version__,
        drafter=drafter,
        targets=targets,
        files=_hash(stages, progress),
    )


def _model(model: PreparedModel, folder: str, stages: Stages, progress: Report) -> ModelEntry:
    facts = stages.run(
        f"{folder.split('/')[0].removesuffix('s')} {model.request.name}",
        folder,
        lambda root, tell: export_model(model, root, folder, tell),
        progress,
    )
    where = f"a finished part of {stages.root}"
    entry = convert_document(facts, ModelEntry, where, advice="remove that", is_closed=True)
    if model.request.training is not None and model.checkpoint is not None:
        training = export_training(
            entry, model.checkpoint.config, model.request.training, stages, progress
        )
        entry = dataclasses.replace(entry, training=training)
    htp = _htp_model(model)
    if htp is None:
        return entry
    return dataclasses.replace(entry, htp=export_htp(htp, folder, stages, progress))


def _htp_model(model: PreparedModel) -> HtpModel | None:
    """The model's NPU flavour; None where none is wanted."""
    request = model.request
    if request.htp is None:
        return None
    if model.checkpoint is None or model.tokenizer is None:
        raise ConfigError(
            f"{request.name} is not built by our own builder, so it has no graphs for the NPU: "
            "leave out --soc, or choose a model of a supported architecture"
        )
    return HtpModel(
        name=request.name,
        request=request.htp,
        checkpoint=model.checkpoint,
        tokenizer=model.tokenizer,
        max_context_length=request.context_length,
        lora_rank=request.lora_rank,
        has_hidden_states=request.has_hidden_states,
    )


def _preflight(models: Sequence[PreparedModel], root: Path) -> None:
    """Find out before any model is worked on whether there is room for their NPU flavours."""
    wanted = [htp for htp in map(_htp_model, models) if htp is not None]
    if not wanted:
        return
    found = [check_htp(htp, available_bytes()) for htp in wanted]
    needed = sum(one.disk_bytes for one in found)
    # What an interrupted export made is part of what is needed, or is about to be dropped.
    there = sum(p.stat().st_size for p in root.rglob("htp/**/*") if p.is_file())
    check_disk(needed, shutil.disk_usage(root.parent).free + there, str(root.parent))
    logger.info(
        "the NPU flavour takes about %s of disk and %s of memory",
        size_text(needed),
        size_text(max(one.ram_bytes for one in found)),
    )


def _spell(drafter: ModelEntry, target: ModelEntry, stages: Stages, progress: Report) -> None:
    stages.run(
        f"spelling {target.name} with {drafter.name}",
        f"spellings/{target.name}",
        lambda root, tell: export_spelling(root, stages.root, drafter, target, tell),
        progress,
    )


def _hash(stages: Stages, progress: Report) -> dict[str, FileEntry]:
    entries = {}
    files = stages.files()
    for i, path in enumerate(files):
        progress("hashing", i, len(files))
        relative = path.relative_to(stages.root).as_posix()
        entries[relative] = FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
    progress("hashing", len(files), len(files))
    return entries
