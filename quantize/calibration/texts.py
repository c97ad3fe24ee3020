"""Calibration text as windows of token ids: the built-in prompts, or the user's own file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import PromptError
from omnidraft_npu.prompts import (
    TaskPrompt,
    builtin_prompts,
    calibration_prompts,
    read_prompts,
)
from omnidraft_npu.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

_HOLD_OUT_EVERY = 8
_ENOUGH_TO_JUDGE = 4000
"""Tokens held out; from fewer, a measured loss would be chance."""


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """Token windows to calibrate on, and others to judge the result by."""

    source: str
    """Name of the file, or of the built-in set."""
    num_prompts: int
    """Prompts calibrated on."""
    num_tokens: int
    """Of those prompts; the windows repeat some to be full."""
    windows: Ids
    """``[n, length]``; every window is full and begins as a sequence of the model does."""
    held_out: Ids
    """``[m, length]`` of prompts that are not in `windows`."""


def read_calibration_prompts(path: Path | None) -> list[TaskPrompt]:
    """The prompts of a file; the built-in ones with None.

    Args:
        path: As `read_prompts` takes it, except that a ``.txt`` file is a prompt a paragraph:
            empty lines part them.

    Raises:
        PromptError: it is missing, empty, not UTF-8, or a row is no prompt.
    """
    if path is None:
        return calibration_prompts()
    prompts = read_prompts(path)
    if path.suffix != ".txt":
        return prompts
    paragraphs = "\n".join(prompts[0].prompt.splitlines()).split("\n\n")
    return [TaskPrompt(prompt=part.strip("\n")) for part in paragraphs if part.strip()]


def calibration_text(
    path: Path | None, tokenizer: Tokenizer, *, context_length: int, window: int
) -> CalibrationText:
    """Windows of a file's prompts, every eighth prompt held out.

    Where those are few tokens, prompts that `bench` has built in are judged by as well; a file
    of fewer than eight prompts is calibrated on whole.

    Args:
        path: see `read_calibration_prompts`.
        tokenizer: of the model.
        context_length: Most tokens a prompt of the file may have; built-in ones are cut.
        window: Tokens of a window.

    Raises:
        PromptError: the file cannot be used, or a prompt is longer than the context.
    """
    where = "the built-in calibration prompts" if path is None else str(path)
    prompts = read_calibration_prompts(path)
    limit = None if path is None else context_length
    encoded = [
        _encode(prompt.prompt, tokenizer, limit, f"{where}: prompt {number}")
        for number, prompt in enumerate(prompts, start=1)
    ]
    held_out = encoded[_HOLD_OUT_EVERY - 1 :: _HOLD_OUT_EVERY]
    del encoded[_HOLD_OUT_EVERY - 1 :: _HOLD_OUT_EVERY]
    for row in builtin_prompts():
        if sum(map(len, held_out)) < _ENOUGH_TO_JUDGE:
            held_out.append(tokenizer.encode(row.prompt, add_special=False))
    between = tokenizer.encode("\n\n", add_special=False)
    windows, others = (
        _windows(ids, between, tokenizer.bos_token_id, window) for ids in (encoded, held_out)
    )
    return CalibrationText(
        source="built-in" if path is None else path.name,
        num_prompts=len(encoded),
        num_tokens=sum(map(len, encoded)),
        windows=windows,
        held_out=others,
    )


def _encode(text: str, tokenizer: Tokenizer, context_length: int | None, where: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special=False)
    if context_length is not None and len(ids) > context_length:
        raise PromptError(
            f"{where} has {len(ids)} tokens, more than the context of {context_length}: "
            "shorten it, or use a larger --htp-context-length where the model allows one"
        )
    return ids


def _windows(
    prompts: Sequence[Sequence[int]], between: Sequence[int], bos: int | None, window: int
) -> Ids:
    """The prompts in one row, cut into windows; the last is filled up from the beginning.

    No window is padded, so that whatever a window's run shows is of real text.
    """
    row: list[int] = []
    for ids in prompts:
        row += [*ids, *between]
    first = [] if bos is None else [bos]
    text = window - len(first)
    count = -(-len(row) // text)
    row = (row * (1 + count * text // len(row)))[: count * text]
    cut = np.array(row, np.int64).reshape(count, text)
    return np.concatenate([np.tile(np.array(first, np.int64), (count, 1)), cut], axis=1)
