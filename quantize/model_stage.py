"""One model of a bundle: its CPU graph, its tokenizer, and what the manifest says of it."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.files import write_json
from omnidraft_npu.manifest import Exporter as ManifestExporter
from omnidraft_npu.manifest import GraphEntry, ModelEntry
from omnidraft_npu.precision import Precision
from omnidraft_npu.store.local import resolve_model
from omnidraft_npu.text.tokenizer import Tokenizer

from .checkpoints.checkpoint import Checkpoint, SourceFiles, TokenizerFiles
from .foreign_graph import ForeignGraph
from .genai_config import write_genai_config
from .genai_model import GENAI_CONFIG, import_genai_model
from .htp_request import HtpRequest
from .stages import Facts, Tell
from .training_stage import TrainingShape

Exporter = Literal["builder", "optimum"]


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One model to export, and how."""

    name: str
    """Name in the bundle."""
    path: Path
    """Checkpoint: a Hugging Face folder or a GGUF file."""
    source: str
    """What the manifest says of its origin: a built-in name, a hub id or a file name."""
    precision: Precision = "int8"
    exporter: Exporter = "builder"
    context_length: int = 4096
    """Most tokens of prompt and response; a model trained for less gets its own limit."""
    lora_rank: int = 0
    """Rank of the LoRA inputs; 0 for none."""
    has_hidden_states: bool = False
    training: TrainingShape | None = None
    """Batches of the training graph of a model with LoRA inputs; None for no such graph."""
    htp: HtpRequest | None = None
    """None for no NPU flavour."""

    def __post_init__(self) -> None:
        if self.context_length < 16:
            raise ConfigError(
                f"context_length is {self.context_length}, must be at least 16: "
                "use --context-length 16 or more"
            )
        if self.lora_rank < 0:
            raise ConfigError(
                f"lora_rank is {self.lora_rank}, must not be negative: use --lora-rank 0 for a "
                "drafter that does not learn"
            )

    def identity(self) -> Facts:
        """What decides the exported files, for taking over finished stages."""
        return {
            "name": self.name,
            "source": self.source,
            "files": _fingerprint(self.path),
            "precision": self.precision,
            "exporter": self.exporter,
            "context_length": self.context_length,
            "lora_rank": self.lora_rank,
            "has_hidden_states": self.has_hidden_states,
            "training": None if self.training is None else str(self.training),
            "htp": None if self.htp is None else self.htp.identity(),
        }


def model_request(
    name: str,
    *,
    precision: Precision,
    context_length: int,
    exporter: Exporter = "builder",
    lora_rank: int = 0,
    training: TrainingShape | None = None,
    htp: HtpRequest | None = None,
) -> ModelRequest:
    """A request for a model the user named: a path, a built-in name or a hub id.

    With a `lora_rank` it can learn: it has LoRA inputs and gives its hidden states.

    Raises:
        StoreError: there is no such path, and no such model in the local store.
    """
    path = resolve_model(name)
    stem = path.name.removesuffix(".gguf") if path.is_file() else path.resolve().name
    is_path = Path(name).exists()
    last = stem if is_path else name.split("/")[-1]
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")
    return ModelRequest(
        name=plain or "model",
        path=path,
        source=path.resolve().name if is_path else name,
        precision=precision,
        exporter=exporter,
        context_length=context_length,
        lora_rank=lora_rank,
        has_hidden_states=lora_rank > 0,
        training=training if lora_rank > 0 else None,
        htp=htp,
    )


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A request whose checkpoint was opened: what can be seen without reading weights is right."""

    request: ModelRequest
    checkpoint: Checkpoint | None
    """None for a model that another exporter makes."""
    tokenizer: TokenizerFiles | None


def prepare_model(request: ModelRequest) -> PreparedModel:
    """Open a checkpoint and its tokenizer, before any model of an export is worked on.

    Raises:
        CheckpointError, TokenizerError: it cannot be exported.
        ConfigError: it is to learn, and its graph is not built here.
    """
    if request.exporter == "optimum" or (request.path / GENAI_CONFIG).is_file():
        if request.lora_rank:
            raise ConfigError(
                f"{request.name} is not built by our own builder, so it has no LoRA inputs and "
                "cannot learn: use --lora-rank 0, or another drafter"
            )
        return PreparedModel(request=request, checkpoint=None, tokenizer=None)
    from .checkpoints.open_checkpoint import open_checkpoint

    checkpoint = open_checkpoint(request.path)
    return PreparedModel(request=request, checkpoint=checkpoint, tokenizer=checkpoint.tokenizer())


def export_model(model: PreparedModel, root: Path, folder: str, tell: Tell) -> Facts:
    """Write a model's graph and tokenizer.

    Args:
        model: The model.
        root: The stage's folder; exists and is empty.
        folder: Its path in the bundle.
        tell: Told about each tensor.

    Returns:
        The model's `ModelEntry` as JSON.

    Raises:
        CheckpointError, TokenizerError: the checkpoint cannot be exported.
    """
    request, checkpoint, files = model.request, model.checkpoint, model.tokenizer
    if checkpoint is None or files is None:
        return _foreign_entry(request, root, folder, _foreign_graph(request, root / "cpu"))
    from .decoder_cpu import CpuGraphOptions, build_cpu_decoder

    config = checkpoint.config
    context_length = min(request.context_length, config.context_length)
    tensors_done = 0
    total = len(config.tensor_shapes())

    def count(_: str) -> None:
        nonlocal tensors_done
        tensors_done += 1
        tell(min(tensors_done, total), total)

    build_cpu_decoder(
        config,
        checkpoint.tensor,
        root / "cpu",
        CpuGraphOptions(
            precision=request.precision,
            context_length=context_length,
            lora_rank=request.lora_rank,
            has_hidden_states=request.has_hidden_states,
        ),
        count,
    )
    if not request.lora_rank and files.eos_token_ids:
        write_genai_config(
            root / "cpu",
            config,
            context_length=context_length,
            eos_token_ids=files.eos_token_ids,
            bos_token_id=files.bos_token_id,
        )
    graph = GraphEntry(
        path=f"{folder}/cpu/model.onnx",
        precision=request.precision,
        cache="shared",
        lora_rank=request.lora_rank,
        has_hidden_states=request.has_hidden_states,
    )
    _write_documents(root, checkpoint.source_files, files)
    return _entry(
        request,
        root,
        folder,
        files,
        graph,
        architecture=config.architecture,
        exporter="builder",
        num_logits=config.num_logits,
        context_length=context_length,
    )


def _foreign_graph(request: ModelRequest, folder: Path) -> ForeignGraph:
    """The graph of a model that our builder does not build."""
    if request.exporter == "optimum":
        from .optimum_export import export_with_optimum

        return export_with_optimum(request.path, folder)
    return import_genai_model(request.path, folder)


def _foreign_entry(request: ModelRequest, root: Path, folder: str, foreign: ForeignGraph) -> Facts:
    """Write the documents of a graph that was not built here; its `ModelEntry` as JSON."""
    graph = GraphEntry(
        path=f"{folder}/cpu/model.onnx", precision=foreign.precision, cache=foreign.cache
    )
    _write_documents(root, foreign.source_files, foreign.tokenizer)
    return _entry(
        request,
        root,
        folder,
        foreign.tokenizer,
        graph,
        architecture=foreign.architecture,
        exporter=foreign.exporter,
        num_logits=foreign.num_logits,
        context_length=min(request.context_length, foreign.context_length or sys.maxsize),
    )


def _entry(
    request: ModelRequest,
    root: Path,
    folder: str,
    files: TokenizerFiles,
    graph: GraphEntry,
    *,
    architecture: str,
    exporter: ManifestExporter,
    num_logits: int,
    context_length: int,
) -> Facts:
    """The `ModelEntry` as JSON of a model whose documents lie in `root`."""
    tokenizer = Tokenizer.from_folder(root)
    return ModelEntry(
        name=request.name,
        source=request.source,
        architecture=architecture,
        exporter=exporter,
        folder=folder,
        vocab_size=min(tokenizer.size, num_logits),
        num_logits=num_logits,
        context_length=context_length,
        eos_token_ids=files.eos_token_ids,
        bos_token_id=files.bos_token_id,
        tokenizer_sha256=tokenizer.content_sha256,
        graphs={"cpu": graph},
    ).to_json()


def _write_documents(root: Path, source: SourceFiles, files: TokenizerFiles) -> None:
    write_json(root / "config.json", source.config)
    if source.generation_config:
        write_json(root / "generation_config.json", source.generation_config)
    (root / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
    write_json(root / "tokenizer_config.json", files.tokenizer_config)


def _fingerprint(path: Path) -> list[Any]:
    """Name, size and time of a checkpoint's files: enough to see that it changed."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.is_file()]
