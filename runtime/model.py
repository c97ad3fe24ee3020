"""What a conversation needs of a model, whatever runs it."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omnidraft_npu.speculative import CausalLM

from .lora_inputs import Tensors


class ConversationLM(CausalLM, Protocol):
    """A causal language model that holds one conversation."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """``[length]`` ids of the tokens in the cache; a view that later calls overwrite."""
        ...

    @property
    def hidden_states(self) -> npt.NDArray[np.float32] | None:
        """``[n, hidden]`` of the last `score`'s n tokens; None if the graph has none."""
        ...

    def reset(self) -> None:
        """Forget the conversation, not the adapter."""
        ...

    def set_lora(self, tensors: Tensors | None) -> None:
        """Feed an adapter from the next run on; None for none."""
        ...


class Model(Protocol):
    """Opened graphs; any number of conversations may share them."""

    @property
    def more_room(self) -> str:
        """What gives a longer context, for messages."""
        ...

    @property
    def provider(self) -> str:
        """What really runs the graphs."""
        ...

    @property
    def placement(self) -> dict[str, dict[str, int]]:
        """Nodes by the provider that runs them, for each graph; proves where a model runs."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens a conversation may hold."""
        ...

    @property
    def lora_inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the inputs that take an adapter; none for graphs exported without."""
        ...

    @property
    def pass_length(self) -> int | None:
        """Most tokens that one exact pass scores, more take several; None for any number."""
        ...

    @property
    def has_near_ties(self) -> bool:
        """Whether tests found that a token's numbers depend on how many are scored with it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Real token ids."""
        ...

    def begin(self, *, is_exact: bool = True) -> ConversationLM:
        """A new conversation.

        Args:
            is_exact: Whether a token's logits must be the same alone and among others: a
                target's must, a drafter's need not, and are cheaper so.
        """
        ...
