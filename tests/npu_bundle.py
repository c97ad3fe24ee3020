"""The tiny bundle with an NPU flavour: hand-made static graphs, compiled or not."""

import json
from dataclasses import replace
from pathlib import Path

from decoder_graphs import NUM_LOGITS
from static_graphs import StaticVariant, write_static_decoder
from tiny_bundle import write_bundle

from omnidraft_npu.bundle import MANIFEST
from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.files import sha256_of
from omnidraft_npu.manifest import FileEntry, HtpEntry, Manifest, ModelEntry
from omnidraft_npu.qnn.provider import open_qnn_session

LENGTHS = (1, 4, 16)
CONTEXT = 64
STATIC = StaticVariant(context_length=CONTEXT, num_logits=NUM_LOGITS, lora_rank=2)
OTHER_STATIC = replace(STATIC, seed=8, sliding_window=9, lora_rank=0)


def write_npu_bundle(root: Path, *, compiled_for: tuple[str, ...] = ()) -> Path:
    """The bundle of `write_bundle`; the NPU's graphs have weights of their own.

    The drafter and the target `same` are equal there too, `other` has a sliding window.
    """
    write_bundle(root)
    manifest = Manifest.from_json(json.loads((root / MANIFEST).read_text()))
    targets = {
        name: _with_htp(root, entry, STATIC if name == "same" else OTHER_STATIC, compiled_for)
        for name, entry in manifest.targets.items()
    }
    drafter = _with_htp(root, manifest.drafter, STATIC, compiled_for)
    files = {
        path.relative_to(root).as_posix(): FileEntry(
            size=path.stat().st_size, sha256=sha256_of(path)
        )
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    manifest = replace(manifest, drafter=drafter, targets=targets, files=files)
    (root / MANIFEST).write_text(json.dumps(manifest.to_json()), encoding="utf-8")
    return root


def _with_htp(
    root: Path, entry: ModelEntry, variant: StaticVariant, chips: tuple[str, ...]
) -> ModelEntry:
    place = f"{entry.folder}/htp"
    names = write_static_decoder(root / place, LENGTHS, variant)
    compiled: dict[str, dict[str, str]] = {}
    for chip in map(find_chip, chips):
        compiled[chip.key] = {
            length: _compile(root, place, name, chip.key, chip.soc_model)
            for length, name in names.items()
        }
    htp = HtpEntry(
        precision="fp16",
        context_length=variant.context_length,
        graphs={length: f"{place}/{name}" for length, name in names.items()},
        lora_rank=variant.lora_rank,
        sliding_window=variant.sliding_window,
        compiled=compiled,
    )
    return replace(entry, htp=htp)


def _compile(root: Path, place: str, name: str, key: str, soc_model: int) -> str:
    made = f"{place}/{key}/{name.replace('.onnx', '_ctx.onnx')}"
    (root / made).parent.mkdir(exist_ok=True)
    config = {
        "ep.context_enable": "1",
        "ep.context_embed_mode": "0",
        "ep.context_file_path": str(root / made),
    }
    open_qnn_session(root / place / name, soc_model=soc_model, simulate=True, config=config)
    return made
