"""One forward pass of a static graph: its buffers, bound once and changed in place."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from .providers import run_bound
from .static_masks import MaskRows
from .static_signature import StaticSignature


class StaticPass:
    """Runs the graph of one length for one conversation.

    Logits are bound only when they are wanted: for a prefill of many tokens they would take
    more memory than all else.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: StaticSignature,
        length: int,
        *,
        shared: Mapping[str, npt.NDArray[Any]],
        window: int | None,
    ) -> None:
        """Allocate the buffers of a pass.

        Args:
            session: The graph.
            signature: Of the graph.
            length: Tokens of a pass.
            shared: Inputs of the whole conversation: cache and adapter.
            window: Tokens that a sliding layer sees, where there are any.
        """
        self.length = length
        self._session = session
        self._signature = signature
        context_length = signature.context_length
        self._last = context_length - 1
        self._token_ids = np.zeros((1, length), np.int32)
        self._positions = np.zeros((1, length), np.int32)
        self._steps = np.arange(length, dtype=np.int32)
        self._masks = {"attention_mask": MaskRows(length, context_length)}
        if signature.has_sliding_mask:
            self._masks["sliding_mask"] = MaskRows(length, context_length, window)
        self._inputs = {
            "input_ids": self._token_ids,
            "position_ids": self._positions,
            **{name: mask.values for name, mask in self._masks.items()},
            **shared,
        }
        self.new_rows = {
            tensor.past: np.zeros((1, tensor.num_heads, length, tensor.head_dim), tensor.dtype)
            for tensor in signature.cache_tensors
        }
        """``[1, heads, length, dim]`` cache rows of the last pass, by the input they belong to."""
        self._wanted: dict[str, npt.NDArray[np.float32]] = {}
        self._bindings: dict[bool, ort.IOBinding] = {}

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """``[length, num_logits]`` of the last pass that wanted them."""
        rows: npt.NDArray[np.float32] = self._wanted["logits"][0]
        return rows

    @property
    def hidden_states(self) -> npt.NDArray[np.float32]:
        """``[length, hidden]`` of the last pass that wanted logits."""
        rows: npt.NDArray[np.float32] = self._wanted["hidden_states"][0]
        return rows

    def run(self, token_ids: Sequence[int], start: int, *, has_logits: bool) -> None:
        """Run tokens that follow the first `start` of the cache; at most `length` of them."""
        self._token_ids[0, : len(token_ids)] = token_ids
        self._token_ids[0, len(token_ids) :] = 0
        np.minimum(self._steps + start, self._last, out=self._positions[0])
        for mask in self._masks.values():
            mask.move(start)
        if has_logits not in self._bindings:
            self._bindings[has_logits] = self._bind(has_logits)
        run_bound(self._session, self._bindings[has_logits])

    def _bind(self, has_logits: bool) -> ort.IOBinding:
        signature = self._signature
        if has_logits and not self._wanted:
            self._wanted["logits"] = np.zeros((1, self.length, signature.num_logits), np.float32)
            if signature.hidden_size is not None:
                shape = (1, self.length, signature.hidden_size)
                self._wanted["hidden_states"] = np.zeros(shape, np.float32)
        binding = self._session.io_binding()
        for name, values in self._inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values))
        outputs = {t.new: self.new_rows[t.past] for t in signature.cache_tensors}
        if has_logits:
            outputs |= self._wanted
        for name, values in outputs.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(values))
        return binding
