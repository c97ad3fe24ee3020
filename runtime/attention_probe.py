"""How this machine's attention depends on a row's neighbours, found with the operator alone.

One operator with one head takes some 20 microseconds, so a few hundred passes fit where a whole
model would have time for ten.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from .exact_passes import ExactRule, Pass

_CANDIDATES = ((1, 1), (2, 1), (2, 2), (2, 4), (2, 8))
"""Fewest rows and the multiple of the keys, the cheapest first."""
_LENGTHS = (8, 1, 2, 3, 5)
_CHANNELS = 16
"""Heads of other sizes than multiples of this are none of GroupQueryAttention's."""
_ELEMENTS = {np.dtype(np.float32): 1, np.dtype(np.float16): 10}
"""ONNX's numbers of the types that a cache may have."""
_INT32 = 6
_NARROW = 128
"""Channels up to which no cut was ever seen; wider heads are searched over more keys."""
_KEYS_NARROW, _KEYS_WIDE = 160, 400
_NEAR, _STRETCH = 80, 20
_FAR = (120, 248, 504, 1016, 2040)
"""Where short stretches are looked at besides the first keys."""
_PREFILL = 145
"""Tokens of a long pass: a tile of 16, 24, 48, 72 or 144 rows would leave one row alone."""
_CONSERVATIVE_CUTS = 64
"""Keys between cuts where only one was found: the next one lies further, at a multiple."""


@cache
def attention_rule(head_dim: int, dtype: np.dtype[Any]) -> ExactRule | None:
    """The cheapest rule that makes attention exact here; None if none of ours does.

    None too where the operator takes no such heads: then the graph has another one.

    Args:
        head_dim: Channels of a head in the cache.
        dtype: Of the cache.
    """
    if head_dim % _CHANNELS or dtype not in _ELEMENTS:
        return None
    return _find(_Probe(head_dim, dtype), head_dim)


def _find(probe: "_Probe", head_dim: int) -> ExactRule | None:
    keys = _KEYS_NARROW if head_dim <= _NARROW else _KEYS_WIDE
    for min_rows, key_multiple in _CANDIDATES:
        rule = ExactRule(min_rows=min_rows, key_multiple=key_multiple)
        if not probe.agrees(rule, range(8, 20), _LENGTHS):
            continue
        cuts = list(probe.cuts(rule, keys))
        if cuts:
            every = cuts[1] - cuts[0] if len(cuts) > 1 else _CONSERVATIVE_CUTS
            rule = replace(rule, first_cut=cuts[0], cut_every=every)
        places = (*_FAR, *(max(0, cut - _STRETCH // 2) for cut in cuts[:3]))
        stretches = [range(_NEAR), *(range(place, place + _STRETCH) for place in places)]
        if all(probe.agrees(rule, stretch, _LENGTHS) for stretch in stretches) and probe.agrees(
            rule, range(_PREFILL), (8, _PREFILL)
        ):
            return rule
    return None


class _Probe:
    """Rows of attention over random queries, keys and values of fixed places."""

    def __init__(self, head_dim: int, dtype: np.dtype[Any]) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(
            _attention_graph(dtype), options, providers=["CPUExecutionProvider"]
        )
        self._size = max(_FAR) + 2 * _STRETCH
        rng = np.random.default_rng(0)
        values = rng.standard_normal((self._size, 3, head_dim), np.float32).astype(dtype)
        self._packed = values.reshape(self._size, -1)
        self._keys_and_values = values[:, 1:].swapaxes(0, 1)
        self._caches = self._keys_and_values.copy()
        self._last, self._total = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._binding = self._session.io_binding()
        self._bind("last_position", self._last)
        self._bind("total_length", self._total)
        for name, rows in zip(("key", "value"), self._caches, strict=True):
            value = self._bind(f"past_{name}", rows[None, None])
            self._binding.bind_ortvalue_output(f"present_{name}", value)

    def agrees(self, rule: ExactRule, places: range, lengths: Sequence[int]) -> bool:
        """Whether every row of a stretch has the same bits in passes of so many tokens."""
        wanted = self._rows(rule, places, lengths[0]).tobytes()
        return all(self._rows(rule, places, n).tobytes() == wanted for n in lengths[1:])

    def cuts(self, rule: ExactRule, keys: int) -> Iterator[int]:
        """Numbers of keys across which a row's bits differ although the rule is kept."""
        step = 8
        before = self.attend(0, Pass(2 * step, 2 * step))
        for start in range(step, keys, step):
            rows = self.attend(start, Pass(2 * step, start + 2 * step))
            if not np.array_equal(before[step:], rows[:step]):
                yield self._cut(rule, start, before[step:])
            before = rows

    def _cut(self, rule: ExactRule, start: int, wanted: npt.NDArray[Any]) -> int:
        """The last total of a pass from `start` on that gives the rows `wanted`."""
        total = start + len(wanted)
        for longer in range(total, start + 2 * len(wanted), rule.key_multiple):
            rows = self.attend(start, Pass(len(wanted), longer))
            if not np.array_equal(rows, wanted):
                break
            total = longer
        return total

    def _rows(self, rule: ExactRule, places: range, length: int) -> npt.NDArray[Any]:
        rows, start = [], places.start
        while start < places.stop:
            one = rule.next_pass(start, min(length, places.stop - start), self._size)
            rows.append(self.attend(start, one))
            start += one.num_tokens
        return np.concatenate(rows)

    def attend(self, start: int, one: Pass) -> npt.NDArray[Any]:
        """``[num_tokens, head_dim]`` of a pass."""
        end, total = start + one.num_tokens, one.total
        taken = np.minimum(np.arange(start, total), end - 1)
        self._bind("packed", self._packed[taken][None])
        self._last[0], self._total[()] = total - 1, total
        self._binding.bind_output("output")
        self._session.run_with_iobinding(self._binding)
        rows: npt.NDArray[Any] = self._binding.get_outputs()[-1].numpy()[0, : one.num_tokens]
        # What added rows left behind must not be another pass's past.
        self._caches[:, end:total] = self._keys_and_values[:, end:total]
        return rows

    def _bind(self, name: str, values: npt.NDArray[Any]) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_numpy(values)
        self._binding.bind_ortvalue_input(name, value)
        return value


def _attention_graph(dtype: np.dtype[Any]) -> bytes:
    """An ONNX model of one GroupQueryAttention, for heads of any size.

    Written by hand, since to import onnx takes longer than the whole test.

    Source:
        onnx.proto3 of ONNX 1.23 (field numbers).
    """
    element = _ELEMENTS[dtype]
    rows, past = ("batch", "length", "width"), ("batch", "heads", "slots", "channels")
    inputs = [
        _value("packed", element, rows),
        *(_value(name, element, past) for name in ("past_key", "past_value")),
        _value("last_position", _INT32, ("batch",)),
        _value("total_length", _INT32, ()),
    ]
    outputs = [
        _value("output", element, rows),
        *(_value(name, element, past) for name in ("present_key", "present_value")),
    ]
    one = _field(3, 1) + _field(20, 2)
    node = b"".join(
        (
            *(_field(1, name) for name in _INPUTS),
            *(_field(2, name) for name in _OUTPUTS),
            _field(4, "GroupQueryAttention"),
            *(_field(5, _field(1, name) + one) for name in ("num_heads", "kv_num_heads")),
            _field(7, "com.microsoft"),
        )
    )
    graph = b"".join(
        (
            _field(1, node),
            _field(2, "attention"),
            *(_field(11, value) for value in inputs),
            *(_field(12, value) for value in outputs),
        )
    )
    opsets = (_field(1, domain) + _field(2, n) for domain, n in (("", 21), ("com.microsoft", 1)))
    return _field(1, 10) + b"".join(_field(8, opset) for opset in opsets) + _field(7, graph)


_INPUTS = ("packed", "", "", "past_key", "past_value", "last_position", "total_length")
_OUTPUTS = ("output", "present_key", "present_value")


def _value(name: str, element: int, shape: Sequence[str]) -> bytes:
    dimensions = b"".join(_field(1, _field(2, dimension)) for dimension in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, element) + _field(2, dimensions)))


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])
