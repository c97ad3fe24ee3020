"""Any causal language model that `optimum` can trace, for the CPU provider."""

import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnidraft_npu.errors import CheckpointError, ConfigError, ExportError
from omnidraft_npu.extras import install_hint
from omnidraft_npu.system_errors import limit_reached

from .checkpoints.checkpoint import SourceFiles
from .checkpoints.json_file import read_object
from .foreign_graph import ForeignGraph
from .tokenization.hf_tokenizer import has_tokenizer, read_tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

logger = logging.getLogger(__name__)

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Of the logits against torch, as a share of the logits' range."""

_PROMPT, _CONTINUATION = 12, 5
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx")


def export_with_optimum(model_path: Path, folder: Path) -> ForeignGraph:
    """Write a float32 ``model.onnx`` with a KV cache into `folder` and compare it with torch.

    Args:
        model_path: Hugging Face folder.
        folder: Where the graph and its external data go; made if missing.

    Raises:
        ConfigError: the `optimum` extra is not installed.
        ExportError: the model is not one that optimum exports, or its logits differ from torch's.
        CheckpointError: there is no such folder, or a document of it is missing.
        TokenizerError: it has no tokenizer that can be read.
    """
    require_optimum(model_path)
    document = read_object(model_path / "config.json")
    architecture = str(document.get("model_type"))
    _trace(model_path, folder, architecture)
    # A checkpoint with a slow tokenizer only gets a fast one from optimum.
    tokenizer = read_tokenizer(model_path if has_tokenizer(model_path) else folder)
    for path in folder.iterdir():
        if not path.name.startswith("model.onnx"):
            path.unlink()
    expected, got = _logits(model_path, folder / "model.onnx")
    tolerance = MAX_RELATIVE_DIFFERENCE * float(np.ptp(expected))
    difference = float(np.abs(got - expected).max())
    logger.info(
        "%s: largest difference of a logit from torch's %.2e, tolerance %.2e",
        model_path.name,
        difference,
        tolerance,
    )
    if not difference <= tolerance:
        raise ExportError(
            f"{model_path.name}: optimum's graph differs from torch by {difference:.2e} where "
            f"{tolerance:.2e} is allowed, so it would not be the same model: nothing was exported"
        )
    limits = (document.get(field) for field in _CONTEXT_FIELDS)
    return ForeignGraph(
        exporter="optimum",
        architecture=architecture,
        precision="fp32",
        cache="concat",
        num_logits=expected.shape[-1],
        context_length=next((n for n in limits if isinstance(n, int)), None),
        source_files=SourceFiles(
            config=document,
            generation_config=read_object(model_path / "generation_config.json", optional=True),
        ),
        tokenizer=tokenizer,
    )


def require_optimum(model_path: Path) -> None:
    """Pass if optimum is installed and can read a model, before anything is made.

    Raises:
        ConfigError: the `optimum` extra is not installed.
        CheckpointError: the model is no Hugging Face folder.
    """
    try:
        is_installed = find_spec("optimum.exporters.onnx") is not None
    except ImportError:
        is_installed = False
    if not is_installed:
        raise ConfigError(
            "--exporter optimum needs the extra `optimum`, whose pins want a new environment of "
            f"their own; there, {install_hint('export', 'optimum')}"
        )
    if not model_path.is_dir():
        raise CheckpointError(
            f"{model_path} is no Hugging Face folder, and optimum reads only those: leave "
            "--exporter optimum out"
        )


def _trace(model_path: Path, folder: Path, architecture: str) -> None:
    from optimum.exporters.onnx import main_export

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's, about branches it fixes
            main_export(
                str(model_path),
                output=folder,
                task="text-generation-with-past",
                framework="pt",
                device="cpu",
                dtype="fp32",
                local_files_only=True,
                do_validation=False,
            )
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise limit_reached(error) or ExportError(
            f"optimum cannot export {model_path.name} (model_type {architecture}): {reason}"
        ) from error
    if not (folder / "model.onnx").is_file():
        raise ExportError(
            f"optimum made no single graph with a cache for {model_path.name} "
            f"(model_type {architecture}), so it cannot be a target"
        )


def _logits(
    model_path: Path, graph: Path
) -> tuple["npt.NDArray[np.float32]", "npt.NDArray[np.float32]"]:
    """``[tokens, num_logits]`` of torch at once, and of the graph as prompt and continuation."""
    import onnxruntime as ort
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, local_files_only=True
    )
    model.eval()
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, _PROMPT + _CONTINUATION)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids[None])).logits[0].numpy()

    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    past = {
        node.name: np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32)
        for node in session.get_inputs()
        if node.name.startswith("past_key_values.")
    }
    rows = []
    for start, end in ((0, _PROMPT), (_PROMPT, len(ids))):
        outputs = _run(session, ids, start, end, past)
        rows.append(outputs["logits"][0])
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    return expected, np.concatenate(rows)


def _run(session: Any, ids: Any, start: int, end: int, past: dict[str, Any]) -> dict[str, Any]:
    feeds = {
        "input_ids": ids[None, start:end],
        "attention_mask": np.ones((1, end), np.int64),
        "position_ids": np.arange(start, end)[None],
    } | past
    wanted = {node.name for node in session.get_inputs()}
    values = session.run(None, {name: feeds[name] for name in feeds if name in wanted})
    return {node.name: value for node, value in zip(session.get_outputs(), values, strict=True)}
