"""The least that runs a decoder graph: no more than its signature."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt


class GraphRunner:
    """A graph with its cache, as one shared buffer a tensor or as past and present apart."""

    def __init__(self, path: Path, *, capacity: int, is_shared: bool = True) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._is_shared = is_shared
        self._cache = {
            value.name: np.zeros(
                (1, value.shape[1], capacity if is_shared else 0, value.shape[3]), np.float32
            )
            for value in self._session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        self._outputs = [value.name for value in self._session.get_outputs()]
        self.lora: Mapping[str, npt.NDArray[np.float32]] = {
            value.name: np.zeros(value.shape, np.float32)
            for value in self._session.get_inputs()
            if value.name.startswith("lora.")
        }
        self.length = 0
        self.hidden_states: npt.NDArray[np.float32] | None = None

    def run(self, ids: Sequence[int], logits_from: int | None = None) -> npt.NDArray[np.float32]:
        """Append `ids`; ``[n, num_logits]``, from position `logits_from` of them if given."""
        import onnxruntime as ort

        self.length += len(ids)
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, self.length), np.int64),
            **self.lora,
        }
        if logits_from is not None:
            feeds["logits_from"] = np.array([logits_from], np.int64)
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value))
        caches = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in self._cache.items()}
        for name, cache in caches.items():
            binding.bind_ortvalue_input(name, cache)
        for name in self._outputs:
            if self._is_shared and name.startswith("present."):
                past = name.replace("present.", "past_key_values.")
                binding.bind_ortvalue_output(name, caches[past])
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        outputs = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        if not self._is_shared:
            for name in self._cache:
                present = outputs[name.replace("past_key_values.", "present.")]
                self._cache[name] = present.numpy()
        if "hidden_states" in outputs:
            self.hidden_states = outputs["hidden_states"].numpy()[0]
        return outputs["logits"].numpy()[0]

    def run_in_pieces(self, ids: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
        """`run` piece after piece; all their rows."""
        assert sum(lengths) == len(ids)
        starts = np.cumsum([0, *lengths[:-1]])
        pieces = zip(starts, lengths, strict=True)
        return np.concatenate([self.run(ids[start : start + n]) for start, n in pieces])

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens; a shared buffer keeps its stale rows too."""
        if not self._is_shared:
            self._cache = {
                n: np.ascontiguousarray(v[:, :, :length]) for n, v in self._cache.items()
            }
        self.length = length
