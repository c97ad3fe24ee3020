"""Prompts to measure and to verify with: the user's own file, or the built-in set."""

import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .documents import Text, parse_document
from .errors import PromptError
from .prompt_text import decode_prompt, read_prompt_file, without_line_end

BUILTIN_FILE = "bench_prompts.jsonl"
CALIBRATION_FILE = "calibration_prompts.jsonl"
NO_TASK = "other"
"""Task of a prompt whose row names none."""
RESERVED_TASK = "all"
"""The name of the summary over every task."""


@dataclass(frozen=True, kw_only=True)
class TaskPrompt:
    """One prompt and the task that its results are grouped under."""

    prompt: Text
    task: Text = NO_TASK

    def __post_init__(self) -> None:
        if self.task == RESERVED_TASK:
            raise ValueError(f"'task' must be another text than {RESERVED_TASK!r}")


def builtin_prompts() -> list[TaskPrompt]:
    """Eight short prompts each for chat, maths, code and summarising, written for this project."""
    return _packaged(BUILTIN_FILE)


def calibration_prompts() -> list[TaskPrompt]:
    """The prompts that models are calibrated with, of all kinds, written for this project."""
    return _packaged(CALIBRATION_FILE)


def read_prompts(path: Path) -> list[TaskPrompt]:
    """The prompts of a file, in its order.

    Args:
        path: UTF-8. A `.txt` file is one prompt, less one line end after it; any other has a
            JSON object a line, with `prompt` and, where results are to be grouped, `task`. Empty
            lines are skipped.

    Raises:
        PromptError: the file is missing, not UTF-8 or holds no prompt, or a row is not such
            an object; the message names its line.
    """
    text = decode_prompt(read_prompt_file(path), str(path))
    if path.suffix == ".txt":
        prompts = [TaskPrompt(prompt=without_line_end(text))] if text.strip() else []
    else:
        prompts = list(_read_rows(text, str(path)))
    if not prompts:
        row = "some text" if path.suffix == ".txt" else 'a line like {"prompt": "…"}'
        raise PromptError(f"{path} holds no prompt: write {row} into it")
    return prompts


def first_of_each(prompts: Sequence[TaskPrompt], num_prompts: int) -> list[TaskPrompt]:
    """The first `num_prompts` of every task, in the order given."""
    kept: list[TaskPrompt] = []
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.task] = counts.get(prompt.task, 0) + 1
        if counts[prompt.task] <= num_prompts:
            kept.append(prompt)
    return kept


def _read_rows(text: str, where: str) -> Iterator[TaskPrompt]:
    # Not splitlines: JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _read_row(line, f"{where}, line {number}")


def _read_row(line: str, where: str) -> TaskPrompt:
    advice = 'a row is an object like {"prompt": "…", "task": "…"}'
    return parse_document(line, TaskPrompt, where, error=PromptError, advice=advice)


def _packaged(name: str) -> list[TaskPrompt]:
    file = importlib.resources.files("omnidraft_npu.calib_data") / name
    return list(_read_rows(file.read_text(encoding="utf-8"), name))
