"""A decoder graph as a causal language model with a cache that the host can rewind."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from omnidraft_npu.decoder_inputs import ATTENTION_ROWS, LOGITS_FROM
from omnidraft_npu.errors import BundleError
from omnidraft_npu.manifest import Cache
from omnidraft_npu.qnn.provider import placement

from .cached_tokens import CachedTokens
from .exact_passes import NOT_EXACT, ExactRule, Pass
from .kv_cache import make_cache
from .lora_inputs import fit_lora
from .output_rows import OutputRows
from .providers import open_cpu_session, provider_of, run_bound
from .signature import GraphSignature, read_signature

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
        path: Path | None = None,
    ) -> None:
        """Take an opened graph.

        Args:
            session: The graph.
            signature: Its inputs and outputs.
            context_length: Most tokens a conversation may hold.
            vocab_size: Real token ids; logits rows past it are padding and never shown.
            more_room: What gives a longer context, for messages.
            path: Its file, by which what was found out about it is remembered.

        Raises:
            BundleError: the graph gives fewer logits than there are ids.
        """
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
        self._path = path

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
            path=path,
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

    @cached_property
    def exact_rule(self) -> ExactRule:
        """How its passes are made exact on this machine; found when first asked for."""
        from .exact_search import recall_or_find_rule

        return recall_or_find_rule(self, self._path)

    @property
    def has_near_ties(self) -> bool:
        """Whether no rule makes its passes exact."""
        return not self.exact_rule.holds

    def begin(self, *, is_exact: bool = True) -> "OnnxCausalLM":
        """A new conversation; see `OnnxCausalLM`."""
        return OnnxCausalLM(self, is_exact=is_exact)


class OnnxCausalLM(CachedTokens):
    """One conversation with a model: its cache, its buffers, its adapter.

    Every buffer is allocated once (the logits when a run first needs more rows) and bound
    by reference; a run makes views only. Not for two threads at once.
    """

    def __init__(
        self, model: OnnxModel, *, is_exact: bool = True, rule: ExactRule | None = None
    ) -> None:
        """Begin a conversation.

        Args:
            model: The graph.
            is_exact: Whether a token's logits must have the same bits alone and among others:
                a target's must, a drafter's need not, and are cheaper so.
            rule: How its passes are made exact; None for what was found on this machine.
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
        self._attention_rows = np.ones(1, np.int64)
        if signature.has_attention_rows:
            self._bind_input(ATTENTION_ROWS, self._attention_rows)
        self._rule = NOT_EXACT if not is_exact else rule or model.exact_rule
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
        has_all_logits = not self.model.signature.has_logits_from
        done = 0
        while done < len(token_ids):
            one = self._next_pass(min(self._chunk, len(token_ids) - done))
            num_rows = one.num_tokens if has_all_logits else 0
            self._reserve(num_rows, one.num_tokens)
            self._run(token_ids[done : done + one.num_tokens], one, num_rows)
            done += one.num_tokens

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
        self._reserve(n, n)
        row = 0
        while row < n:
            one = self._next_pass(n - row)
            self._run(token_ids[row : row + one.num_tokens], one, one.num_tokens, row)
            row += one.num_tokens
        self._num_hidden = n
        if self._scores is not self._logits:
            np.copyto(self._scores.view(n), self._logits.view(n))
        return self._scores.view(n)[:, : self.vocab_size]

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for so many rows of logits and the hidden states of so many tokens."""
        added = self._rule.max_added_rows
        self._logits.reserve(num_rows + added)
        self._scores.reserve(num_rows + added)
        if self._hidden:
            self._hidden.reserve(num_tokens + added)

    def _next_pass(self, num_tokens: int) -> Pass:
        return self._rule.next_pass(self._length, num_tokens, self.context_length)

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

    def _run(self, token_ids: Sequence[int], one: Pass, num_rows: int, row: int = 0) -> None:
        """Append tokens; logits of the last `num_rows` land in the buffer from `row` on."""
        signature = self.model.signature
        start, end = self._length - one.num_repeated, self._length + len(token_ids)
        ids = self._plain["input_ids"]
        ids[self._length : end] = token_ids
        total = one.total
        last = end
        if self._rule.whole_pass:
            ids[end:total] = ids[end - 1]
            last = total
        for name, values in self._plain.items():
            window = values[:total] if name == "attention_mask" else values[start:last]
            self._bind_input(name, window if name == "cache_position" else window[None])
        self._attention_rows[0] = total - start
        first_row = 0
        if signature.has_logits_from:
            first_row = (end - num_rows if num_rows else last) - start
        self._logits_from[0] = first_row
        self._logits.bind(self._binding, row, last - start - first_row)
        if self._hidden:
            self._hidden.bind(self._binding, row, last - start)
        self._cache.before_run(start, total)
        run_bound(self.model.session, self._binding)
        self._cache.after_run(total)
        self._length = end
        if one.num_repeated:
            self._drop_repeated(one.num_repeated, num_rows, len(token_ids), row)

    def _drop_repeated(self, repeated: int, num_rows: int, num_tokens: int, row: int) -> None:
        """Move what a pass gave for its own tokens to where it would be without the others."""
        if not self.model.signature.has_logits_from:
            self._logits.drop(row, repeated, num_rows)
        if self._hidden:
            self._hidden.drop(row, repeated, num_tokens)

    def _bind_input(self, name: str, values: npt.NDArray[Any]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values))
