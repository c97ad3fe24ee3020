"""`omnidraft-npu distill`: train a small drafter for a target."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..printing import echo
from ..prompts import TaskPrompt, read_prompts

if TYPE_CHECKING:
    from omnidraft_npu.quantize.distillation.training import Progress


@click.command(name="distill")
@click.option("--target", required=True, help="Model to draft for: name, hub id or path.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of the run; the drafter comes to lie in `drafter` there.",
)
@click.option(
    "--prompts",
    "prompt_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="JSON lines with `prompt` and `task` for the target to answer, instead of built-in ones.",
)
@click.option(
    "--corpus",
    multiple=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text for the target to read; may be repeated.",
)
@click.option(
    "--text-tokens",
    type=int,
    default=1_000_000,
    show_default=True,
    help="Tokens that the target writes; all answers that were begun are finished.",
)
@click.option(
    "--max-new-tokens", type=int, default=320, show_default=True, help="Most tokens of an answer."
)
@click.option(
    "--batch-size",
    type=int,
    default=64,
    show_default=True,
    help="Answers written side by side, at most 256; a GPU is faster with more.",
)
@click.option(
    "--hours",
    type=float,
    help="Most wall time of training, earlier runs included; writing the text comes before it.",
)
@click.option(
    "--max-pieces",
    type=int,
    default=20_000_000,
    show_default=True,
    help="Pieces to train on, repetitions included.",
)
@click.option("--vocab-size", type=int, default=8192, show_default=True)
@click.option(
    "--layers",
    default="0,1,-1",
    show_default=True,
    help="Layers of the target that the drafter's begin as.",
)
@click.option("--intermediate-size", type=int, default=768, show_default=True)
@click.option("--learning-rate", type=float, default=1e-3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on with the run in the folder.")
def command(
    target: str,
    output: Path,
    prompt_files: tuple[Path, ...],
    corpus: tuple[Path, ...],
    text_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    hours: float | None,
    max_pieces: int,
    vocab_size: int,
    layers: str,
    intermediate_size: int,
    learning_rate: float,
    seed: int,
    resume: bool,
) -> None:
    """Train a drafter with its own vocabulary, for a target and any other.

    The target answers prompts and reads the corpus; a vocabulary is learned from that text;
    a few of the target's layers are trained to say what the target would say. The best
    drafter by held-out acceptance is kept. Several processes or GPUs: torchrun.

    \b
    Examples:
      omnidraft-npu distill --target smollm2-135m -o run --hours 3
      omnidraft-npu distill --target smollm2-135m -o run --hours 6 --resume
    """
    from omnidraft_npu.quantize.distillation.requirements import parse_layers, require_torch

    from ..activity import at_work

    click.get_current_context().with_resource(at_work())
    require_torch()
    prompts: list[TaskPrompt] = [p for path in prompt_files for p in read_prompts(path)]

    from omnidraft_npu.quantize.distillation.target import open_teacher
    from omnidraft_npu.store.local import resolve_model

    # Refused here if it cannot be one: importing torch takes longer than reading a header.
    path = resolve_model(target)
    open_teacher(path)

    from omnidraft_npu.quantize.distillation.distill import distill
    from omnidraft_npu.quantize.distillation.request import DistillRequest, DrafterShape
    from omnidraft_npu.quantize.distillation.training import TrainingConfig

    request = DistillRequest(
        target=path,
        output=output,
        prompts=tuple(prompts),
        corpus=corpus,
        text_tokens=text_tokens,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        shape=DrafterShape(
            vocab_size=vocab_size,
            layers=parse_layers(layers),
            intermediate_size=intermediate_size,
        ),
        training=TrainingConfig(
            max_pieces=max_pieces, max_hours=hours, learning_rate=learning_rate, seed=seed
        ),
        resume=resume,
    )
    try:
        progress = distill(request, _Lines())
    except KeyboardInterrupt:
        echo(f"whole parts are kept in {output}: go on with --resume", err=True)
        raise
    if progress is None:
        return
    best = ", too little text to measure it by"
    if progress.best >= 0:
        best = f", best held-out acceptance {progress.best:.3f} (mean over tasks)"
    drafter = shlex.quote(str(output / "drafter"))
    echo(
        f"{drafter}: {progress.step} steps, {progress.seen_pieces} pieces{best}. "
        f"Next: omnidraft-npu export --drafter {drafter} --target {shlex.quote(target)} -o bundle",
        err=True,
    )


class _Lines:
    """Lines on stderr for every stage: at once, then ever more rarely, and when it is done."""

    def __init__(self) -> None:
        self._stages: dict[str, _Shown] = {}
        self._looks = 0

    def stage(self, name: str, done: int, total: int) -> None:
        """Items done of a stage, and their total."""
        shown = self._stages.setdefault(name, _Shown(done))
        rate = shown.rate(done)
        if not (shown.is_due() or done >= total > shown.last):
            return
        shown.last = done
        left = f", {rate:.0f} a second, {_left((total - done) / rate)}" if rate > 0 else ""
        unit = _UNITS.get(name, "")
        echo(f"{name}: {done:,} of {total:,}{unit}{left if done < total else ''}", err=True)

    def training(self, progress: "Progress", loss: float, seconds_left: float) -> None:
        """Loss, the last held-out acceptance, time left."""
        shown = self._stages.setdefault("training", _Shown(0))
        is_new = len(progress.curve) != self._looks
        if not (shown.is_due() or is_new or seconds_left <= 0):
            return
        self._looks = len(progress.curve)
        echo(
            f"training: step {progress.step}, {progress.seen_pieces:,} pieces, loss {loss:.3f}"
            f"{_acceptance(progress)}, {_left(seconds_left)}",
            err=True,
        )


class _Shown:
    """When a stage was first and last shown."""

    def __init__(self, done: int) -> None:
        self.last = -1
        """Items that were done when it was last shown."""
        self._next = 0.0
        self._start(done)

    def _start(self, done: int) -> None:
        self._first, self._begin, self._is_running = done, time.monotonic(), False

    def is_due(self) -> bool:
        """Whether to show it again: after 5 seconds at first, after a minute later on."""
        now = time.monotonic()
        is_due = now >= self._next
        if is_due:
            self._next = now + min(60.0, max(5.0, (now - self._begin) / 5))
        return is_due

    def rate(self, done: int) -> float:
        """Items a second since the first of them came; 0 where that is not known yet."""
        if not self._is_running and done > self._first:
            self._start(done)
            self._is_running = True
        seconds = time.monotonic() - self._begin
        return (done - self._first) / seconds if seconds > 1 else 0.0


_UNITS = {"text": " tokens", "examples": " tokens", "corpus": " parts"}


def _left(seconds: float) -> str:
    if seconds < 1:
        return "finishing"
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


def _acceptance(progress: "Progress") -> str:
    if not progress.curve:
        return ""
    last = progress.curve[-1]
    tasks = [f"{name} {value:.2f}" for name, value in last.items() if name not in _NOT_TASKS]
    return f", held-out acceptance {', '.join(tasks)}"


_NOT_TASKS = ("step", "pieces", "seconds", "loss")
