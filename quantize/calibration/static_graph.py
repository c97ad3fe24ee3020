"""Text through a static graph on the CPU provider: as much runtime as calibration needs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnxruntime as ort

Array = npt.NDArray[Any]

_HIDDEN = np.float32(-100.0)
_DTYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(uint16)": np.uint16}
_ACCURACY, _EXACT = "session.qdq_matmulnbits_accuracy_level", "1"
"""Or the CPU provider rounds the inputs of quantised products to 8 bits, where the HTP has 16."""
_PAST = "past_key_values."
_RESIDUAL = ".residual"


class StaticGraph:
    """One graph of the HTP contract and the cache it fills; see `htp.decoder_graph`.

    `lora` holds the factors it is fed, zeros until they are replaced.
    """

    def __init__(self, session: "ort.InferenceSession", *, sliding_window: int | None) -> None:
        """Args: sliding_window is what a sliding layer sees, the current token included."""
        self._session = session
        inputs = {value.name: value for value in session.get_inputs()}
        self.length: int = inputs["position_ids"].shape[1]
        self.context_length: int = inputs["attention_mask"].shape[3] - self.length
        self._window = sliding_window if "sliding_mask" in inputs else None
        self._outputs = [value.name for value in session.get_outputs()]
        self._residual = next((name for name in inputs if name.endswith(_RESIDUAL)), None)
        """What a later part of a model takes in place of token ids."""
        self.lora = {
            name: np.zeros(value.shape, np.float32)
            for name, value in inputs.items()
            if name.startswith("lora.")
        }
        self._cache = {
            name: np.zeros(value.shape, _DTYPES[value.type])
            for name, value in inputs.items()
            if name.startswith(_PAST)
        }

    @classmethod
    def open(
        cls, path: Path, *, sliding_window: int | None, outputs: Sequence[str] = ()
    ) -> "StaticGraph":
        """The graph at `path`, giving the values named in `outputs` as well."""
        import onnx

        model = onnx.load(path, load_external_data=False)
        kind = onnx.TensorProto.FLOAT
        known = {value.name for value in model.graph.output}
        model.graph.output.extend(
            onnx.helper.make_tensor_value_info(name, kind, None)
            for name in outputs
            if name not in known
        )
        return cls(open_beside(model, path), sliding_window=sliding_window)

    def run(self, window: Array) -> Iterator[dict[str, Array]]:
        """Outputs by name of one pass after another over a conversation.

        Args:
            window: ``[n * length]`` token ids; of a later part of a model the rows
                ``[n * length, hidden]`` that the part before it gives.
        """
        for past in self._cache.values():
            middle = 0 if past.dtype == np.float32 else 1 << (past.itemsize * 8 - 1)
            past.fill(middle)
        for start in range(0, len(window), self.length):
            chunk = window[start : start + self.length]
            outputs = self._session.run(self._outputs, self._feeds(chunk, start))
            named = dict(zip(self._outputs, outputs, strict=True))
            for name, past in self._cache.items():
                new = named[name.replace(_PAST, "new.")]
                past[:, :, start : start + self.length] = new
            yield named

    def _feeds(self, chunk: Array, start: int) -> dict[str, Array]:
        positions = np.arange(start, start + self.length)
        first = ("input_ids", np.int32) if self._residual is None else (self._residual, np.float32)
        feeds: dict[str, Array] = {
            first[0]: chunk[None].astype(first[1]),
            "position_ids": positions[None].astype(np.int32),
            "attention_mask": self._mask(positions, None),
            **self._cache,
            **self.lora,
        }
        if self._window is not None:
            feeds["sliding_mask"] = self._mask(positions, self._window)
        return feeds

    def _mask(self, positions: npt.NDArray[np.int64], window: int | None) -> Array:
        """Slot i of the cache holds position i; slots from the chunk's start on are empty."""
        slots = np.arange(self.context_length)
        at = np.concatenate(
            [np.where(slots < positions[0], slots, np.iinfo(np.int64).max), positions]
        )
        distance = positions[:, None] - at[None, :]
        is_seen = (distance >= 0) & (distance < (window or np.iinfo(np.int64).max))
        return np.where(is_seen, np.float32(0), _HIDDEN)[None, None]


def open_beside(model: Any, path: Path) -> "ort.InferenceSession":
    """A session on the CPU provider of a changed copy of the graph at `path`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Planned memory holds every weight that a quantised graph turns into floats at once, and twice
    # over: 2.5 GB instead of 1.3 for a head of 128,256 x 2,048, in twice the time.
    options.enable_mem_pattern = False
    options.add_session_config_entry(_ACCURACY, _EXACT)
    copy = path.with_name(f"{path.stem}.changed.onnx")
    try:
        copy.write_bytes(model.SerializeToString())
        return ort.InferenceSession(copy, options, providers=["CPUExecutionProvider"])
    finally:
        copy.unlink(missing_ok=True)
