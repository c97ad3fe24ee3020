"""Static graphs as a causal language model: the host owns the cache, rewinding is a counter."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from omnidraft_npu.errors import BundleError
from omnidraft_npu.qnn.provider import placement

from .cached_tokens import CachedTokens
from .lora_inputs import Tensors, fit_lora
from .parts_session import PartsSession
from .static_pass import StaticPass
from .static_signature import StaticCacheTensor, read_static_signature


class StaticModel:
    """Graphs of several lengths with the same weights, opened once, shared by conversations."""

    more_room: ClassVar[str] = (
        "export with a larger --htp-context-length, or use --target-device cpu"
    )

    def __init__(
        self,
        sessions: Mapping[int, ort.InferenceSession],
        *,
        provider: str,
        where: str,
        vocab_size: int,
        sliding_window: int | None = None,
    ) -> None:
        """Take opened graphs, after checking that they belong together.

        Args:
            sessions: Graphs by length.
            provider: What runs them, for statistics.
            where: The folder of the graphs, for messages.
            vocab_size: Real token ids; logits past it are padding and never shown.
            sliding_window: Tokens that a sliding layer sees, itself included.

        Raises:
            BundleError: the graphs do not match one another or the tokenizer.
        """
        self.sessions = dict(sorted(sessions.items()))
        self.provider = provider
        self.vocab_size = vocab_size
        self.sliding_window = sliding_window
        self.signature = read_static_signature(self.sessions, where)
        if vocab_size > self.signature.num_logits:
            raise BundleError(
                f"the tokenizer has {vocab_size} ids but {where} gives "
                f"{self.signature.num_logits} logits: export the model again"
            )
        if self.signature.has_sliding_mask and sliding_window is None:
            raise BundleError(f"{where} has sliding layers of unknown window: export it again")

    @classmethod
    def open(
        cls,
        paths: Mapping[int, Path] | Sequence[Mapping[int, Path]],
        open_session: Callable[[Path], ort.InferenceSession],
        *,
        provider: str,
        vocab_size: int,
        sliding_window: int | None = None,
    ) -> "StaticModel":
        """Open the graphs of every length with `open_session`; see the constructor.

        Of a model in parts, `paths` has those of each part.
        """
        pieces = [paths] if isinstance(paths, Mapping) else paths
        where = str(next(iter(pieces[0].values())).parent)
        opened = [{n: open_session(path) for n, path in piece.items()} for piece in pieces]
        return cls(
            {
                length: session
                if len(opened) == 1
                else PartsSession([part[length] for part in opened], where)
                for length, session in opened[0].items()
            },
            provider=provider,
            where=where,
            vocab_size=vocab_size,
            sliding_window=sliding_window,
        )

    @property
    def placement(self) -> dict[str, dict[str, int]]:
        """Nodes by the provider that runs them, for the graph of each length."""
        return {f"htp {n}": placement(session) for n, session in self.sessions.items()}

    @property
    def context_length(self) -> int:
        """Most tokens a conversation may hold."""
        return self.signature.context_length

    @property
    def has_near_ties(self) -> bool:
        """Not tested: every token is scored by one graph (docs/exactness.md)."""
        return False

    @property
    def pass_length(self) -> int:
        """Tokens of the shortest graph for several, which scores whatever must be exact."""
        return next((n for n in self.signature.scored_lengths if n > 1), 1)

    @property
    def lora_inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the inputs that take an adapter."""
        return self.signature.lora_inputs

    def begin(self, *, is_exact: bool = True) -> "StaticCausalLM":
        """A new conversation; see `StaticCausalLM`."""
        return StaticCausalLM(self, is_exact=is_exact)


class StaticCausalLM(CachedTokens):
    """One conversation with a model of static graphs; not for two threads at once."""

    def __init__(self, model: StaticModel, *, is_exact: bool = True) -> None:
        """Begin a conversation.

        Args:
            model: The graphs.
            is_exact: Whether every token is scored by the same graph, alone or among others:
                a target's must, because graphs of two lengths round differently. On the NPU
                a pass of eight tokens takes hardly longer than one of a single token.
        """
        super().__init__(model)
        self.model = model
        signature = model.signature
        self._ids = np.zeros(signature.context_length, np.int64)
        self._cache = {tensor.past: _empty(tensor, model) for tensor in signature.cache_tensors}
        self._lora = {n: np.zeros(s, np.float32) for n, s in signature.lora_inputs.items()}
        self._passes: dict[int, StaticPass] = {}
        self._prefill_lengths = tuple(model.sessions)
        self._score_lengths = (model.pass_length,) if is_exact else signature.scored_lengths
        self._hidden: npt.NDArray[np.float32] | None = None
        if signature.hidden_size is not None:
            self._hidden = np.empty((0, signature.hidden_size), np.float32)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """``[length]`` ids of the tokens in the cache; a view that later calls overwrite."""
        return self._ids[: self._length]

    @property
    def hidden_states(self) -> npt.NDArray[np.float32] | None:
        """``[n, hidden]`` of the last `score`'s n tokens, a view; None if the graph has none."""
        return self._hidden

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the cache.

        Raises:
            PromptError: the context has no room for them; nothing was appended.
        """
        self._check_room(len(token_ids))
        for part, length in _parts(token_ids, self._prefill_lengths):
            self._run(part, length, has_logits=False)
        if self._hidden is not None:
            self._hidden = self._hidden[:0]

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append tokens and give ``[len(token_ids), vocab_size]`` logits after each.

        The array is a view that the next call overwrites.

        Raises:
            PromptError: the context has no room for them; nothing was appended.
            ValueError: there are none.
        """
        if not token_ids:
            raise ValueError("nothing to score")
        self._check_room(len(token_ids))
        logits, hidden = [], []
        parts = list(_parts(token_ids, self._score_lengths))
        for part, length in parts:
            one = self._run(part, length, has_logits=True)
            rows = one.logits[: len(part), : self.vocab_size]
            logits.append(rows if len(parts) == 1 else rows.copy())
            if self._hidden is not None:
                states = one.hidden_states[: len(part)]
                hidden.append(states if len(parts) == 1 else states.copy())
        if hidden:
            self._hidden = hidden[0] if len(parts) == 1 else np.concatenate(hidden)
        return logits[0] if len(parts) == 1 else np.concatenate(logits)

    def reset(self) -> None:
        """Forget the conversation, not the adapter: as in a process just started."""
        self.rewind(0)
        if self._hidden is not None:
            self._hidden = self._hidden[:0]

    def set_lora(self, tensors: Tensors | None) -> None:
        """Feed an adapter from the next run on; nothing is compiled anew.

        Tokens already cached keep the old one's values.

        Args:
            tensors: See `fit_lora`.

        Raises:
            BundleError: a tensor is not an input of the graph, or has another shape.
        """
        for name, tensor in fit_lora(self.model.signature.lora_inputs, tensors).items():
            np.copyto(self._lora[name], tensor)

    def _run(self, token_ids: Sequence[int], length: int, *, has_logits: bool) -> StaticPass:
        """One pass; its new rows join the cache."""
        one = self._pass(length)
        start, total = self._length, self._length + len(token_ids)
        one.run(token_ids, start, has_logits=has_logits)
        for name, rows in one.new_rows.items():
            self._cache[name][:, :, start:total] = rows[:, :, : len(token_ids)]
        self._ids[start:total] = token_ids
        self._length = total
        return one

    def _pass(self, length: int) -> StaticPass:
        if length not in self._passes:
            self._passes[length] = StaticPass(
                self.model.sessions[length],
                self.model.signature,
                length,
                shared={**self._cache, **self._lora},
                window=self.model.sliding_window,
            )
        return self._passes[length]


def _parts(token_ids: Sequence[int], lengths: Sequence[int]) -> list[tuple[Sequence[int], int]]:
    """Tokens cut into passes, each with the length of the shortest graph that holds it."""
    parts = []
    for start in range(0, len(token_ids), lengths[-1]):
        part = token_ids[start : start + lengths[-1]]
        parts.append((part, next(length for length in lengths if length >= len(part))))
    return parts


def _empty(tensor: StaticCacheTensor, model: StaticModel) -> npt.NDArray[Any]:
    """A cache of zeros; a quantised one holds what stands nearest to zero, the middle."""
    shape = (1, tensor.num_heads, model.signature.context_length, tensor.head_dim)
    middle = 2 ** (8 * tensor.dtype.itemsize - 1) if tensor.dtype.kind == "u" else 0
    return np.full(shape, middle, tensor.dtype)
