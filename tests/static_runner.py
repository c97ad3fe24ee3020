"""The least that runs static decoder graphs: a host with a cache, masks and a counter."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

HIDDEN = np.float32(-100)


def cpu_session(path: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class StaticRunner:
    """Graphs by length around one cache; the shortest that fits takes the tokens.

    Slots of the cache that hold nothing are filled with `stale`, to show that they are not
    seen.
    """

    def __init__(
        self,
        paths: Mapping[int, Path],
        *,
        sliding_window: int | None = None,
        open_session: Callable[[Path], Any] = cpu_session,
        stale: float = 3.0,
    ) -> None:
        self.sessions = {length: open_session(path) for length, path in sorted(paths.items())}
        inputs = {value.name: value for value in next(iter(self.sessions.values())).get_inputs()}
        self._cache = {
            name: np.full(value.shape, stale, np.float32)
            for name, value in inputs.items()
            if name.startswith("past_key_values.")
        }
        self._inputs = set(inputs)
        self._capacity = next(iter(self._cache.values())).shape[2]
        self._window = sliding_window
        self.lora: Mapping[str, Floats] = {
            name: np.zeros(value.shape, np.float32)
            for name, value in inputs.items()
            if name.startswith("lora.")
        }
        self.length = 0
        self.outputs: dict[str, Floats] = {}

    def run(self, ids: Sequence[int], **feeds: Floats) -> Floats:
        """Append `ids`; ``[len(ids), num_logits]`` or what the graph gives first."""
        n = len(ids)
        size = min(length for length in self.sessions if length >= n)
        session = self.sessions[size]
        padded = [*ids, *[0] * (size - n)]
        all_feeds = {
            "input_ids": np.array([padded], np.int32),
            "position_ids": self.length + np.arange(size, dtype=np.int32)[None],
            "attention_mask": self._mask(size, None),
            "sliding_mask": self._mask(size, self._window),
            **self._cache,
            **self.lora,
            **feeds,
        }
        names = [value.name for value in session.get_outputs()]
        wanted = {name: value for name, value in all_feeds.items() if name in self._inputs}
        results = dict(zip(names, session.run(names, wanted), strict=True))
        for name, rows in results.items():
            if name.startswith("new."):
                cache = self._cache[name.replace("new.", "past_key_values.")]
                cache[:, :, self.length : self.length + n] = rows[:, :, :n]
        self.length += n
        self.outputs = {
            name: value[0, :n] for name, value in results.items() if not name.startswith("new.")
        }
        return self.outputs[names[0]]

    def run_in_pieces(self, ids: Sequence[int], lengths: Sequence[int]) -> Floats:
        """`run` piece after piece; all their rows."""
        assert sum(lengths) == len(ids)
        starts = np.cumsum([0, *lengths[:-1]])
        pieces = zip(starts, lengths, strict=True)
        return np.concatenate([self.run(ids[start : start + n]) for start, n in pieces])

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens: no more than a counter."""
        self.length = length

    def _mask(self, size: int, window: int | None) -> Floats:
        slots = np.arange(self._capacity)
        positions = np.concatenate([slots, self.length + np.arange(size)])
        is_kept = np.concatenate([slots < self.length, np.ones(size, bool)])
        distance = self.length + np.arange(size)[:, None] - positions
        seen = is_kept & (distance >= 0) & (distance < (window or np.inf))
        return np.where(seen, np.float32(0), HIDDEN)[None, None]
