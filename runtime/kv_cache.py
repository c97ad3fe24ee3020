"""Keys and values of one conversation, owned by the host: rewinding moves a counter."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from omnidraft_npu.manifest import Cache

from .signature import CacheTensor


class KvCache(Protocol):
    """Binds the past and the present of every run."""

    def before_run(self, length: int, total: int) -> None:
        """Bind a past of the first `length` tokens and a present of `total`."""
        ...

    def after_run(self, total: int) -> None:
        """Take the present of a run that succeeded as the next past."""
        ...


def make_cache(
    kind: Cache, tensors: Sequence[CacheTensor], binding: ort.IOBinding, context_length: int
) -> KvCache:
    """An empty cache of the kind that a graph needs, bound to `binding`."""
    cache = SharedCache if kind == "shared" else ConcatCache
    return cache(tensors, binding, context_length)


class SharedCache:
    """One buffer a tensor, past and present at once: the graph writes new rows in place.

    Rows past the counter are stale; the graph masks them, because the attention mask says
    how many tokens count, and overwrites them.
    """

    def __init__(
        self, tensors: Sequence[CacheTensor], binding: ort.IOBinding, context_length: int
    ) -> None:
        for tensor in tensors:
            # Zeros come from untouched pages: a long context costs memory only once used.
            shape = (1, tensor.num_heads, context_length, tensor.head_dim)
            buffer = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, tensor.dtype))
            binding.bind_ortvalue_input(tensor.past, buffer)
            binding.bind_ortvalue_output(tensor.present, buffer)

    def before_run(self, length: int, total: int) -> None:
        """Nothing to do: the buffers stay bound."""

    def after_run(self, total: int) -> None:
        """Nothing to do: the rows were written in place."""


class ConcatCache:
    """Two buffers a tensor that take turns as past and present, where the present is longer.

    Both are allocated once for the whole context. A tensor of n tokens is packed at the start
    of its buffer, so dropping tokens copies what stays; that waits until the next run.
    """

    def __init__(
        self, tensors: Sequence[CacheTensor], binding: ort.IOBinding, context_length: int
    ) -> None:
        self._binding = binding
        self._tensors = tensors
        self._past = [_flat(tensor, context_length) for tensor in tensors]
        self._present = [_flat(tensor, context_length) for tensor in tensors]
        self._rows = 0

    def before_run(self, length: int, total: int) -> None:
        """Crop the past to `length` tokens and bind it, with room for a present of `total`."""
        if length < self._rows:
            self._crop(length)
        for tensor, past, present in zip(self._tensors, self._past, self._present, strict=True):
            self._binding.bind_ortvalue_input(
                tensor.past, ort.OrtValue.ortvalue_from_numpy(_packed(tensor, past, length))
            )
            self._binding.bind_ortvalue_output(
                tensor.present, ort.OrtValue.ortvalue_from_numpy(_packed(tensor, present, total))
            )

    def after_run(self, total: int) -> None:
        """Let the buffers swap their parts."""
        self._past, self._present = self._present, self._past
        self._rows = total

    def _crop(self, length: int) -> None:
        for tensor, past, present in zip(self._tensors, self._past, self._present, strict=True):
            kept = _packed(tensor, past, self._rows)[:, :, :length]
            np.copyto(_packed(tensor, present, length), kept)
        self.after_run(length)


def _flat(tensor: CacheTensor, context_length: int) -> npt.NDArray[Any]:
    return np.zeros(tensor.num_heads * context_length * tensor.head_dim, tensor.dtype)


def _packed(tensor: CacheTensor, buffer: npt.NDArray[Any], tokens: int) -> npt.NDArray[Any]:
    shape = (1, tensor.num_heads, tokens, tensor.head_dim)
    return buffer[: math.prod(shape)].reshape(shape)
