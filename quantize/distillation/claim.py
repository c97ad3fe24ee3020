"""The folder of a run: begun by one command, taken up by others that ask for the same."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    try:
        document = json.loads(settings.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise CheckpointError(
            f"{settings} is damaged ({error}): name another folder with --output"
        ) from error
    return document


def _require_same(before: dict[str, Any], request: DistillRequest, corpus: Sequence[str]) -> None:
    for name, value in request.identity().items():
        if before.get(name) != value:
            raise ConfigError(
                f"the run in {request.output} has {name} {before.get(name)}, not {value}: "
                "ask for the same, or name another folder"
            )
    # More prompts may follow: those before them are answered as they were.
    asked = before.get("prompts") or {}
    if prompts_hash(request.all_prompts()[: asked.get("count")]) != asked.get("sha256"):
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
