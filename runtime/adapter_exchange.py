"""Adapters into a bundle and out of it: `.onnx_adapter` files and PEFT folders."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.acceptance_head import AcceptanceHead
from omnidraft_npu.bundle import Bundle
from omnidraft_npu.errors import BundleError, ConfigError

from .adapter_files import HEAD_PREFIX, AdapterKey, read_adapter, write_adapter
from .lora_inputs import check_head, fit_lora
from .lora_trainer import new_adapter
from .peft_files import read_peft, write_peft

SUFFIX = ".onnx_adapter"

Shapes = dict[str, tuple[int, ...]]
OwnTensors = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An adapter that fits a bundle."""

    tensors: OwnTensors
    """All that the drafter takes, and those of the acceptance head if it came with one."""
    origin: str
    """Of the record: the file's kind and name."""
    base_model: str
    """What a PEFT folder says that it was trained on, unless that is this drafter; else empty."""
    num_new: int
    """Tensors that it did not have, and that change nothing until they are learned."""

    @property
    def has_head(self) -> bool:
        """Whether an acceptance head came with it."""
        return any(name.startswith(HEAD_PREFIX) for name in self.tensors)


def is_adapter_file(output: Path) -> bool:
    """Whether an export goes to an `.onnx_adapter` file; any other name is a folder for PEFT."""
    return output.suffix.lower() == SUFFIX


def lora_shapes(bundle: Bundle) -> Shapes:
    """Shapes of the drafter's LoRA inputs by name.

    Raises:
        BundleError: it has none.
    """
    import onnx

    drafter = bundle.manifest.drafter
    entry = drafter.graphs.get("cpu")
    inputs: Any = ()
    if entry is not None:
        path = bundle.path(entry.path)
        try:
            inputs = onnx.load(path, load_external_data=False).graph.input
        except Exception as error:  # protobuf has no class of its own for what is damaged
            raise BundleError(f"{path} is not a graph: export the bundle again") from error
    shapes = {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in inputs
        if value.name.startswith("lora.")
    }
    if any(len(shape) != 2 or min(shape) < 1 for shape in shapes.values()):
        raise BundleError(f"{path} has LoRA inputs of open shapes: export the bundle again")
    if not shapes:
        raise BundleError(
            f"the drafter {drafter.name} was exported without LoRA inputs, so it takes no "
            "adapters: export the bundle again with --lora-rank"
        )
    return shapes


def import_adapter(source: Path, bundle: Bundle, key: AdapterKey) -> Imported:
    """Read an adapter and check that it fits a bundle's drafter.

    Args:
        source: An `.onnx_adapter` file or a PEFT folder.
        bundle: The opened bundle.
        key: Of the bundle's drafter and target.

    Raises:
        BundleError: it cannot be read, is for another drafter, target or rank, has tensors that
            the drafter does not take, or values that are no numbers.
    """
    shapes = lora_shapes(bundle)
    if not source.is_dir() and (not source.is_file() or source.suffix == ".safetensors"):
        what = "is a part of an adapter" if source.is_file() else "does not exist, or is no file"
        raise BundleError(f"{source} {what}: name an {SUFFIX} file, or a folder that PEFT saved")
    base_model = ""
    if source.is_dir():
        read = read_peft(source, key=key, drafter=bundle.manifest.drafter.source)
        tensors, kind = read.tensors, "PEFT"
        base_model = "" if read.is_for_drafter else read.base_model
    else:
        tensors, kind = read_adapter(source, key), SUFFIX.removeprefix(".")
    return Imported(
        tensors=_completed(tensors, shapes, source),
        origin=f"{kind} {''.join(c for c in source.name if c.isprintable())}",
        base_model=base_model,
        num_new=len(shapes.keys() - tensors.keys()),
    )


def _completed(tensors: OwnTensors, shapes: Shapes, source: Path) -> OwnTensors:
    """With tensors that change nothing where some are missing; refuses what does not fit."""
    head = {n: t for n, t in tensors.items() if n.startswith(HEAD_PREFIX)}
    lora = {n: t for n, t in tensors.items() if n not in head}
    try:
        _check_rank(lora, shapes)
        fit_lora(shapes, lora)
        _check_pairs(lora)
        AcceptanceHead.from_tensors(head)
        check_head(head, shapes)
    except BundleError as error:
        raise BundleError(f"{source}: {error}") from error
    return {**new_adapter(shapes), **lora, **head}


def _check_pairs(lora: OwnTensors) -> None:
    """Refuse halves: a new other half, if that is A, would make noise of them."""
    if not lora:
        raise BundleError("it adapts nothing: there is no tensor of an adapter in it")
    sides = Counter(name.rpartition(".")[0] for name in lora)
    if halves := sorted(name for name, count in sides.items() if count == 1):
        raise BundleError(
            f"it has one factor of {halves[0]} but not the other (A and B): save the adapter again"
        )


def _check_rank(lora: OwnTensors, shapes: Shapes) -> None:
    ranks = {t.shape[-1] for name, t in lora.items() if name.endswith(".A")}
    mine = {shape[-1] for name, shape in shapes.items() if name.endswith(".A")}
    if other := ranks - mine:
        raise BundleError(
            f"it has rank {min(other)}, the drafter was exported with {min(mine)}: export it again "
            f"with --lora-rank {min(other)}"
        )


def export_adapter(
    output: Path,
    tensors: OwnTensors,
    bundle: Bundle,
    key: AdapterKey,
    *,
    base_model: str | None = None,
) -> None:
    """Write a version to a file, or as a PEFT folder.

    Args:
        output: An `.onnx_adapter` file; any other name is a folder for PEFT.
        tensors: Of the version.
        bundle: The opened bundle.
        key: Of the bundle's drafter and target.
        base_model: What PEFT loads it on; None for what the drafter was exported from.

    Raises:
        OSError: it cannot be written.
        ConfigError: `base_model` is given for an `.onnx_adapter` file.
    """
    if not is_adapter_file(output):
        write_peft(
            output,
            tensors,
            key=key,
            drafter=bundle.manifest.drafter.source,
            base_model=base_model,
        )
        return
    if base_model is not None:
        raise ConfigError(f"{output} is no folder for PEFT: leave out --base-model")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_adapter(output, tensors, key)
