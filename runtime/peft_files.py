"""Adapters in PEFT's layout: a folder that loads on top of the original Hugging Face model.

PEFT keeps ``lora_A`` as ``[rank, in]`` and ``lora_B`` as ``[out, rank]`` and multiplies by a
scale, ``alpha / rank`` or, with `use_rslora`, ``alpha / sqrt(rank)``. Here A is ``[in, rank]``,
B is ``[rank, out]`` and the scale is part of B.

Source:
    The files that peft 0.21 writes.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import atomic_path, write_json
from omnidraft_npu.lora import MODULES, Side, lora_name

Tensors = Mapping[str, npt.NDArray[np.float32]]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OURS = re.compile(r"lora\.layers\.(\d+)\.(\w+)\.([AB])")
_THEIRS = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_FOREIGN = {
    "use_dora": "DoRA's magnitudes",
    "modules_to_save": "whole modules",
    "rank_pattern": "different ranks",
    "alpha_pattern": "different scales",
    "layer_replication": "repeated layers",
    "fan_in_fan_out": "turned weights",
}
"""Settings of `adapter_config.json` that need what the graphs do not have."""


def write_peft(folder: Path, tensors: Tensors, *, rank: int, base_model: str) -> None:
    """Write an adapter as PEFT would.

    Args:
        folder: Made if absent.
        tensors: By graph input (`omnidraft_npu.lora.lora_name`).
        rank: Of the adapter.
        base_model: What the adapter is for: a hub id or a path.

    Raises:
        OSError: the folder cannot be written.
    """
    from safetensors.numpy import save_file

    theirs = {}
    for name, tensor in tensors.items():
        layer, module, side = _parse(name)
        block = "self_attn" if module[0] in "qkvo" else "mlp"
        at = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{side}.weight"
        theirs[at] = np.ascontiguousarray(tensor.T)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({_parse(name)[1] for name in tensors}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / _WEIGHTS) as temporary:
        save_file(theirs, temporary, {"format": "pt"})
    write_json(folder / _CONFIG, config)


def read_peft(folder: Path, *, rank: int) -> dict[str, npt.NDArray[np.float32]]:
    """An adapter that PEFT wrote, as tensors by graph input.

    A smaller rank than the graph's is filled up with zeros, which changes nothing.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        rank: Of the graph's LoRA inputs.

    Raises:
        BundleError: a file is missing or damaged, the rank is too large, or the adapter needs
            what the graphs do not have.
    """
    config = _read_config(folder)
    found = config["r"]
    if found > rank:
        raise BundleError(
            f"{folder} has rank {found}, the drafter was exported with {rank}: export it again "
            f"with --lora-rank {found}"
        )
    scale = config["lora_alpha"] / (math.sqrt(found) if config.get("use_rslora") else found)
    tensors = {}
    for name, tensor in _read_weights(folder).items():
        match = _THEIRS.fullmatch(name)
        if match is None or match[2] not in MODULES:
            raise BundleError(f"{folder} adapts {name}, which the graphs cannot")
        side: Side = "A" if match[3] == "A" else "B"
        factor = tensor.astype(np.float32).T * np.float32(scale if side == "B" else 1.0)
        if factor.shape[side == "A"] != found:
            raise BundleError(f"{folder} has {name} of another rank than its r of {found}")
        missing = ((0, 0), (0, rank - found)) if side == "A" else ((0, rank - found), (0, 0))
        tensors[lora_name(int(match[1]), match[2], side)] = np.pad(factor, missing)
    return tensors


def _parse(name: str) -> tuple[int, str, str]:
    match = _OURS.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no LoRA tensor")
    return int(match[1]), match[2], match[3]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, rank, alpha = config["peft_type"], config["r"], config["lora_alpha"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BundleError(
            f"{path} cannot be read ({error}): give a folder that PEFT's save_pretrained wrote"
        ) from error
    if kind != "LORA" or not isinstance(rank, int) or rank < 1:
        raise BundleError(f"{path} is for {kind} of rank {rank!r}, only LORA can be imported")
    if not isinstance(alpha, int | float):
        raise BundleError(f"{path} has lora_alpha {alpha!r}, which is no number")
    for key, what in _FOREIGN.items():
        if config.get(key):
            raise BundleError(f"{path} sets {key}: {what} cannot be imported")
    if config.get("bias", "none") != "none":
        raise BundleError(f"{path} trains biases ({config['bias']}), which cannot be imported")
    return dict(config)


def _read_weights(folder: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / _WEIGHTS
    try:
        return dict(load_file(path))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BundleError(f"{path} cannot be read ({error}): save the adapter again") from error
