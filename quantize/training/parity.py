"""Whether a training graph gives the gradients that it should."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ExportError

from ..architecture import DecoderConfig
from .graph import Arrays, TrainingGraphOptions, graph_inputs, num_chunks
from .stored_weights import StoredWeights

Floats = npt.NDArray[np.float32]

_WORST_ERROR = 1e-4
"""Of an output against torch's, over its largest element."""
_WORST_SLOPE_ERROR = 0.05
"""Of the change of a loss along a gradient, over the gradient's square: about what differences
of float32 losses can tell."""
_BATCH, _LENGTH = 2, 12


def check_training_graph(
    path: Path, config: DecoderConfig, options: TrainingGraphOptions
) -> float | None:
    """Run a training graph on a few random pieces and compare what it gives.

    Where torch is installed every output is compared with torch's; where it is not, the change
    of the losses along every gradient with what the gradient says.

    Args:
        path: Of the graph, beside the drafter's CPU graph.
        config: Of the drafter.
        options: That the graph was built with.

    Returns:
        The largest error of an output, relative to its largest element; None without torch.

    Raises:
        ExportError: the graph is wrong, or does not run.
    """
    chunks = num_chunks(options, config.num_logits)
    length = min(options.length, chunks * -(-_LENGTH // chunks))
    small = dataclasses.replace(options, batch=_BATCH, length=length)
    feeds = example_feeds(config, small)
    run = _SmallGraph(path, config, small)
    try:
        found = run(feeds)
        if importlib.util.find_spec("torch") is None:
            _check_slopes(run, feeds, found)
            return None
    finally:
        run.close()
    from .reference import reference_outputs

    expected = reference_outputs(
        config, stored_tensors(path.with_name("model.onnx"), config), feeds
    )
    error = max(_error(found[name], expected[name]) for name in found)
    if not error < _WORST_ERROR:
        raise ExportError(
            f"the training graph's gradients differ from torch's by {error:.1e}, more than "
            f"{_WORST_ERROR:.0e}: use the versions of torch and onnxruntime that this tool pins, "
            "or --lora-rank 0 for a drafter that does not learn"
        )
    return error


def example_feeds(config: DecoderConfig, options: TrainingGraphOptions) -> Arrays:
    """Random values for every input of a training graph."""
    rng = np.random.default_rng(0)
    shape = (options.batch, options.length)
    num_top = min(options.num_top, config.num_logits)
    ids = rng.permuted(np.tile(np.arange(options.num_top) % num_top, (*shape, 1)), axis=-1)
    probs = rng.dirichlet(np.ones(num_top + 1), shape)[..., :num_top]
    probs[rng.random(shape) < 0.2, 1:] = 0
    data: dict[str, npt.NDArray[Any]] = {
        "pieces": rng.integers(0, config.num_logits, shape),
        "law_ids": (ids + rng.integers(0, config.num_logits, (*shape, 1))) % config.num_logits,
        "law_probs": np.pad(probs, [(0, 0), (0, 0), (0, options.num_top - num_top)]),
        "forward_weight": rng.random(shape) < 0.6,
        "reverse_weight": rng.random(shape),
        "head_weight": rng.random(shape),
        "joint": np.array(1),
    }
    feeds: Arrays = {}
    for name, (dtype, wanted) in graph_inputs(config, options).items():
        value = data[name] if name in data else rng.normal(scale=0.1, size=wanted)
        feeds[name] = value.astype(dtype)
    return feeds


def stored_tensors(model_path: Path, config: DecoderConfig) -> dict[str, Floats]:
    """A drafter's weights, by canonical name, as its CPU graph has them: dequantised.

    Raises:
        ExportError: the graph cannot be read.
    """
    stored = StoredWeights(model_path)
    shapes = config.tensor_shapes()
    together = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "o_proj": ("o",)}
    together["down_proj"] = ("down",)
    tensors = {"embed_tokens": stored.floats("embed_tokens", config.hidden_size)}
    for i in range(config.num_layers):
        at = f"layers.{i}"
        for group, parts in together.items():
            named = [shapes[f"{at}.{part}_proj"] for part in parts]
            cuts = np.cumsum([out for out, _ in named])[:-1]
            matrix = stored.floats(f"{at}.{group}", named[0][1])
            split = zip(parts, np.split(matrix, cuts), strict=True)
            tensors |= {f"{at}.{part}_proj": weight for part, weight in split}
            if stored.has(f"{at}.{group}.bias"):
                biases = np.split(stored.vector(f"{at}.{group}.bias"), cuts)
                split = zip(parts, biases, strict=True)
                tensors |= {f"{at}.{part}_bias": bias for part, bias in split}
    norms = [name for name in shapes if name.endswith("norm")]
    tensors |= {name: stored.vector(f"{name}.weight") for name in norms}
    if not config.has_tied_head:
        tensors["lm_head"] = stored.floats("logits", config.hidden_size)
    return tensors


class _SmallGraph:
    """A training graph declared for fewer and shorter rows: nothing else in it depends on them."""

    def __init__(self, path: Path, config: DecoderConfig, options: TrainingGraphOptions) -> None:
        import onnx
        import onnxruntime as ort

        self._path = path.with_name(f".small.{path.name}")
        model = onnx.load(path, load_external_data=False)
        shapes = graph_inputs(config, options)
        for value in model.graph.input:
            for dim, size in zip(
                value.type.tensor_type.shape.dim, shapes[value.name][1], strict=True
            ):
                dim.dim_value = size
        self._path.write_bytes(model.SerializeToString())
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(
                str(self._path), settings, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            self.close()
            raise ExportError(f"the training graph cannot be run: {error}") from error

    def __call__(self, feeds: Arrays) -> Arrays:
        """Every output by name."""
        names = [value.name for value in self._session.get_outputs()]
        return dict(zip(names, self._session.run(None, feeds), strict=True))

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def _check_slopes(run: _SmallGraph, feeds: Arrays, found: Arrays) -> None:
    """Walk along every gradient, a little each way, and see how much the losses change."""
    for name in feeds:
        gradient = found.get(f"grad.{name}")
        if gradient is None:
            continue
        square = float(np.square(gradient, dtype=np.float64).sum())
        # Far enough for a change of a thousandth, not so far that the loss bends.
        step = min(1e-3 / max(square, 1e-12), 0.01 / max(float(np.abs(gradient).max()), 1e-6))
        losses = []
        for sign in (1, -1):
            moved = feeds[name] + (sign * step * gradient).astype(np.float32)
            outputs = run({**feeds, name: moved})
            losses.append(float(outputs["loss"]) + float(outputs["head_loss"]))
        slope = (losses[0] - losses[1]) / (2 * step)
        noise = 2e-6 / step
        if not abs(slope - square) < _WORST_SLOPE_ERROR * square + noise:
            raise ExportError(
                f"the training graph's gradient of {name} is wrong: the loss changes by "
                f"{slope:.3g} along it, not by {square:.3g}. Use --lora-rank 0 for a drafter that "
                "does not learn"
            )


def _error(found: Floats, expected: Floats) -> float:
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-12))
