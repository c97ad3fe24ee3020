"""`bench --learn`: held-out prompts before, a stream that is learned from, and after."""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError
from ..printing import echo
from ..prompts import TaskPrompt
from .measuring import encode_prompts
from .progress import stage_progress
from .tables import table_console

if TYPE_CHECKING:
    from omnidraft_npu.runtime.bench import BenchResult
    from omnidraft_npu.runtime.bench_learning import Streamed
    from omnidraft_npu.runtime.learner_adapter import Adapter
    from omnidraft_npu.runtime.lora_trainer import Loss
    from omnidraft_npu.runtime.session import Session

    from ..config import DecodeConfig


def check_apart(learned: Sequence[TaskPrompt], held_out: Sequence[TaskPrompt]) -> None:
    """Let no prompt be learned from that is measured with.

    Raises:
        PromptError: some are.
    """
    shared = {one.prompt for one in learned} & {one.prompt for one in held_out}
    if shared:
        raise PromptError(
            f"{len(shared)} prompts of --learn are among those to measure with, which would then "
            f"not be held out: leave them out, the first is {min(shared)[:60]!r}"
        )


@contextlib.contextmanager
def learning_state(*, is_kept: bool) -> Iterator[Path | None]:
    """Folder for what is learned, removed after the block; None, the bundle's own, if kept."""
    if is_kept:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="omnidraft-learn-") as folder:
        yield Path(folder)


def measure_learning(
    measure: "Callable[[Adapter | None], BenchResult]",
    report: "Callable[[BenchResult], dict[str, Any]]",
    open_stream: Callable[[], "Session"],
    prompts: Sequence[TaskPrompt],
    config: Callable[[str], "DecodeConfig"],
    *,
    loss: "Loss",
    threads: int | None,
    raw: bool,
) -> dict[str, Any]:
    """The document of `bench` before learning, and what learning made of it under `learning`.

    Ctrl-C ends the stream early, what was learned so far is measured; a second one leaves that
    out too.

    Args:
        measure: Of the held-out prompts with the adapter in use, and in turn with an earlier one.
        report: The document of what was measured, with `rows` and `summary`.
        open_stream: Opens the session that learns.
        prompts: To learn from, in this order.
        config: Limits for a draft length, by its name.
        loss: What learning makes smaller.
        threads: Threads of one operator.
        raw: Bare prompts.
    """
    from omnidraft_npu.runtime.bench_learning import compared, stream, stream_to_json
    from omnidraft_npu.runtime.learner_config import LearnerConfig

    document = report(measure(None))
    length = str(document["summary"]["all"]["draft_tokens"])
    session = open_stream()
    earlier = session.pair.adapter.adapter
    ids = encode_prompts(session, prompts, raw=raw)
    streamed: list[Streamed] = []
    started = time.perf_counter()
    try:
        coming = stream(session, ids, config(length), LearnerConfig(loss=loss), threads=threads)
        _follow(coming, len(prompts), streamed)
    except KeyboardInterrupt:
        echo(
            f"the stream ends after {len(streamed)} of {len(prompts)} prompts: what was learned "
            "is measured now, another Ctrl-C leaves that out",
            err=True,
        )
    seconds = time.perf_counter() - started
    del session
    before, after = document, None
    try:
        result = measure(earlier)
    except KeyboardInterrupt:
        echo("what was learned is not measured", err=True)
    else:
        assert result.earlier is not None, "an earlier adapter was measured too"
        before = report(dataclasses.replace(result, drafted=result.earlier))
        after = report(result)
    document["learning"] = {
        "draft_tokens": document["summary"]["all"]["draft_tokens"],
        "seconds": seconds,
        "tasks": compared(before["summary"], after and after["summary"], length),
        "before": after and _measured(before),
        "after": after and _measured(after),
        **stream_to_json(prompts, streamed),
    }
    return document


def _measured(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in ("rows", "summary")}


def _follow(one_by_one: "Iterator[Streamed]", total: int, streamed: "list[Streamed]") -> None:
    """Collect what comes of the prompts, and tell how it goes."""
    from omnidraft_npu.runtime.bench_learning import WINDOW, window_figures

    started = time.perf_counter()
    with stage_progress() as report:
        for one in one_by_one:
            streamed.append(one)
            done = len(streamed)
            if one.lesson is not None:
                echo(f"prompt {done}: {one.lesson}", err=True)
            if done % WINDOW == 0 or done == total:
                latest = streamed[(done - 1) // WINDOW * WINDOW :]
                left = (time.perf_counter() - started) / done * (total - done)
                figures = _figures(window_figures(latest))
                echo(f"{done} of {total}: {figures}; {left / 60:.0f} min left", err=True)
            report("learning", done, total)


def print_learning(document: dict[str, Any]) -> None:
    """Tables of before and after, and of the curve."""
    from rich.table import Table

    from ..plots import title_of

    found = document["learning"]
    title = f"{title_of(document['environment'])}, before and after {found['num_streamed']} prompts"
    table = Table(title=f"{title}, draft length {found['draft_tokens']}")
    table.add_column("task")
    for name in ("of tested", "tokens a round", "speed-up"):
        table.add_column(name, justify="right")
        table.add_column("after", justify="right")
    for task, row in found["tasks"].items():
        before, after = row["before"], row["after"] or {}
        cells = []
        for name, form in (
            ("conditional_acceptance", "{:.1%}"),
            ("mean_acceptance_length", "{:.2f}"),
            ("speedup", "{:.2f}x"),
        ):
            cells += [_shown(form, one.get(name)) for one in (before, after)]
        table.add_row(task, *cells)
    curve = Table(title="over the stream")
    for name in ("prompts", "of tested", "tokens a round", "tok/s", "adapter"):
        curve.add_column(name, justify="right")
    for window in found["windows"]:
        curve.add_row(
            f"{window['first']}-{window['last']}",
            _shown("{:.1%}", window["conditional_acceptance"]),
            _shown("{:.2f}", window["mean_acceptance_length"]),
            _shown("{:.1f}", window["decode_tokens_per_s"]),
            f"v{window['version']:04}",
        )
    console = table_console()
    console.print(table)
    console.print(curve)


def _figures(row: dict[str, Any]) -> str:
    accepted = _shown("{:.1%}", row["conditional_acceptance"])
    return f"{accepted} of tested accepted, {_shown('{:.1f}', row['decode_tokens_per_s'])} tok/s"


def _shown(form: str, value: float | None) -> str:
    return "–" if value is None else form.format(value)
