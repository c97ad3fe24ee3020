"""A model in parts, each a graph of its own, seen as one session.

A model that fits no single context of an NPU is split by layers. What one part gives beside
its rows for the cache is the next one's input; everything else belongs to the whole.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from omnidraft_npu.errors import BundleError


class PartsSession:
    """As much of onnxruntime's session as a static pass needs, over parts that run in turn."""

    def __init__(self, parts: Sequence[ort.InferenceSession], where: str) -> None:
        """Join the parts.

        Args:
            parts: Sessions of one length, in order of their layers.
            where: What the parts are, for messages.

        Raises:
            BundleError: a part does not take what the one before it gives.
        """
        self._parts = list(parts)
        self._given = [{o.name: o for o in part.get_outputs()} for part in self._parts]
        self._taken = [{i.name: i for i in part.get_inputs()} for part in self._parts]
        self._links = [
            self._given[i].keys() & self._taken[i + 1].keys() for i in range(len(parts) - 1)
        ]
        for i, names in enumerate(self._links):
            if len(names) != 1:
                raise BundleError(
                    f"{where}: part {i + 1} does not take what part {i} gives: "
                    "export the model again"
                )
        self._inner: frozenset[str] = frozenset().union(*self._links)

    def get_inputs(self) -> list[Any]:
        """The inputs of the whole, each once."""
        return list(self._whole(self._taken).values())

    def get_outputs(self) -> list[Any]:
        """The outputs of the whole."""
        return list(self._whole(self._given).values())

    def io_binding(self) -> "PartsBinding":
        """A binding for `run_with_iobinding`."""
        return PartsBinding(self._parts, self._taken, self._given, self._links)

    def run_with_iobinding(self, binding: "PartsBinding") -> None:
        """Run the parts in turn."""
        for part, one in zip(self._parts, binding.bindings, strict=True):
            part.run_with_iobinding(one)

    def get_provider_graph_assignment_info(self) -> list[Any]:
        """Where the nodes of all parts went."""
        return [one for part in self._parts for one in part.get_provider_graph_assignment_info()]

    def _whole(self, names: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            name: value for part in names for name, value in part.items() if name not in self._inner
        }


class PartsBinding:
    """One binding for each part, and the buffers between them."""

    def __init__(
        self,
        parts: Sequence[ort.InferenceSession],
        taken: Sequence[dict[str, Any]],
        given: Sequence[dict[str, Any]],
        links: Sequence[set[str]],
    ) -> None:
        """Bind what one part gives to the next one's input; the rest is the caller's."""
        self.bindings = [part.io_binding() for part in parts]
        self._taken, self._given = taken, given
        for i, (name,) in enumerate(map(tuple, links)):
            rows = np.zeros(given[i][name].shape, np.float32)
            value = ort.OrtValue.ortvalue_from_numpy(rows)
            self.bindings[i].bind_ortvalue_output(name, value)
            self.bindings[i + 1].bind_ortvalue_input(name, value)

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        """Bind an input of the whole, in every part that takes it."""
        for binding, names in zip(self.bindings, self._taken, strict=True):
            if name in names:
                binding.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: ort.OrtValue) -> None:
        """Bind an output of the whole, in the part that gives it."""
        for binding, names in zip(self.bindings, self._given, strict=True):
            if name in names:
                binding.bind_ortvalue_output(name, value)
