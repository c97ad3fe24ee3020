"""A learner for the models of a conversation."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bundle import Bundle
from omnidraft_npu.examples import EqualExampleMaker, ExampleMaker, trie_paths
from omnidraft_npu.manifest_checks import spelling_path
from omnidraft_npu.state_folder import learning

from .learner import Learner, Maker, Tools
from .learner_anchors import Anchors
from .learner_config import NUM_TOP, LearnerConfig
from .learner_judge import Judge
from .lora_trainer import Loss, TrainingStep
from .opened_pair import OpenedModel, OpenedPair
from .past_recall import replay_of


def can_learn(pair: OpenedPair) -> bool:
    """Whether there is a drafter with an adapter, and a graph to train it with."""
    return (
        pair.bundle is not None
        and pair.drafter is not None
        and pair.drafter.entry.training is not None
        and pair.adapter.store is not None
    )


@contextlib.contextmanager
def open_learner(
    pair: OpenedPair, config: LearnerConfig, *, threads: int | None = None
) -> Iterator[Learner]:
    """Learn for a pair, for the block; no other process learns for this target meanwhile.

    Args:
        pair: With `can_learn`.
        config: When and how.
        threads: Threads of one operator of the training graph.

    Raises:
        StateError: another process is learning, or what is learned cannot be written.
        ValueError: the pair cannot learn.
    """
    bundle, drafter, store = pair.bundle, pair.drafter, pair.adapter.store
    training = None if drafter is None else drafter.entry.training
    if bundle is None or drafter is None or training is None or store is None:
        raise ValueError("this pair has no graph to learn with")
    target = pair.target.entry
    buffer = replay_of(bundle, target)
    with learning(bundle.state_root, target.name):
        yield Learner(
            config,
            maker=lambda: maker_of(pair, bundle, drafter),
            buffer=buffer,
            store=store,
            adapter=pair.adapter,
            tools=lambda: _open_tools(drafter, bundle.path(training.path), config.loss, threads),
        )


def _open_tools(drafter: OpenedModel, path: Path, loss: Loss, threads: int | None) -> Tools:
    step = TrainingStep(path, threads=threads)
    step.check(loss)
    judge = Judge(drafter.graph)
    max_pieces = min(step.length, drafter.graph.context_length)
    anchors = Anchors(drafter.tokenizer, judge, max_pieces=max_pieces, num_top=NUM_TOP)
    return Tools(step=step, judge=judge, anchors=anchors)


def maker_of(pair: OpenedPair, bundle: Bundle, drafter: OpenedModel) -> Maker:
    """What makes examples of a target's answers, for the drafter of a bundle."""
    if pair.encoder is None:
        return EqualExampleMaker(num_pieces=drafter.graph.vocab_size, num_top=NUM_TOP)
    target = pair.target
    trie = SpellingTrie.load(
        bundle.path(spelling_path(target.entry)),
        drafter_sha256=drafter.entry.tokenizer_sha256,
        target_sha256=target.entry.tokenizer_sha256,
    )
    trie.check_sizes(num_pieces=drafter.graph.vocab_size, num_targets=target.entry.vocab_size)
    return ExampleMaker(pair.encoder, target.vocabulary, trie_paths(trie), num_top=NUM_TOP)
