"""The folder of a run: begun by one command, taken up by others that ask for the same."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft_npu.documents import Count, convert_document, read_document, shown_value
from omnidraft_npu.errors import CheckpointError, ConfigError
from omnidraft_npu.files import write_json

from .processes import Processes
from .request import DistillRequest, prompts_hash


def claim_folder(request: DistillRequest, corpus: Sequence[str], processes: Processes) -> None:
    """Begin in an empty folder, or check that what is there is this run.

    Raises:
        ConfigError: the folder holds other things, or a run that was asked for others.
        CheckpointError: its settings are damaged.
    """
    settings = request.output / "settings.json"
    if not settings.is_file():
        if request.resume:
            raise ConfigError(f"{request.output} holds no run: leave out --resume to begin one")
        if request.output.exists() and any(request.output.iterdir()):
            raise ConfigError(f"{request.output} is not empty: name a new folder with --output")
    elif not request.resume:
        raise ConfigError(
            f"{request.output} holds an earlier run: go on with --resume, or name another folder"
        )
    else:
        _require_same(_read(settings), request, corpus)
    processes.wait()
    if processes.is_first:
        request.output.mkdir(parents=True, exist_ok=True)
        prompts = request.all_prompts()
        texts = {
            "prompts": {"count": len(prompts), "sha256": prompts_hash(prompts)},
            "corpus": _corpus_hash(corpus),
        }
        write_json(settings, request.identity() | texts)
    processes.wait()


def _read(settings: Path) -> dict[str, Any]:
    advice = "it is damaged; name another folder with --output"
    return read_document(settings, dict[str, Any], error=CheckpointError, advice=advice)


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """What a run began with."""

    count: Count | None = None
    sha256: str | None = None


def _require_same(before: dict[str, Any], request: DistillRequest, corpus: Sequence[str]) -> None:
    for name, value in request.identity().items():
        if before.get(name) != value:
            raise ConfigError(
                f"the run in {request.output} has {name} {shown_value(before.get(name))}, not "
                f"{value}: ask for the same, or name another folder"
            )
    # More prompts may follow: those before them are answered as they were.
    asked = convert_document(
        before.get("prompts") or {},
        _Prompts,
        f"{request.output / 'settings.json'}: prompts",
        error=CheckpointError,
        advice="it is damaged; name another folder with --output",
    )
    if prompts_hash(request.all_prompts()[: asked.count]) != asked.sha256:
        what = "those it began with" if request.prompts else "its --prompts or this tool's version"
        raise ConfigError(
            f"the run in {request.output} began with other prompts: give {what} again "
            "(more of them may follow), or name another folder"
        )
    if before.get("corpus") != _corpus_hash(corpus):
        raise ConfigError(
            f"the run in {request.output} began with another --corpus: give the same again, "
            "or name another folder"
        )


def _corpus_hash(corpus: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(corpus)).encode()).hexdigest()
