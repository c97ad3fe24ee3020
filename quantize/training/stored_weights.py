"""The weights of a drafter where they are: in the data file of its CPU graph."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ExportError

from ..graph_writer import MICROSOFT, GraphWriter
from ..weight_quantization import BLOCK, Bits, BlockQuantized

if TYPE_CHECKING:
    import onnx

Floats = npt.NDArray[np.float32]


class StoredWeights:
    """Constants of a drafter's graph, for another graph of the same folder.

    Nothing is copied: the other graph names the same bytes of the same file. Block-wise
    integers are dequantised when the graph runs.
    """

    def __init__(self, model_path: Path) -> None:
        """Open the graph that `build_cpu_decoder` wrote.

        Raises:
            ExportError: it cannot be read.
        """
        import onnx

        self._folder = model_path.parent
        try:
            model = onnx.load(model_path, load_external_data=False)
        except OSError as error:
            raise ExportError(f"cannot read {model_path} ({error.strerror})") from error
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def has(self, name: str) -> bool:
        """Whether there is a constant of this name."""
        return name in self._tensors

    def plain(self, graph: GraphWriter, name: str) -> str:
        """Add a float constant to `graph`, once: a norm's weight, a bias, a table."""
        return name if graph.has(name) else graph.stored_tensor(name, self._tensors[name])

    def matrix(self, graph: GraphWriter, name: str, in_features: int) -> str:
        """Add the weight of a product, float32 ``[out, in_features]``, to `graph`."""
        if self._is_float(name):
            return self.plain(graph, f"{name}.weight")
        floats = graph.node(
            "DequantizeLinear",
            self._block_parts(graph, name),
            f"{name}.floats",
            axis=1,
            block_size=BLOCK,
        )
        return self._cut(graph, floats, name, in_features)

    def rows(self, graph: GraphWriter, name: str, ids: str, in_features: int) -> str:
        """Add rows of such a matrix, float32 ``[…, in_features]``, to `graph`."""
        if self._is_float(name):
            return graph.node("Gather", [self.plain(graph, f"{name}.weight"), ids], f"{name}.rows")
        weight, *others = self._block_parts(graph, name)
        rows = graph.node(
            "GatherBlockQuantized",
            [weight, ids, *others],
            f"{name}.rows",
            domain=MICROSOFT,
            bits=8,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        return self._cut(graph, rows, name, in_features)

    def floats(self, name: str, in_features: int) -> Floats:
        """What `matrix` gives when the graph runs, ``[out, in_features]``."""
        weight = self._read(f"{name}.weight")
        if weight.dtype == np.float32:
            return weight
        return BlockQuantized(
            packed=weight,
            scales=self._read(f"{name}.scales"),
            zero_points=self._read(f"{name}.zero_points"),
            bits=_bits(weight.shape[-1]),
            in_features=in_features,
        ).dequantize()

    def vector(self, name: str) -> Floats:
        """What `plain` gives."""
        return self._read(name)

    def _is_float(self, name: str) -> bool:
        import onnx

        return bool(self._tensors[f"{name}.weight"].data_type == onnx.TensorProto.FLOAT)

    def _block_parts(self, graph: GraphWriter, name: str) -> list[str]:
        """Levels, scales and zero points as DequantizeLinear takes them, added once."""
        parts = [f"{name}.{part}" for part in ("weight", "scales", "zero_points")]
        if not graph.has(parts[0]):
            weight = self._tensors[parts[0]]
            out, blocks, _ = weight.dims
            graph.stored_tensor(parts[0], _as_integers(weight, [out, blocks * BLOCK]))
            graph.stored_tensor(parts[1], self._tensors[parts[1]])
            graph.stored_tensor(parts[2], self._zero_points(name))
        return parts

    def _cut(self, graph: GraphWriter, value: str, name: str, width: int) -> str:
        """Without the columns that fill up the last block."""
        blocks = self._tensors[f"{name}.weight"].dims[1]
        if width == blocks * BLOCK:
            return value
        bounds = [
            graph.tensor(f"{value}.{key}", np.array([number], np.int64))
            for key, number in (("start", 0), ("end", width), ("axis", -1))
        ]
        return graph.node("Slice", [value, *bounds], f"{value}.cut")

    def _zero_points(self, name: str) -> "onnx.TensorProto":
        """Zero points ``[out, blocks]``; rows of an odd number of 4-bit ones were filled up."""
        out, blocks = self._tensors[f"{name}.scales"].dims
        stored = self._tensors[f"{name}.zero_points"]
        is_filled = stored.dims[1] * 2 == blocks + 1 and blocks > 1
        if not is_filled:
            return _as_integers(stored, [out, blocks])
        packed = self._read(f"{name}.zero_points")
        levels = np.stack([packed & 15, packed >> 4], axis=-1).reshape(out, -1)[:, :blocks]
        flat = np.append(levels.reshape(-1), np.zeros(levels.size % 2, np.uint8))
        tight = _as_integers(stored, [out, blocks])
        del tight.external_data[:]
        tight.ClearField("data_location")
        tight.raw_data = (flat[0::2] | flat[1::2] << np.uint8(4)).tobytes()
        return tight

    def _read(self, name: str) -> npt.NDArray[Any]:
        from onnx import numpy_helper

        return numpy_helper.to_array(self._tensors[name], str(self._folder))


def _bits(block_bytes: int) -> Bits:
    return 8 if block_bytes == BLOCK else 4


def _as_integers(tensor: "onnx.TensorProto", shape: list[int]) -> "onnx.TensorProto":
    """The same bytes as unsigned integers of 8 or 4 bits, whichever fill `shape`."""
    import onnx

    seen = onnx.TensorProto()
    seen.CopyFrom(tensor)
    if np.prod(shape) != np.prod(tensor.dims):
        seen.data_type = onnx.TensorProto.UINT4
    del seen.dims[:]
    seen.dims.extend(shape)
    return seen
