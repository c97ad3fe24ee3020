"""A decoder graph as a causal language model with a cache that the host can rewind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from omnidraft_npu.errors import BundleError
from omnidraft_npu.manifest import Cache
from omnidraft_npu.qnn.provider import placement

from .cached_tokens import CachedTokens
from .kv_cache import make_cache
from .lora_inputs import fit_lora
from .output_rows import OutputRows
from .providers import open_cpu_session, provider_of, run_bound
from .signature import LOGITS_FROM, GraphSignature, read_signature
from .stable_passes import stable_passes

PREFILL_CHUNK = 512
"""Most tokens of one prefill run; bounds the graph's intermediate tensors."""

_MAX_PREFILL_LOGITS_BYTES = 64 * 2**20
"""Bounds the logits that a graph without `logits_from` gives for a prefill run."""


MORE_ROOM = "export with a larger --context-length"
NO_MORE_ROOM = "use a model made for a longer context"


class OnnxModel:
    """A decoder graph, opened once; it holds no conversation, so any number may share it."""

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: GraphSignature,
        *,
        context_length: int,
        vocab_size: int,
        more_room: str = MORE_ROOM,
    ) -> None:
        if vocab_size > signature.num_logits:
            raise BundleError(
                f"the tokenizer has {vocab_size} ids but the graph gives {signature.num_logits} "
                "logits: export the model again with the tokenizer that belongs to it"
            )
        self.session = session
        self.signature = signature
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.more_room = more_room

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        context_length: int,
        vocab_size: int,
        num_logits: int,
        cache: Cache | None = None,
        threads: int | None = None,
        takes_turns: bool = True,
        more_room: str = MORE_ROOM,
    ) -> "OnnxModel":
        """Open a graph on the CPU provider.

        Args:
            path: The graph.
            context_length: Most tokens a conversation may hold.
            vocab_size: Real token ids; logits rows past it are padding and never shown.
            num_logits: Rows of the logits.
            cache: see `read_signature`.
            threads: see `open_cpu_session`.
            takes_turns: see `open_cpu_session`.
            more_room: What gives a longer context, for messages.

        Raises:
            BundleError: the graph cannot be opened or does not match.
            ConfigError: `threads` is below 1.
        """
        session = open_cpu_session(path, threads=threads, takes_turns=takes_turns)
        signature = read_signature(
            session,
            path,
            context_length=context_length,
            num_logits=num_logits,
            cache=cache,
        )
        return cls(
            session,
            signature,
            context_length=context_length,
            vocab_size=vocab_size,
            more_room=more_room,
        )

    @property
    def pass_length(self) -> None:
        """One pass scores any number of tokens."""
        return None

    @property
    def provider(self) -> str:
        """The execution provider that runs the graph."""
        return provider_of(self.session)

    @property
    def placement(self) -> dict[str, dict[str, int]]:
        """Nodes of the graph by the provider that runs them."""
        return {"cpu": placement(self.session)}

    @property
    def lora_inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the inputs that take an adapter."""
        return self.signature.lora_inputs

    def begin(self, *, is_exact: bool = True) -> "OnnxCausalLM":
        """A new conversation; see `OnnxCausalLM`."""
        return OnnxCausalLM(self, is_exact=is_exact)


class OnnxCausalLM(CachedTokens):
    """One conversation with a model: its cache, its buffers, its adapter.

    Every buffer is allocated once (the logits when a run first needs more rows) and bound
    by reference; a run makes views only. Not for two threads at once.
    """

    def __init__(self, model: OnnxModel, *, is_exact: bool = True) -> None:
        """Begin a conversation.

        Args:
            model: The graph.
            is_exact: Whether a token's logits must have the same bits alone and among others
                (`stable_passes`): a target's must, a drafter's need not, and are cheaper so.
        """
        super().__init__(model)
        self.model = model
        signature, context_length = model.signature, model.context_length
        self._binding = model.session.io_binding()
        self._cache = make_cache(
            signature.cache, signature.cache_tensors, self._binding, context_length
        )
        fill = {"attention_mask": np.ones, "input_ids": np.zeros}
        self._plain = {
            name: fill.get(name, np.arange)(context_length, dtype=dtype)
            for name, dtype in signature.plain_inputs.items()
        }
        self._logits = OutputRows("logits", signature.num_logits, signature.logits_dtype)
        self._scores = (
            self._logits
            if signature.logits_dtype == np.float32
            else OutputRows("logits", signature.num_logits, np.dtype(np.float32))
        )
        self._hidden = (
            OutputRows("hidden_states", signature.hidden_size, np.dtype(np.float32))
            if signature.hidden_size is not None
            else None
        )
        self._num_hidden = 0
        self._logits_from = np.zeros(1, np.int64)
        if signature.has_logits_from:
            self._bind_input(LOGITS_FROM, self._logits_from)
        self._is_exact = is_exact and signature.cache == "shared"
        self.set_lora(None)
        self._chunk = PREFILL_CHUNK
        if not signature.has_logits_from:
            row_bytes = signature.num_logits * signature.logits_dtype.itemsize
            self._chunk = max(16, min(PREFILL_CHUNK, _MAX_PREFILL_LOGITS_BYTES // row_bytes))

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """``[length]`` ids of the tokens in the cache; a view that later calls overwrite."""
        return self._plain["input_ids"][: self._length]

    @property
    def hidden_states(self) -> npt.NDArray[np.float32] | None:
        """``[n, hidden]`` of the last `score`'s n tokens, a view; None if the graph has none."""
        return self._hidden.view(self._num_hidden) if self._hidden else None

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the cache, a chunk at a time, without logits where the graph can.

        Raises:
            PromptError: the context has no room for them; nothing was appended.
        """
        self._check_room(len(token_ids))
        self._num_hidden = 0
        for start in range(0, len(token_ids), self._chunk):
            chunk = token_ids[start : start + self._chunk]
            num_rows = 0 if self.model.signature.has_logits_from else len(chunk)
            self._reserve(num_rows, len(chunk))
            self._run(chunk, num_rows)

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append tokens and give ``[len(token_ids), vocab_size]`` logits after each.

        The array is a view that the next call overwrites.

        Raises:
            PromptError: the context has no room for them; nothing was appended.
            ValueError: there are none.
        """
        n = len(token_ids)
        if n == 0:
            raise ValueError("nothing to score")
        self._check_room(n)
        self._reserve(n + 1, n + 1)
        row = 0
        for length in self._passes(n):
            self._score_pass(token_ids[row : row + length], row)
            row += length
        self._num_hidden = n
        if self._scores is not self._logits:
            np.copyto(self._scores.view(n), self._logits.view(n))
        return self._scores.view(n)[:, : self.vocab_size]

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for so many rows of logits and the hidden states of so many tokens."""
        self._logits.reserve(num_rows)
        self._scores.reserve(num_rows)
        if self._hidden:
            self._hidden.reserve(num_tokens)

    def _passes(self, num_tokens: int) -> list[int]:
        """Lengths of the forward passes to score so many tokens in."""
        if not self._is_exact:
            return [num_tokens]
        head_dim = self.model.signature.cache_tensors[0].head_dim
        return stable_passes(self._length, num_tokens, head_dim)

    def _score_pass(self, token_ids: Sequence[int], row: int) -> None:
        """One forward pass with logits from `row` of the buffer on."""
        n = len(token_ids)
        if n == 1 and self._is_exact and self._length + 2 <= self.context_length:
            self._run([token_ids[0], token_ids[0]], 2, row)
            self._length -= 1
        else:
            self._run(token_ids, n, row)

    def reset(self) -> None:
        """Forget the conversation, not the adapter: as in a process just started."""
        self.rewind(0)
        self._num_hidden = 0

    def set_lora(self, tensors: Mapping[str, npt.NDArray[np.float32]] | None) -> None:
        """Feed an adapter from the next run on; tokens already cached keep the old one's values.

        Args:
            tensors: Factors by graph input (`omnidraft_npu.lora.lora_name`); the ones left out,
                or all with None, are zero.

        Raises:
            BundleError: a tensor is not an input of the graph, or has another shape.
        """
        for name, tensor in fit_lora(self.model.signature.lora_inputs, tensors).items():
            self._bind_input(name, tensor)

    def _run(self, token_ids: Sequence[int], num_rows: int, row: int = 0) -> None:
        """Append tokens; logits of the last `num_rows` land in the buffer from `row` on."""
        start, n = self._length, len(token_ids)
        total = start + n
        self._plain["input_ids"][start:total] = token_ids
        for name, values in self._plain.items():
            window = values[:total] if name == "attention_mask" else values[start:total]
            self._bind_input(name, window if name == "cache_position" else window[None])
        self._logits_from[0] = n - num_rows
        self._logits.bind(self._binding, row, num_rows)
        if self._hidden:
            self._hidden.bind(self._binding, row, n)
        self._cache.before_run(start, total)
        run_bound(self.model.session, self._binding)
        self._cache.after_run(total)
        self._length = total

    def _bind_input(self, name: str, values: npt.NDArray[Any]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values))
