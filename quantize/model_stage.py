"""One model of a bundle: its CPU graph, its tokenizer, and what the manifest says of it."""

import logging
from dataclasses import dataclass
from pathlib import Path

from omnidraft_npu.errors import CheckpointError, ConfigError
from omnidraft_npu.files import write_json
from omnidraft_npu.generation_defaults import (
    GENERATION_CONFIG,
    generation_defaults,
    not_followed,
)
from omnidraft_npu.manifest import Exporter as ManifestExporter
from omnidraft_npu.manifest import GraphEntry, ModelEntry
from omnidraft_npu.text.tokenizer import Tokenizer

from .checkpoints.checkpoint import Checkpoint, SourceFiles, TokenizerFiles
from .foreign_graph import ForeignGraph
from .genai_config import write_genai_config
from .genai_model import GENAI_CONFIG, import_genai_model
from .lora_branch import check_lora_rank
from .model_request import DEFAULT_CONTEXT_LENGTH, ModelRequest
from .stages import Facts, Tell

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A request whose checkpoint was opened: what can be seen without reading weights is right."""

    request: ModelRequest
    checkpoint: Checkpoint | None
    """None for a model that another exporter makes."""
    tokenizer: TokenizerFiles | None


def prepare_model(request: ModelRequest, *, is_drafter: bool = False) -> PreparedModel:
    """Open a checkpoint and its tokenizer, before any model of an export is worked on.

    Args:
        request: The model.
        is_drafter: Whether it is one, which the other exporter does not make.

    Raises:
        CheckpointError, TokenizerError: it cannot be exported.
        ConfigError: it is to learn, and its graph is not built here, or has no matrix for so
            high a rank.
    """
    if request.exporter == "optimum" or (request.path / GENAI_CONFIG).is_file():
        if request.lora_rank:
            raise ConfigError(
                f"{request.name} is not built by our own builder, so it has no LoRA inputs and "
                "cannot learn: use --lora-rank 0, or another drafter"
            )
        return PreparedModel(request=request, checkpoint=None, tokenizer=None)
    from .checkpoints.open_checkpoint import open_checkpoint

    checkpoint = open_checkpoint(
        request.path, other_way="choose another drafter" if is_drafter else None
    )
    _warn_if_cut(request, checkpoint.config.context_length)
    check_lora_rank(request.name, request.lora_rank, checkpoint.config)
    return PreparedModel(request=request, checkpoint=checkpoint, tokenizer=checkpoint.tokenizer())


def check_generation(model: PreparedModel) -> None:
    """Read what a target's maker wants of sampling, and warn of what is not followed.

    Raises:
        CheckpointError: a value of `generation_config.json` cannot be.
    """
    from .checkpoints.json_file import read_object

    request = model.request
    if model.checkpoint is not None:
        document = model.checkpoint.source_files.generation_config
    elif request.path.is_dir():
        document = read_object(request.path / GENERATION_CONFIG, optional=True)
    else:
        return
    where = f"{request.path.name}/{GENERATION_CONFIG}"
    generation_defaults(document, where, error=CheckpointError, advice="correct it")
    if names := not_followed(document):
        logger.warning(
            "%s: %s: not followed, so texts can differ from those of transformers",
            where,
            ", ".join(names),
        )


def check_text(model: PreparedModel) -> None:
    """Read a target's tokenizer, and pass if its chat template runs.

    Raises:
        CheckpointError, TokenizerError: a document is damaged, or the template cannot run.
    """
    from .tokenization.hf_tokenizer import has_tokenizer, read_tokenizer
    from .tokenization.tokenizer_checks import check_usable

    files, path = model.tokenizer, model.request.path
    if files is None and has_tokenizer(path):  # else the other exporter makes one
        files = read_tokenizer(path)
    if files is not None:
        check_usable(files, path.name)


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
    context_length = request.fitted_context(config.context_length)
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
            has_attention_rows=folder != "drafter",
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
        max_context_length=config.context_length,
    )


def _warn_if_cut(request: ModelRequest, longest: int | None) -> None:
    """Warn of a model with a shorter context than the user asked for."""
    asked = request.context_length
    if asked != DEFAULT_CONTEXT_LENGTH and request.fitted_context(longest) < asked:
        logger.warning(
            "%s is made for %s tokens: --context-length %s gives it %s",
            request.name,
            longest,
            asked,
            longest,
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
    _warn_if_cut(request, foreign.context_length)
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
        max_context_length=foreign.context_length,
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
    max_context_length: int | None,
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
        context_length=request.fitted_context(max_context_length),
        max_context_length=max_context_length,
        eos_token_ids=files.eos_token_ids,
        bos_token_id=files.bos_token_id,
        tokenizer_sha256=tokenizer.content_sha256,
        graphs={"cpu": graph},
    ).to_json()


def _write_documents(root: Path, source: SourceFiles, files: TokenizerFiles) -> None:
    write_json(root / "config.json", source.config)
    if source.generation_config:
        write_json(root / GENERATION_CONFIG, source.generation_config)
    (root / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
    write_json(root / "tokenizer_config.json", files.tokenizer_config)
