"""Whether a training graph gives the gradients that it should."""

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.acceptance_head import PREFIX
from omnidraft_npu.errors import ExportError
from omnidraft_npu.system_errors import limit_reached

from ..architecture import DecoderConfig
from .graph import Arrays, TrainingGraphOptions, graph_inputs, num_chunks
from .stored_weights import StoredWeights

Floats = npt.NDArray[np.float32]

_WORST_ERROR = 1e-4
"""Of an output against torch's, over its largest element."""
_STEP = 1e-3
"""What a walk in one tensor changes the losses by: far more than float32 rounds them by."""
_ACROSS = 0.3
"""Of a walk's elements that lie in no particular direction, where 1 is the gradient's length."""
_WORST_SLOPE_ERROR = 0.02
"""Of the change of the losses, over the step: 0.5 to 1.5 of it is due to each tensor. Right
gradients were seen to miss by 0.0006, and by 0.007 along the 424 tensors of 30 layers."""
_BATCH, _LENGTH = 2, 12
NUM_STEPS = 5
"""Of a check, for telling how far it is."""


def check_training_graph(
    path: Path,
    config: DecoderConfig,
    options: TrainingGraphOptions,
    tell: Callable[[int], None] = lambda _: None,
) -> float | None:
    """Run a training graph on a few random pieces and compare what it gives.

    Where torch is installed every output is compared with torch's; where it is not, the change
    of the losses along all gradients at once with what the gradients say.

    Args:
        path: Of the graph, beside the drafter's CPU graph.
        config: Of the drafter.
        options: That the graph was built with.
        tell: Called with the steps done, of `NUM_STEPS`.

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
        tell(1)
        found = run(feeds)
        tell(2)
        if find_spec("torch") is None:
            _check_slopes(run, feeds, found, tell)
            return None
    finally:
        run.close()
    from .reference import reference_outputs

    expected = reference_outputs(
        config, stored_tensors(path.with_name("model.onnx"), config), feeds
    )
    tell(NUM_STEPS)
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
        "overlap_weight": rng.random(shape),
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
        settings.log_severity_level = 4  # Errors come as exceptions.
        try:
            self._session = ort.InferenceSession(
                str(self._path), settings, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            self.close()
            raise limit_reached(error) or ExportError(
                f"the training graph cannot be run: {error}"
            ) from error

    def __call__(self, feeds: Arrays) -> Arrays:
        """Every output by name."""
        names = [value.name for value in self._session.get_outputs()]
        return dict(zip(names, self._session.run(None, feeds), strict=True))

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def _check_slopes(
    run: Callable[[Arrays], Arrays], feeds: Arrays, found: Arrays, tell: Callable[[int], None]
) -> None:
    """Walk a little each way, in all tensors at once, and see how much the losses change."""
    # The head's labels move with the adapter, but no gradient says so: only a law that names
    # nothing has a label that stays, and positions with other laws are not the head's here.
    is_open = np.arange(feeds["pieces"].shape[1]) % 3 == 0
    fixed = feeds | {
        "law_probs": np.where(is_open[:, None], np.float32(0), feeds["law_probs"]),
        "head_weight": np.where(is_open, feeds["head_weight"], np.float32(0)),
    }
    at_fixed = run(fixed)
    tell(3)
    learned = [name for name in feeds if f"grad.{name}" in found]
    _check_slope(run, fixed, {name: at_fixed[f"grad.{name}"] for name in learned})
    tell(4)
    head = {name: found[f"grad.{name}"] for name in learned if name.startswith(PREFIX)}
    _check_slope(run, feeds, head)
    tell(NUM_STEPS)


def _check_slope(run: Callable[[Arrays], Arrays], feeds: Arrays, gradients: Arrays) -> None:
    rng = np.random.default_rng(1)
    moves = {name: _move(rng, feeds[name], gradient) for name, gradient in gradients.items()}

    def slope(steps: int) -> float:
        losses = []
        for sign in (steps, -steps):
            outputs = run(feeds | {n: feeds[n] + np.float32(sign) * m for n, m in moves.items()})
            losses.append(float(outputs["loss"]) + float(outputs["head_loss"]))
        return (losses[0] - losses[1]) / (2 * steps * _STEP)

    wanted = sum(float(np.vdot(move, gradients[name])) for name, move in moves.items()) / _STEP
    # Along all tensors of a deep drafter the losses bend, which changes a slope by the square of
    # the steps: of two slopes that part can be taken away.
    found = (4 * slope(1) - slope(2)) / 3
    if not abs(found - wanted) < _WORST_SLOPE_ERROR:
        raise ExportError(
            f"the training graph's gradients are wrong: along them the losses change by "
            f"{found:.4f}, not by {wanted:.4f}. Use the version of onnxruntime that this tool "
            "pins, or --lora-rank 0 for a drafter that does not learn"
        )


def _move(rng: np.random.Generator, tensor: Floats, gradient: Floats) -> Floats:
    """A step along a gradient, and a little across, that changes a loss by about `_STEP`.

    Every tensor counts by another factor, so that no two mistakes make up for each other.
    """
    norm = max(float(np.linalg.norm(gradient)), 1e-12)
    share = rng.choice([-1, 1]) * rng.uniform(0.5, 1.5)
    across = _ACROSS * rng.standard_normal(tensor.shape)
    move = _STEP * (share * gradient / norm + across) / norm
    # A loss bends where a tensor moves by as much as itself.
    most = 0.5 * float(np.linalg.norm(tensor))
    shrink = min(1, most / max(float(np.linalg.norm(move)), 1e-12))
    return np.asarray(move * shrink, np.float32)


def _error(found: Floats, expected: Floats) -> float:
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-12))
