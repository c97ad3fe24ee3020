"""Answers that are kept to learn from: each becomes an example in the bundle's `state/`."""

import contextlib
import logging
from collections.abc import Callable

from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bundle import Bundle
from omnidraft_npu.errors import StateError
from omnidraft_npu.examples import EqualExampleMaker, ExampleMaker, trie_paths
from omnidraft_npu.manifest_checks import spelling_path
from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.state_folder import learning

from .learner_config import NUM_TOP, LearnerConfig
from .learner_recorder import Answer
from .opened_pair import OpenedModel, OpenedPair
from .past_recall import replay_of

logger = logging.getLogger(__name__)

Maker = ExampleMaker | EqualExampleMaker


class AnswerKeeper:
    """Observes a session and keeps its answers; `answer_keeper` makes one.

    Any number of processes may keep answers of one target, also while one is learning.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        maker: Callable[[], Maker],
        buffer: ReplayBuffer,
        changing: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Join the parts.

        Args:
            config: Which answers are kept, and how much of what led to them.
            maker: Gives what turns answers into examples; called for the first answer.
            buffer: Where examples are kept.
            changing: Entered while one is added.
        """
        self._config, self._open_maker = config, maker
        self._maker: Maker | None = None
        self._buffer, self._changing = buffer, changing
        self._has_failed = False

    def observe(self, answer: Answer) -> bool:
        """Keep an answer as an example; whether it was long enough, and could be kept."""
        if len(answer.laws.token_ids) < self._config.min_tokens:
            return False
        self._maker = self._maker or self._open_maker()
        example = self._maker.make(
            answer.prompt_ids, answer.laws, max_context=self._config.max_context
        )
        if example is None:
            return False
        try:
            with self._changing():
                self._buffer.append(example)
        except (OSError, StateError) as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("not learning from this answer: %s", error)
            return False
        return True


def can_learn(pair: OpenedPair) -> bool:
    """Whether there is a drafter with an adapter, and a graph to train it with."""
    return (
        pair.bundle is not None
        and pair.drafter is not None
        and pair.drafter.entry.training is not None
        and pair.adapter.store is not None
    )


def answer_keeper(pair: OpenedPair, config: LearnerConfig) -> AnswerKeeper:
    """What keeps the answers of a pair with `can_learn`.

    Raises:
        ValueError: the pair cannot learn.
    """
    bundle, drafter, target = pair.bundle, pair.drafter, pair.target.entry
    if not can_learn(pair) or bundle is None or drafter is None:
        raise ValueError("this pair has no graph to learn with")
    return AnswerKeeper(
        config,
        maker=lambda: maker_of(pair, bundle, drafter),
        buffer=replay_of(bundle, target),
        changing=lambda: learning(bundle.state_root, target.name),
    )


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
