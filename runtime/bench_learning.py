"""Learn from a stream of prompts while it is measured, and tell what came of it in JSON."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.prompts import TaskPrompt
from omnidraft_npu.state_folder import only_learner
from omnidraft_npu.statistics import DecodeStats

from .answer_keeper import answer_keeper
from .bench import Run, decode_prompt
from .learner_config import LearnerConfig
from .learner_lesson import Lesson
from .learner_opening import open_learner
from .lora_trainer import Loss, TrainingStep
from .session import Session

WINDOW = 16
"""Prompts of the stream that a point of the curve is about."""

_COMPARED = ("conditional_acceptance", "mean_acceptance_length", "speedup")


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A prompt that was answered and learned from."""

    run: Run
    version: int
    """Of the adapter that drafted the answer."""
    lesson: Lesson | None
    """What followed the answer."""


def check_can_learn(path: Path, target: str | None, state: Path | None, loss: Loss) -> None:
    """Fail before anything is measured.

    Args:
        path: The bundle.
        target: Name of the target; None for the bundle's default.
        state: Existing folder with the `state/` to use; None for the bundle's own.
        loss: To be made smaller.

    Raises:
        BundleError: the training graph cannot be opened.
        ConfigError: the drafter was exported without a training graph, or with one that lacks
            the loss, or there is no such target.
        StateError: another process is learning there, or it cannot be written.
    """
    bundle = open_bundle(path)
    training = bundle.manifest.drafter.training
    if training is None:
        raise ConfigError(
            f"the drafter of {path} cannot learn: export the bundle with --lora-rank 16"
        )
    TrainingStep(bundle.path(training.path)).check(loss)
    with only_learner(state or path, bundle.target(target).name):
        pass


def stream(
    session: Session,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    learner_config: LearnerConfig,
    *,
    threads: int | None = None,
) -> Iterator[Streamed]:
    """Answer prompt by prompt, and learn from the answers when there are enough.

    Args:
        session: Of a pair that can learn; its state is written to.
        prompts: Target ids of each.
        config: Limits.
        learner_config: When it learns, and how.
        threads: Threads of one operator of the training graph.

    Raises:
        StateError: another process is learning, or what is learned cannot be written.
    """
    with contextlib.ExitStack() as ending:
        learner = ending.enter_context(open_learner(session.pair, learner_config, threads=threads))
        session.observer = answer_keeper(session.pair, learner_config)
        ending.callback(setattr, session, "observer", None)
        for prompt in prompts:
            version = session.pair.adapter.adapter.version
            run = decode_prompt(session, prompt, config)
            yield Streamed(run=run, version=version, lesson=learner.step())


def stream_to_json(prompts: Sequence[TaskPrompt], streamed: Sequence[Streamed]) -> dict[str, Any]:
    """The curve over the stream, its prompts and its lessons.

    Args:
        prompts: Of the stream; those after the streamed ones were not come to.
        streamed: What came of them.
    """
    pairs = list(zip(prompts, streamed, strict=False))
    return {
        "num_prompts": len(prompts),
        "num_streamed": len(streamed),
        "windows": [
            _window(start, pairs[start : start + WINDOW]) for start in range(0, len(pairs), WINDOW)
        ],
        "lessons": [
            {"after_prompts": number, **_lesson_to_json(one.lesson)}
            for number, one in enumerate(streamed, start=1)
            if one.lesson is not None
        ],
        "stream": [
            {
                "prompt": prompt.prompt,
                "task": prompt.task,
                "version": one.version,
                "num_tokens": one.run.stats.num_tokens,
                **_figures(one.run.stats),
            }
            for prompt, one in pairs
        ],
    }


def window_figures(streamed: Sequence[Streamed]) -> dict[str, Any]:
    """Acceptance and speed over some prompts of the stream."""
    return _figures(DecodeStats.sum(one.run.stats for one in streamed))


def compared(
    before: dict[str, Any], after: dict[str, Any] | None, draft_tokens: str
) -> dict[str, Any]:
    """Acceptance and speed-up by task, before and after, at one draft length.

    Args:
        before, after: Summaries of `bench_report`; None where there is no after.
        draft_tokens: The length, as the summaries name it.
    """

    def figures(summary: dict[str, Any], task: str) -> dict[str, Any]:
        row = summary[task]["by_draft_tokens"][draft_tokens]
        return {name: row[name] for name in _COMPARED}

    return {
        task: {
            "before": figures(before, task),
            "after": None if after is None else figures(after, task),
        }
        for task in before
    }


def _window(start: int, pairs: Sequence[tuple[TaskPrompt, Streamed]]) -> dict[str, Any]:
    return {
        "first": start + 1,
        "last": start + len(pairs),
        "tasks": sorted({prompt.task for prompt, _ in pairs}),
        "version": pairs[-1][1].version,
        **window_figures([one for _, one in pairs]),
    }


def _figures(stats: DecodeStats) -> dict[str, Any]:
    named = stats.to_json()
    return {name: named[name] for name in (*_COMPARED[:2], "decode_tokens_per_s")}


def _lesson_to_json(lesson: Lesson) -> dict[str, Any]:
    document = dataclasses.asdict(lesson)
    for name in ("base", "before", "after"):
        judged = getattr(lesson, name)
        if judged is not None:
            document[name]["mean"] = judged.mean
    return document
