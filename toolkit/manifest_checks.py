"""Whether what a manifest says can be: numbers in range, names plain, places in the bundle."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from .chips.table import all_chips
from .documents import shown_text, shown_value
from .errors import BundleError
from .manifest import HtpEntry, HtpPart, Manifest, ModelEntry, TrainingEntry

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_LENGTH = re.compile(r"[1-9][0-9]{0,8}")


def check_manifest(manifest: Manifest) -> None:
    """Pass if every model is one that can be opened and run.

    Raises:
        BundleError: naming the first thing that cannot be, by its path in the document.
    """
    models = {"drafter": manifest.drafter}
    models |= {f"targets.{shown_text(key)}": model for key, model in manifest.targets.items()}
    for where, model in models.items():
        for problem in (
            *_number_problems(model),
            *_place_problems(model),
            *_htp_problems(model.htp),
            *_training_problems(model.training, model),
        ):
            raise BundleError(f"manifest.json: {where}.{problem}: export the bundle again")
    for key, model in manifest.targets.items():
        if key != model.name:
            raise BundleError(
                f"manifest.json: target {shown_value(key)} has the name {shown_value(model.name)}: "
                "export the bundle again"
            )


def is_inside(relative: str) -> bool:
    """Whether a path with forward slashes, relative to a folder, leads into that folder."""
    parts = PurePosixPath(relative).parts
    return (
        bool(parts)
        and relative.isprintable()
        and not (relative.startswith("/") or ".." in parts or "\\" in relative or ":" in relative)
    )


def spelling_path(target: ModelEntry) -> str:
    """Where the spellings of a target lie, with another tokenizer than the drafter's."""
    return f"spellings/{target.name}/spelling.safetensors"


def required_files(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Every file without which a model of the bundle cannot be used, and the model's name."""
    for model in (manifest.drafter, *manifest.targets.values()):
        for graph in model.graphs.values():
            yield graph.path, model.name
        if model.htp is not None:
            for path in htp_paths(model.htp):
                yield path, model.name
        if model.training is not None:
            yield model.training.path, model.name
        yield f"{model.folder}/tokenizer.json", model.name
    for target in manifest.targets.values():
        if target.tokenizer_sha256 != manifest.drafter.tokenizer_sha256:
            yield spelling_path(target), target.name


def htp_paths(htp: HtpEntry) -> Iterator[str]:
    """Every graph of the NPU flavour: those to compile, then those that are."""
    for piece in htp.pieces():
        yield from piece.graphs.values()
        for graphs in piece.compiled.values():
            yield from graphs.values()


def _number_problems(model: ModelEntry) -> Iterator[str]:
    if model.vocab_size > model.num_logits:
        yield f"vocab_size is {model.vocab_size}, must be at most num_logits, {model.num_logits}"
    bos = () if model.bos_token_id is None else (model.bos_token_id,)
    for name, ids in (("eos_token_ids", model.eos_token_ids), ("bos_token_id", bos)):
        for token_id in ids:
            if token_id >= model.num_logits:
                yield f"{name} has {token_id}, must be from 0 to {model.num_logits - 1}"


def _place_problems(model: ModelEntry) -> Iterator[str]:
    if not _PLAIN_NAME.fullmatch(model.name):
        rule = "at most 200 letters, digits, '.', '_' and '-', no '.' first"
        yield f"name is {shown_value(model.name)}, must be {rule}"
    if not is_inside(model.folder):
        yield f"folder is {shown_value(model.folder)}, a path outside the bundle"
    if unknown := sorted(model.graphs.keys() - {"cpu"}):
        yield f"graphs has {shown_value(unknown[0])}, which this tool does not know"
    if not model.graphs and model.htp is None:
        yield "graphs is empty"
    for flavour, graph in model.graphs.items():
        if not is_inside(graph.path):
            yield f"graphs.{flavour}.path is {shown_value(graph.path)}, a path outside the bundle"


def _htp_problems(htp: HtpEntry | None) -> Iterator[str]:
    if htp is None:
        return
    if htp.parts and (htp.graphs or htp.compiled):
        yield "htp has graphs of its own beside its parts"
    for i, piece in enumerate(htp.pieces()):
        where = f"htp.parts[{i}]" if htp.parts else "htp"
        yield from _piece_problems(piece, where)
        if piece.graphs.keys() != htp.pieces()[0].graphs.keys():
            yield f"{where}.graphs has other lengths than the first part"
    for path in htp_paths(htp):
        if not is_inside(path):
            yield f"htp names {shown_value(path)}, a path outside the bundle"


def _training_problems(training: TrainingEntry | None, model: ModelEntry) -> Iterator[str]:
    if training is None:
        return
    if not is_inside(training.path):
        yield f"training.path is {shown_value(training.path)}, a path outside the bundle"
    for flavour, graph in model.graphs.items():
        if graph.lora_rank != training.lora_rank:
            yield (
                f"training.lora_rank is {training.lora_rank}, but that of graphs.{flavour} is "
                f"{graph.lora_rank}"
            )


def _piece_problems(piece: HtpPart, where: str) -> Iterator[str]:
    if not piece.graphs:
        yield f"{where}.graphs is empty"
    for length in piece.graphs:
        if not _LENGTH.fullmatch(length):
            yield f"{where}.graphs has the length {shown_value(length)}, must be 1 or more"
    known = {chip.key for chip in all_chips()}
    for chip, graphs in piece.compiled.items():
        if chip not in known:
            shown = shown_value(chip)
            yield f"{where}.compiled has the chip {shown}, which this tool does not know"
        for length in graphs:
            if length not in piece.graphs:
                shown = shown_value(length)
                yield f"{where}.compiled.{chip} has the length {shown}, which its graphs lack"
