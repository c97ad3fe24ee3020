"""Which rule makes a graph's passes exact on this machine: found by trying, then remembered."""

import contextlib
import hashlib
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import onnxruntime as ort

from omnidraft_npu.documents import read_document
from omnidraft_npu.errors import OmniDraftError
from omnidraft_npu.files import write_json
from omnidraft_npu.statistics import NEAR_TIES
from omnidraft_npu.store.local import store_folder

from .attention_probe import attention_rule
from .exact_passes import NOT_EXACT, ExactRule

if TYPE_CHECKING:
    from .causal_lm import OnnxModel

logger = logging.getLogger(__name__)

_VERSION = 1
"""Raised when what is tried changes, so that what older versions found is not used."""
_BUDGET_S = 0.06
"""Time for the comparisons of a whole graph, but for the first ones."""
_NUM_TOKENS = 8
_PLACES, _UNKNOWN_PLACES = (0, 58), (0, 58, 250)
"""Tokens before those that are compared."""
_UNKNOWN_ATTENTION = ((1, 1), (2, 1), (2, 4), (2, 8))
"""Fewest rows and the multiple of the keys, tried for a graph whose cache grows."""
_END_BYTES = 2**20

_CPU_FILES = (
    Path("/proc/cpuinfo"),
    Path("/sys/devices/system/cpu/cpu0/cache/index2/size"),
)
_CHANGING = ("cpu MHz", "bogomips", "BogoMIPS", "processor")
"""Lines of theirs that are not the same every time, or on every core."""

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


@dataclass(frozen=True, kw_only=True)
class _Remembered:
    """What a file of the store says."""

    version: int
    min_rows: _Positive
    key_multiple: _Positive
    first_cut: _Positive | None
    cut_every: _Positive
    whole_pass: bool
    holds: bool

    def rule(self) -> ExactRule:
        values = asdict(self)
        del values["version"]
        return ExactRule(**values)


def recall_or_find_rule(model: "OnnxModel", path: Path | None) -> ExactRule:
    """The rule found earlier for this graph, machine and versions, or else found now.

    Args:
        model: The opened graph.
        path: Its file; None remembers nothing.
    """
    if path is None:
        return _find_rule(model)
    file = store_folder() / "exact" / f"{_key(model, path)}.json"
    rule = _recall(file)
    if rule is None:
        rule = _find_rule(model)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"version": _VERSION, **rule.to_json()})
        except OSError as error:
            logger.info("not remembered how passes are made exact: %s", error)
    if not rule.holds:
        logger.warning(
            "%s: on this machine a token's numbers depend on how many are scored with it, so "
            "drafted text is %s",
            path,
            NEAR_TIES,
        )
    return rule


def _recall(file: Path) -> ExactRule | None:
    if not file.is_file():
        return None
    try:
        found = read_document(file, _Remembered, is_closed=True)
    except (OmniDraftError, OSError) as error:
        logger.info("tried again: %s", error)
        return None
    return found.rule() if found.version == _VERSION else None


def _key(model: "OnnxModel", path: Path) -> str:
    """A name for the graph, the machine and the versions of what runs it."""
    options = model.session.get_session_options()
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = [file.read(_END_BYTES)]
        file.seek(max(0, size - _END_BYTES))
        parts.append(file.read())
    facts = [_VERSION, *_machine(), options.intra_op_num_threads, size]
    digest = hashlib.sha256(repr(facts).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:24]


def _machine() -> list[Any]:
    """What may decide which kernels run, and with which sizes."""
    facts = [ort.__version__, platform.node(), platform.machine(), os.cpu_count()]
    if sys.platform != "linux":
        return [*facts, platform.processor()]
    for file in _CPU_FILES:
        with contextlib.suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            facts += sorted({line for line in lines if not line.startswith(_CHANGING)})
    return facts


def _find_rule(model: "OnnxModel") -> ExactRule:
    return next((rule for rule in _candidates(model) if _agrees(model, rule)), NOT_EXACT)


def _candidates(model: "OnnxModel") -> Iterator[ExactRule]:
    """Rules by what they cost, the cheapest first."""
    signature = model.signature
    heads = {(tensor.head_dim, tensor.dtype) for tensor in signature.cache_tensors}
    found = attention_rule(*next(iter(heads))) if len(heads) == 1 else None
    if signature.cache == "shared" and found is not None:
        if signature.has_attention_rows:
            yield found
        yield replace(found, whole_pass=True)
        for min_rows, key_multiple in _UNKNOWN_ATTENTION:
            if (min_rows, key_multiple) > (found.min_rows, found.key_multiple):
                yield replace(found, whole_pass=True, min_rows=min_rows, key_multiple=key_multiple)
        return
    none, *others = (
        ExactRule(min_rows=min_rows, key_multiple=key_multiple, whole_pass=True)
        for min_rows, key_multiple in _UNKNOWN_ATTENTION
    )
    yield none
    if found is not None:
        yield replace(found, whole_pass=True)
    yield from others


def _agrees(model: "OnnxModel", rule: ExactRule) -> bool:
    """Whether tokens have the same logits alone, among others and after prefill.

    A large model has time for a token alone and for two only, unless its attention may be other
    operators than the one that `attention_rule` looked at.
    """
    from .causal_lm import OnnxCausalLM

    started = time.perf_counter()
    lm = OnnxCausalLM(model, rule=rule)
    rng = np.random.default_rng(0)
    # An adapter of zeros would hide how its products are summed.
    shapes = model.lora_inputs.items()
    lm.set_lora({name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes})
    is_known = model.signature.cache == "shared"
    budget_s = _BUDGET_S if is_known else float("inf")
    for place in _PLACES if is_known else _UNKNOWN_PLACES:
        num_tokens = min(_NUM_TOKENS, model.context_length - place)
        if num_tokens < 2:
            break
        ids = rng.integers(model.vocab_size, size=place + num_tokens).tolist()
        lm.rewind(0)
        lm.prefill(ids[:place])
        wanted = lm.score(ids[place:]).copy()
        lm.rewind(place)
        row = 0
        while row < num_tokens:
            end = row + (1, 2, 5)[min(row, 2)]
            if lm.score(ids[place + row : place + end]).tobytes() != wanted[row:end].tobytes():
                return False
            row = end
            if row >= 3 and time.perf_counter() - started > budget_s:
                return True
        lm.rewind(0)
        lm.prefill(ids[:-1])
        if lm.score(ids[-1:]).tobytes() != wanted[-1:].tobytes():
            return False
        if time.perf_counter() - started > budget_s:
            break
    return True
