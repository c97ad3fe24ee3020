"""The teacher's law over tokens: the likeliest ones, exactly, without every exact logit."""

import torch
from torch import Tensor
from torch.nn import functional

NUM_TOP = 32
"""Likeliest tokens that are stored a position; the rest is under 3 % of the mass on average."""
_CANDIDATES = 2 * NUM_TOP
"""Likeliest by rounded logits, of which the exact logits pick."""
_BLOCK = 128


class TeacherHead:
    """Logits in two stages: all of them rounded, then those of the likeliest in float32.

    Ties between likely tokens must not come from rounding.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Args: ``[tokens, hidden]`` float32 rows of the tokens that may be written, and the
        type of the first stage.
        """
        self._exact = weight
        self._rounded = functional.pad(weight.to(dtype), (0, 0, 0, -len(weight) % _BLOCK))

    def law(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """``[rows, top]`` likeliest tokens by falling probability, and their log-probabilities.

        Args:
            states: ``[rows, hidden]`` float32.
        """
        num_tokens = len(self._exact)
        rounded = functional.linear(states.to(self._rounded.dtype), self._rounded).float()
        rounded[:, num_tokens:] = -torch.inf
        candidates = _likeliest(rounded, min(_CANDIDATES, num_tokens))
        exact = torch.bmm(self._exact[candidates], states[:, :, None])[:, :, 0]
        rest = rounded.scatter_(1, candidates, -torch.inf).logsumexp(1)
        mass = torch.logaddexp(rest, exact.logsumexp(1))
        top, order = exact.topk(min(NUM_TOP, num_tokens))
        return candidates.gather(1, order), top - mass[:, None]


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """``[rows, count]`` indices of the greatest of ``[rows, blocks * block]`` logits.

    They lie in the `count` blocks with the greatest maxima, so that only these are sorted.
    """
    blocks = logits.view(len(logits), -1, _BLOCK)
    best = blocks.amax(2).topk(min(count, blocks.shape[1])).indices
    inside = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    places = inside.topk(count).indices
    return best.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
