"""Adapters in PEFT's layout: a folder that loads on top of the original Hugging Face model.

PEFT keeps ``lora_A`` as ``[rank, in]`` and ``lora_B`` as ``[out, rank]`` and multiplies by a
scale, ``alpha / rank`` or, with `use_rslora`, ``alpha / sqrt(rank)``. Here A is ``[in, rank]``,
B is ``[rank, out]`` and the scale is part of B.

Source:
    The files that peft 0.21 writes.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.documents import shown_text
from omnidraft_npu.drafters.float_folder import DRAFTER_MARK
from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import write_json, write_safetensors
from omnidraft_npu.lora import MODULES, Side, lora_name

from .adapter_files import HEAD_PREFIX, AdapterKey, Tensors, check_tensors
from .peft_config import CONFIG, read_peft_config
from .safetensors_arrays import read_arrays, read_metadata

Floats = npt.NDArray[np.float32]

WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
HEAD = "acceptance_head.safetensors"
"""Which PEFT does not read."""

_MARK = "omnidraft_npu."
_OURS = re.compile(r"lora\.layers\.(\d+)\.(\w+)\.([AB])")
_THEIRS = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """An adapter that was read, and what it says of itself."""

    tensors: dict[str, npt.NDArray[np.float32]]
    """By graph input, and those of the acceptance head where the folder has one."""
    base_model: str
    """What it was trained on, a hub id or a path; empty if it does not say."""
    is_for_drafter: bool
    """Whether that is the bundle's drafter, by a mark or by its name."""
    rank: int


def write_peft(
    folder: Path, tensors: Tensors, *, key: AdapterKey, drafter: str, base_model: str | None = None
) -> None:
    """Write an adapter as PEFT would, and the acceptance head in a file of its own beside it.

    Args:
        folder: Made if absent.
        tensors: By graph input (`omnidraft_npu.lora.lora_name`), and those of the head.
        key: What the adapter is for.
        drafter: Where the drafter came from, as the manifest has it: exports of it in another
            precision can take the adapter too.
        base_model: What PEFT loads it on, a hub id or a path; None for `drafter`.

    Raises:
        OSError: the folder cannot be written.
    """
    theirs, head = {}, {}
    modules = set()
    for name, tensor in tensors.items():
        if name.startswith(HEAD_PREFIX):
            head[name] = tensor
            continue
        layer, module, side = _parse(name)
        modules.add(module)
        block = "self_attn" if module[0] in "qkvo" else "mlp"
        at = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{side}.weight"
        theirs[at] = np.ascontiguousarray(tensor.T)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or drafter,
        "r": key.rank,
        "lora_alpha": key.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(modules),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS, theirs, {"format": "pt", **_marks(key, drafter)})
    (folder / HEAD).unlink(missing_ok=True)
    if head:
        write_safetensors(folder / HEAD, head, {"format": "pt"})
    write_json(folder / CONFIG, config)


def read_peft(folder: Path, *, key: AdapterKey, drafter: str) -> PeftAdapter:
    """An adapter that PEFT wrote.

    A smaller rank than the graph's is filled up: the rest of A is random, so that it can be
    learned, and that of B zero, so that nothing changes.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        key: Of the bundle's drafter and target.
        drafter: As for `write_peft`; what that made for another is refused, other tools do not
            say.

    Raises:
        BundleError: a file is missing or damaged, the rank is too large, the adapter needs
            what the graphs do not have, or is for another drafter or target.
    """
    config = read_peft_config(folder)
    found = config.r
    if found > key.rank:
        raise BundleError(
            f"{folder} has rank {found}, the drafter was exported with {key.rank}: export it "
            f"again with --lora-rank {found}"
        )
    if not (folder / WEIGHTS).exists() and (folder / _PICKLED).exists():
        raise BundleError(
            f"{folder / _PICKLED} can hold any program, so it is not read: save the adapter as "
            "safetensors, as PEFT does by default"
        )
    weights, metadata = read_arrays(folder / WEIGHTS)
    for name, mine in _marks(key, drafter).items():
        if (its := metadata.get(name, mine)) != mine:
            what = name.removeprefix(_MARK)
            raise BundleError(
                f"{folder} was made for the {what} {shown_text(its, 32)}, this bundle has "
                f"{mine[:32]}: import it into a bundle of that one"
            )
    tensors = {}
    for name, tensor in weights.items():
        match = _THEIRS.fullmatch(name)
        if match is None or match[2] not in MODULES:
            raise BundleError(f"{folder} adapts {shown_text(name)}, which the graphs cannot")
        side: Side = "A" if match[3] == "A" else "B"
        factor = tensor.T * np.float32(config.scale if side == "B" else 1.0)
        if factor.ndim != 2 or factor.shape[side == "A"] != found:
            raise BundleError(f"{folder} has {name} of another rank than its r of {found}")
        tensors[lora_name(int(match[1]), match[2], side)] = _filled_up(factor, side, key.rank)
    if (folder / HEAD).exists():
        tensors |= read_arrays(folder / HEAD)[0]
    check_tensors(tensors, str(folder))
    base_model = config.base_model_name_or_path or ""
    return PeftAdapter(
        tensors=tensors,
        base_model=base_model,
        is_for_drafter=DRAFTER_MARK in metadata or _is_drafter(base_model, drafter),
        rank=found,
    )


def _is_drafter(base_model: str, drafter: str) -> bool:
    """Whether a model is a drafter: of the same name, or what `write_float_drafter` made of it."""
    named = read_metadata(Path(base_model) / "model.safetensors").get(DRAFTER_MARK)
    return drafter in (Path(base_model).name, named)


def _marks(key: AdapterKey, drafter: str) -> dict[str, str]:
    """What the file says of its pair besides what PEFT knows."""
    return {
        DRAFTER_MARK: drafter,
        f"{_MARK}target tokenizer": key.target_tokenizer_sha256,
    }


def _filled_up(factor: Floats, side: Side, rank: int) -> Floats:
    """``[in, rank]`` or ``[rank, out]`` from a factor of a rank that may be smaller."""
    missing = rank - factor.shape[side == "A"]
    if side == "B":
        return np.pad(factor, ((0, missing), (0, 0)))
    num_in = len(factor)
    more = np.random.default_rng(0).normal(scale=num_in**-0.5, size=(num_in, missing))
    return np.concatenate([factor, more.astype(np.float32)], axis=1)


def _parse(name: str) -> tuple[int, str, str]:
    match = _OURS.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no LoRA tensor")
    return int(match[1]), match[2], match[3]
