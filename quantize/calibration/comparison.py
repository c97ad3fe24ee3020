"""What a quantised graph loses against the float one, on text it was not calibrated on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..recipes import Recipe
from .static_graph import Array, StaticGraph

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

    def faults(self, recipe: Recipe) -> Iterator[str]:
        """Each bound of the recipe that does not hold, for people."""
        if not self.loss <= recipe.max_loss:
            yield f"perplexity rises by more than {100 * recipe.max_loss:.3g} %"
        if not self.top_1_agreement >= recipe.min_agreement:
            yield f"under {100 * recipe.min_agreement:.3g} % keep their first choice"
        if not self.relative_error <= recipe.max_error:
            yield f"the error of the logits is over {recipe.max_error:.3g}"

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.2f} instead of {self.float_perplexity:.2f} "
            f"({100 * self.loss:+.1f} %), the same first choice after "
            f"{100 * self.top_1_agreement:.1f} % of {self.num_tokens} tokens, relative error of "
            f"the logits {self.relative_error:.3f}"
        )

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


class ModelComparison:
    """Float and quantised graphs of a model, compared a part at a time on the same tokens.

    Each side hands its own residual stream to its next part, so the errors add up as they do
    when the quantised model runs. One part of each is open at a time.
    """

    def __init__(self, windows: npt.NDArray[np.int64], *, sliding_window: int | None) -> None:
        """Begin.

        Args:
            windows: ``[n, length]`` token ids, the length a multiple of the graphs'.
            sliding_window: see `StaticGraph`.
        """
        self._windows = windows
        self._sliding_window = sliding_window
        self._inputs: list[Array] = [windows, windows]
        self._errors: list[float] = []
        self._error = self._size = 0.0
        self._agreed = 0
        self._surprise = np.zeros(2)

    def add(self, float_path: Path, quantized_path: Path, layers: range) -> None:
        """Run the graphs of the next part, of one length, over the windows."""
        residuals = [f"layers.{i}.residual" for i in layers]
        graphs = [
            StaticGraph.open(path, sliding_window=self._sliding_window, outputs=residuals)
            for path in (float_path, quantized_path)
        ]
        apart = dict.fromkeys(residuals, 0.0)
        given: tuple[list[Array], list[Array]] = ([], [])
        for window, *inputs in zip(self._windows, *self._inputs, strict=True):
            passes = zip(*(g.run(x) for g, x in zip(graphs, inputs, strict=True)), strict=True)
            for number, (exact, rounded) in enumerate(passes):
                for name in residuals:
                    apart[name] += _sum_of_errors(rounded[name][0], exact[name][0])
                for rows, outputs in zip(given, (exact, rounded), strict=True):
                    rows.append(outputs[residuals[-1]][0])
                if "logits" in exact:
                    following = window[number * graphs[0].length + 1 :]
                    self._add_logits(exact["logits"][0], rounded["logits"][0], following)
        self._errors += [apart[name] / self._windows.size for name in residuals]
        self._inputs = [np.concatenate(rows).reshape(*self._windows.shape, -1) for rows in given]

    def _add_logits(
        self,
        exact: npt.NDArray[np.float32],
        rounded: npt.NDArray[np.float32],
        following: npt.NDArray[np.int64],
    ) -> None:
        """Args: following are the tokens after the first, as far as the window goes."""
        self._error += _square(exact - rounded)
        self._size += _square(exact)
        self._agreed += int((exact.argmax(axis=-1) == rounded.argmax(axis=-1)).sum())
        following = following[: len(exact)]
        self._surprise += [
            _surprise(logits[: len(following)], following) for logits in (exact, rounded)
        ]

    def result(self) -> Comparison:
        """What was found, once all parts were added."""
        grows = np.diff(self._errors, prepend=0.0)
        worst = sorted(range(len(grows)), key=lambda i: -grows[i])[:_NUM_WORST]
        predicted = self._windows.size - len(self._windows)
        return Comparison(
            num_tokens=self._windows.size,
            relative_error=float(np.sqrt(self._error / self._size)),
            top_1_agreement=self._agreed / self._windows.size,
            float_perplexity=float(np.exp(self._surprise[0] / predicted)),
            perplexity=float(np.exp(self._surprise[1] / predicted)),
            worst_layers=tuple((i, self._errors[i]) for i in worst),
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
