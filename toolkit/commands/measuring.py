"""What `run`, `verify` and `bench` share: prompts, draft lengths, what is said of devices."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..cost_model import VERIFY_LENGTHS
from ..errors import PromptError
from ..printing import echo
from ..prompts import TaskPrompt, builtin_prompts, first_of_each, read_prompts
from .decoding_options import DraftLengthChoice

if TYPE_CHECKING:
    from omnidraft_npu.runtime.session import Session

BUILTIN_PER_TASK = 2
"""Of the eight built-in prompts of a task, how many are used unless more are asked for."""

MAX_VERIFY_LENGTH = max(VERIFY_LENGTHS)


def draft_lengths(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """The numbers of a list like ``1,2,4`` in rising order, each once; a callback of an option."""
    try:
        lengths = tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a number or a list like 1,2,4,8") from error
    if lengths[0] < 1:
        raise click.BadParameter(f"{lengths[0]} is not a draft length: use 1 or more")
    return lengths


def draft_lengths_or_auto(
    ctx: click.Context, param: click.Parameter, value: str
) -> tuple[DraftLengthChoice, ...]:
    """The same where `auto` may be among them; it comes last."""
    parts = [part.strip() for part in value.split(",")]
    fixed = [part for part in parts if part != "auto"]
    lengths: tuple[DraftLengthChoice, ...] = ()
    if fixed:
        lengths = draft_lengths(ctx, param, ",".join(fixed))
    return (*lengths, "auto") if "auto" in parts else lengths


def load_prompts(path: Path | None, per_task: int | None) -> list[TaskPrompt]:
    """The prompts of a file, or of the built-in set, at most `per_task` of each task.

    Raises:
        PromptError: see `read_prompts`.
    """
    if path is not None:
        prompts = read_prompts(path)
        return prompts if per_task is None else first_of_each(prompts, per_task)
    return first_of_each(builtin_prompts(), per_task or BUILTIN_PER_TASK)


def encode_prompts(
    session: "Session", prompts: Sequence[TaskPrompt], *, raw: bool
) -> list[list[int]]:
    """Target ids of every prompt; bare ones where asked for or without a chat template.

    Where `auto` chose an NPU that holds one of them not, the target moves to the CPU for all.

    Raises:
        PromptError: a prompt leaves no room for a response; told before any is decoded.
    """
    if not raw and not session.has_chat_template:
        echo(
            f"{session.target_name} has no chat template: prompts are continued as they are",
            err=True,
        )
        raw = True
    encoded = [session.encode(one.prompt, raw=raw) for one in prompts]
    session.make_room(max(map(len, encoded)))
    graph = session.pair.target.graph
    for i, token_ids in enumerate(encoded):
        if len(token_ids) >= graph.context_length:
            raise PromptError(
                f"prompt {i + 1} has {len(token_ids)} tokens and the context holds "
                f"{graph.context_length}: leave it out, or {graph.more_room}"
            )
    return encoded


def tell_devices(session: "Session", draft_tokens: int) -> None:
    """Report what runs on the CPU and why, a `state/` that is not used, and too long drafts."""
    pair = session.pair
    if pair.notice:
        echo(pair.notice, err=True)
    if pair.state_problem:
        echo(f"decoding without what was learned: {pair.state_problem}", err=True)
    length = pair.target.graph.pass_length
    if pair.proposer is None or length is None or draft_tokens < length:
        return
    longer = min(draft_tokens + 1, MAX_VERIFY_LENGTH)
    echo(
        f"--draft-length {draft_tokens}: the NPU's graph verifies {length - 1} drafts in a pass "
        f"and more take several: use --draft-length {length - 1}"
        + (f", or export with --verify-length {longer}" if longer > length else ""),
        err=True,
    )
