"""What a quantised graph loses against the float one, on text it was not calibrated on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .static_graph import StaticGraph

_NUM_WORST = 3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both graphs on the same tokens, on the CPU provider."""

    num_tokens: int
    relative_error: float
    """Of the logits: length of the difference over length of the float ones."""
    top_1_agreement: float
    """Share of the tokens after which both rank the same token first."""
    float_perplexity: float
    perplexity: float
    worst_layers: tuple[tuple[int, float], ...]
    """The layers over which the error grows the most, and the mean relative error of a token's
    residual stream after them."""

    @property
    def loss(self) -> float:
        """Share by which the perplexity rises."""
        return self.perplexity / self.float_perplexity - 1

    def to_report(self) -> dict[str, float]:
        """As the manifest keeps it."""
        layers = {
            f"error_after_layer_{index}": round(error, 6) for index, error in self.worst_layers
        }
        return {
            "tokens": self.num_tokens,
            "relative_error": round(self.relative_error, 6),
            "top_1_agreement": round(self.top_1_agreement, 4),
            "float_perplexity": round(self.float_perplexity, 4),
            "perplexity": round(self.perplexity, 4),
            "loss": round(self.loss, 5),
            **layers,
        }


def compare(
    float_path: Path,
    quantized_path: Path,
    windows: npt.NDArray[np.int64],
    *,
    num_layers: int,
    sliding_window: int | None,
) -> Comparison:
    """Run both graphs over the windows.

    Args:
        float_path: A graph of the HTP contract.
        quantized_path: One of the same length and context.
        windows: ``[n, length]``, the length a multiple of the graphs'.
        num_layers: Whose `layers.{i}.residual` is compared.
        sliding_window: see `StaticGraph`.
    """
    residuals = [f"layers.{i}.residual" for i in range(num_layers)]
    graphs = [
        StaticGraph.open(path, sliding_window=sliding_window, outputs=residuals)
        for path in (float_path, quantized_path)
    ]
    apart = dict.fromkeys(residuals, 0.0)
    error = size = 0.0
    agreed = 0
    surprise = np.zeros(2)
    for window in windows:
        passes = zip(*(graph.run(window) for graph in graphs), strict=True)
        for number, (exact, rounded) in enumerate(passes):
            for name in residuals:
                apart[name] += _sum_of_errors(rounded[name][0], exact[name][0])
            both = exact["logits"][0], rounded["logits"][0]
            error += _square(both[0] - both[1])
            size += _square(both[0])
            agreed += int((both[0].argmax(axis=-1) == both[1].argmax(axis=-1)).sum())
            start = number * graphs[0].length
            following = window[start + 1 : start + graphs[0].length + 1]
            surprise += [_surprise(logits[: len(following)], following) for logits in both]
    errors = [apart[name] / windows.size for name in residuals]
    grows = np.diff(errors, prepend=0.0)
    worst = sorted(range(num_layers), key=lambda i: -grows[i])[:_NUM_WORST]
    predicted = windows.size - len(windows)
    return Comparison(
        num_tokens=windows.size,
        relative_error=float(np.sqrt(error / size)),
        top_1_agreement=agreed / windows.size,
        float_perplexity=float(np.exp(surprise[0] / predicted)),
        perplexity=float(np.exp(surprise[1] / predicted)),
        worst_layers=tuple((i, errors[i]) for i in worst),
    )


def _sum_of_errors(rows: npt.NDArray[np.float32], exact: npt.NDArray[np.float32]) -> float:
    """Of the relative error of every row: the first can be a hundred times as long as others."""
    errors = np.linalg.norm(rows - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return float(errors.sum(dtype=np.float64))


def _square(values: npt.NDArray[np.float32]) -> float:
    return float(np.vdot(values, values))


def _surprise(logits: npt.NDArray[np.float32], following: npt.NDArray[np.int64]) -> float:
    """Sum of minus the log-probabilities of the tokens that follow."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1))
    chosen = shifted[np.arange(len(following)), following]
    return float((total - chosen).sum(dtype=np.float64))
