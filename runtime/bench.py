"""Measure a target alone and with drafts, on the same prompts in the same run."""

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omnidraft_npu.config import DecodeConfig, DeviceConfig
from omnidraft_npu.memory import peak_rss_bytes
from omnidraft_npu.progress import Report
from omnidraft_npu.statistics import DecodeStats

from .learner_adapter import Adapter
from .opened_pair import DEFAULT_DEVICES, DraftMode, ProposerName
from .session import Session, open_session

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One response to one prompt."""

    token_ids: tuple[int, ...]
    stats: DecodeStats

    @property
    def tokens_per_s(self) -> float:
        """Decode speed; everything but prefill."""
        return self.stats.num_tokens / self.stats.decode_s


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Repeated responses to one prompt under one setting."""

    runs: tuple[Run, ...]
    peak_rss_bytes: int | None
    """Of the process, when the last run had ended."""

    @property
    def median(self) -> Run:
        """The run of median decode speed, the slower of two middle ones."""
        by_speed = sorted(self.runs, key=lambda run: run.tokens_per_s)
        return by_speed[(len(by_speed) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Measurements, prompt by prompt in the order given."""

    alone: tuple[Measurement, ...]
    """The target without a drafter."""
    drafted: dict[int | str, tuple[Measurement, ...]]
    """By draft length, a number or `auto`."""
    earlier: dict[int | str, tuple[Measurement, ...]] | None
    """The same with an earlier adapter, response by response in turn with `drafted`."""
    session: Session
    """The one that drafted; says what ran where."""


def measure(
    bundle: Path,
    encode: "Encode",
    config: DecodeConfig,
    draft_lengths: Mapping[Any, Mapping[str, Any]],
    *,
    target: str | None = None,
    threads: int | None = None,
    proposer: ProposerName = "cascade",
    draft_mode: DraftMode = "auto",
    devices: DeviceConfig = DEFAULT_DEVICES,
    state: Path | None = None,
    earlier: Adapter | None = None,
    repeats: int = 3,
    report: Report,
) -> BenchResult:
    """Decode every prompt `repeats` times with the target alone, then with each draft length.

    The drafter is opened only after the target alone was measured. Every response starts
    from an empty cache, and each setting has a warm-up of a few tokens. Two adapters answer
    every prompt one after the other, so that a machine that gets busier slows both.

    Args:
        bundle: The exported directory.
        encode: Target ids of every prompt, given a session.
        config: Limits; what it says of draft lengths is not used.
        draft_lengths: Every length to measure by its name, with its fields of the config.
        target: Name of the target; None for the bundle's default.
        threads: Threads of one operator.
        proposer, draft_mode: What drafts, and how; see `open_session`.
        devices: Where they run.
        state: Existing folder with the `state/` to use; None for the bundle's own, whose kept
            answers are not drafted from.
        earlier: An adapter to compare with the one in use.
        repeats: Responses to each prompt.
        report: Told of progress.

    Raises:
        BundleError, ConfigError, PromptError: see `open_session` and `Session.generate`.
    """
    session = open_session(
        bundle, target=target, threads=threads, use_drafter=False, devices=devices
    )
    prompts = encode(session)
    (alone,) = _measure_setting([session], prompts, config, repeats, "target alone", report)
    del session
    gc.collect()
    session = open_session(
        bundle,
        target=target,
        threads=threads,
        proposer=proposer,
        draft_mode=draft_mode,
        devices=devices,
        state=state,
    )
    # What is kept in the bundle may answer the very prompts that are measured.
    forgetful = session.pair.without_past()
    if state is None:
        session = Session(forgetful)
    session.make_room(max(map(len, prompts)))  # as `encode` did for the target alone
    sessions = [session]
    if earlier is not None:
        sessions.append(Session(forgetful.with_adapter(earlier)))
    drafted = {
        k: _measure_setting(
            sessions,
            prompts,
            dataclasses.replace(config, **fields),
            repeats,
            f"draft length {k}",
            report,
        )
        for k, fields in draft_lengths.items()
    }
    return BenchResult(
        alone=alone,
        drafted={k: found[0] for k, found in drafted.items()},
        earlier=None if earlier is None else {k: found[1] for k, found in drafted.items()},
        session=session,
    )


class Encode(Protocol):
    """Turns the prompts into ids, once a session with the tokenizer is there."""

    def __call__(self, session: Session) -> list[list[int]]:
        """Target ids of every prompt."""
        ...


def _measure_setting(
    sessions: Sequence[Session],
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    repeats: int,
    stage: str,
    report: Report,
) -> list[tuple[Measurement, ...]]:
    """The measurements of each session, which answer each prompt in turn."""
    few = dataclasses.replace(config, max_new_tokens=min(_WARM_UP_TOKENS, config.max_new_tokens))
    for session in sessions:
        decode_prompt(session, prompts[0], few)
    runs: list[list[list[Run]]] = [[[] for _ in prompts] for _ in sessions]
    total = repeats * len(prompts)
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for session, found in zip(sessions, runs, strict=True):
                found[i].append(decode_prompt(session, prompt, config))
            report(stage, repeat * len(prompts) + i + 1, total)
    peak = peak_rss_bytes()
    return [
        tuple(Measurement(runs=tuple(one), peak_rss_bytes=peak) for one in found) for found in runs
    ]


def decode_prompt(session: Session, prompt: Sequence[int], config: DecodeConfig) -> Run:
    """One response, from an empty cache."""
    session.reset()
    token_ids: list[int] = []
    last = None
    for last in session.generate(prompt, config):
        token_ids += last.token_ids
    assert last is not None, "a response has at least one round"
    return Run(token_ids=tuple(token_ids), stats=last.stats)
