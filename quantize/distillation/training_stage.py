"""The vocabulary and the training of a run."""

from omnidraft_npu.errors import CheckpointError, ConfigError

from ..checkpoints.checkpoint import TokenizerFiles
from .examples import Example, ExampleMaker
from .folder import write_drafter
from .llama import Llama
from .processes import Processes
from .request import DistillRequest, Watcher
from .starting import start_from_target
from .target import DistillTarget
from .teacher_head import NUM_TOP
from .teacher_text import read_responses, shard_tokens
from .text_stage import text_shards
from .tokenizer import (
    count_tokens,
    encoder_of,
    read_files,
    train_tokenizer,
    write_files,
)
from .training import Progress, Trainer


def train_drafter(
    request: DistillRequest,
    target: DistillTarget,
    model: Llama,
    processes: Processes,
    watcher: Watcher,
) -> Progress:
    """Train `model` on the text of a run, from its checkpoint if there is one.

    Raises:
        CheckpointError: there is no text, or a file is damaged.
        ConfigError: the vocabulary leaves no room for the markup.
    """
    files = _own_tokenizer(request, target, processes)
    encoder = encoder_of(files)
    maker = ExampleMaker(encoder, target.vocabulary, NUM_TOP)
    examples, held_out = _examples(request, maker, processes, watcher)
    trainer = Trainer(model, request.training, processes)
    checkpoint = request.output / "checkpoint.pt"
    if checkpoint.is_file():
        trainer.restore(checkpoint)
    else:
        count = target.checkpoint.config.num_layers
        start_from_target(
            model,
            target.checkpoint,
            [layer_number(i, count) for i in request.shape.layers],
            encoder.vocabulary,
            encoder_of(target.files),
            target.vocabulary,
        )
    trainer.run(
        examples,
        held_out,
        checkpoint,
        watcher.training if processes.is_first else lambda *_: None,
        lambda best: write_drafter(request.output / "drafter", best, files),
    )
    return trainer.progress


def layer_number(index: int, count: int) -> int:
    """A layer of the target, counted from its start.

    Raises:
        ConfigError: the target has fewer layers.
    """
    if not -count <= index < count:
        raise ConfigError(f"layers names {index}, but the target has {count} layers")
    return index % count


def _own_tokenizer(
    request: DistillRequest, target: DistillTarget, processes: Processes
) -> TokenizerFiles:
    """The drafter's tokenizer, made by the first process once."""
    folder = request.output / "tokenizer"
    if processes.is_first and not folder.is_dir():
        responses = read_responses(text_shards(request))
        texts = (ids for r in responses for ids in (r.prompt_ids, r.token_ids))
        counts = count_tokens(texts)
        size = request.shape.vocab_size
        write_files(folder, train_tokenizer(counts, target.vocabulary, target.files, size))
    processes.wait()
    return read_files(folder)


def _examples(
    request: DistillRequest, maker: ExampleMaker, processes: Processes, watcher: Watcher
) -> tuple[list[Example], list[Example]]:
    """What is learned, and the greedy answers that are held out of it."""
    examples: list[Example] = []
    held_out: list[Example] = []
    shards = text_shards(request)
    done, total = 0, sum(map(shard_tokens, shards))
    for response in read_responses(shards):
        done += len(response.token_ids)
        if processes.is_first:
            watcher.stage("examples", done, total)
        example = maker.make(response, request.max_example_pieces)
        if example is None:
            continue
        if not response.is_held_out:
            examples.append(example)
        elif response.is_greedy:
            held_out.append(example)
    if not examples:
        raise CheckpointError(
            f"{request.output} holds no text to learn from: ask for more --text-tokens"
        )
    return examples, held_out
