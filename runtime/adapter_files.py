"""`.onnx_adapter` files: the tensors of an adapter, and marks of what they were made for.

The file names its model by two numbers. `model_version` is here the beginning of the hash of the
drafter's weights, and `adapter_version` that of the target's tokenizer; 1, which is what others
write, says nothing. The rank is seen in the shapes.
"""

import errno
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu import acceptance_head
from omnidraft_npu.bundle import Bundle
from omnidraft_npu.documents import Count
from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import atomic_path
from omnidraft_npu.manifest import ModelEntry

Tensors = Mapping[str, npt.NDArray[np.float32]]

HEAD_PREFIX = acceptance_head.PREFIX
"""Tensors of the acceptance head, which the drafter's graph does not take."""

_UNKNOWN = 1
_MARKED = ("drafter", "target tokenizer")


@dataclass(frozen=True, kw_only=True)
class AdapterKey:
    """What an adapter was made for; it is of no use to anything else."""

    drafter_sha256: str
    """Of the drafter's weights."""
    target_tokenizer_sha256: str
    rank: Count

    @classmethod
    def of(cls, bundle: Bundle, target: ModelEntry) -> "AdapterKey":
        """The key of a target's adapters in a bundle; 0 is the rank of a drafter without LoRA.

        Raises:
            BundleError: the drafter has no CPU graph.
        """
        drafter = bundle.manifest.drafter
        graph = drafter.graphs.get("cpu")
        if graph is None:
            raise BundleError(
                f"the drafter {drafter.name} has no CPU graph, so it takes no adapters: export the "
                "bundle again"
            )
        weights = f"{graph.path}.data"
        files = bundle.manifest.files
        return cls(
            drafter_sha256=files[weights if weights in files else graph.path].sha256,
            target_tokenizer_sha256=target.tokenizer_sha256,
            rank=graph.lora_rank,
        )

    @property
    def marks(self) -> tuple[int, int]:
        """`model_version` and `adapter_version` of a file for this key."""
        return _mark(self.drafter_sha256), _mark(self.target_tokenizer_sha256)


def _mark(sha256: str) -> int:
    """A positive number of 31 bits, other than `_UNKNOWN`."""
    return max(zlib.crc32(sha256.encode()) & 0x7FFFFFFF, _UNKNOWN + 1)


def check_tensors(tensors: Tensors, what: str) -> None:
    """Refuse what must never be used.

    Raises:
        BundleError: a value is no number.
    """
    if any(not np.isfinite(tensor).all() for tensor in tensors.values()):
        raise BundleError(f"{what} holds values that are no numbers: it is of no use")


def write_adapter(path: Path, tensors: Tensors, key: AdapterKey, *, private: bool = False) -> None:
    """Write an `.onnx_adapter` file, atomically; `private` as for `atomic_path`.

    Raises:
        OSError: it cannot be written; onnxruntime does not tell why.
    """
    import onnxruntime as ort

    adapter = ort.AdapterFormat()
    model, target = key.marks
    adapter.set_model_version(model)
    adapter.set_adapter_version(target)
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor, np.float32))
        for name, tensor in tensors.items()
    }
    adapter.set_parameters(values)
    with atomic_path(path, private=private) as temporary:
        try:
            adapter.export_adapter(str(temporary))
        except RuntimeError as error:
            raise OSError(errno.EIO, "no room, or not writable", str(path)) from error


def read_adapter(path: Path, key: AdapterKey) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors of an `.onnx_adapter` file.

    Args:
        path: The file.
        key: What it must have been made for, unless it does not say.

    Raises:
        BundleError: it is none, or damaged, or for another drafter or target, or holds numbers
            that are none.
    """
    import onnxruntime as ort

    try:
        adapter = ort.AdapterFormat.read_adapter(str(path))
        tensors = {n: np.array(v.numpy(), np.float32) for n, v in adapter.get_parameters().items()}
    except Exception as error:  # onnxruntime raises what C++ threw, with a place in its own source
        raise BundleError(
            f"{path} is not an adapter that can be read: it is damaged, or a file of another kind"
        ) from error
    made_for = (adapter.get_model_version(), adapter.get_adapter_version())
    for what, found, mine in zip(_MARKED, made_for, key.marks, strict=True):
        if found not in (_UNKNOWN, mine):
            raise BundleError(
                f"{path} was made for another {what} than this bundle's: learn or import it there "
                "(for the same drafter in another precision, export it as a PEFT folder)"
            )
    check_tensors(tensors, str(path))
    return tensors
