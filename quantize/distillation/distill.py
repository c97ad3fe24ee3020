"""From a target to a drafter: text, vocabulary, training, each taken up where it ended."""

import math

import torch

from omnidraft_npu.errors import ConfigError

from ..architecture import DecoderConfig
from .claim import claim_folder
from .llama import Llama
from .processes import joined_processes
from .request import DistillRequest, Watcher
from .requirements import read_corpus, require_room
from .starting import drafter_config
from .target import open_target
from .text_stage import TextStage
from .training import Progress
from .training_stage import layer_number, train_drafter


def distill(request: DistillRequest, watcher: Watcher) -> Progress | None:
    """Make or continue a drafter in ``request.output``; it lies in the folder `drafter` there.

    Returns:
        How far the training came; None in every process but the first.

    Raises:
        ConfigError: an earlier run is in the way or was asked for other things; no room;
            the folder cannot be written.
        CheckpointError, TokenizerError: the target cannot be a teacher, or a file is damaged.
        PromptError: a corpus file is empty or binary.
    """
    corpus = read_corpus(request.corpus)
    target = open_target(request.target)
    shapes = target.checkpoint.config.tensor_shapes()
    for index in request.shape.layers:
        layer_number(index, target.checkpoint.config.num_layers)
    model = _drafter(request, target.checkpoint.config)
    require_room(
        request.output,
        text_tokens=request.text_tokens,
        target_parameters=sum(math.prod(shape) for shape in shapes.values()),
        drafter_parameters=sum(p.numel() for p in model.parameters()),
        cache_bytes=_cache_bytes(request, target.checkpoint.config),
    )
    try:
        with joined_processes() as processes:
            text = TextStage(request, target, processes, watcher)
            claim_folder(request, corpus, processes)
            text.answer_prompts()
            text.read_corpus(corpus)
            del text  # and the teacher with it
            progress = train_drafter(request, target, model, processes, watcher)
            return progress if processes.is_first else None
    except OSError as error:
        raise ConfigError(
            f"cannot write {request.output} ({error.strerror or error}): free some space and go "
            "on with --resume, or name another folder with --output"
        ) from error


def _drafter(request: DistillRequest, target: DecoderConfig) -> Llama:
    shape = request.shape
    torch.manual_seed(request.training.seed)
    return Llama(
        drafter_config(
            target,
            num_layers=len(shape.layers),
            intermediate_size=min(shape.intermediate_size, target.intermediate_size),
            vocab_size=shape.vocab_size,
            context_length=shape.context_length,
        )
    )


def _cache_bytes(request: DistillRequest, target: DecoderConfig) -> int:
    """Of the answers under way, with prompts of a few hundred tokens."""
    tokens = request.batch_size * (request.max_new_tokens + 256)
    return 2 * 2 * tokens * target.num_layers * target.num_kv_heads * target.head_dim
