"""`omnidraft-npu verify`: is drafted text the target's own?"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from .measuring import DraftLengths, encode_prompts, load_prompts
from .progress import stage_progress

if TYPE_CHECKING:
    from omnidraft_npu.runtime.session import Session
    from omnidraft_npu.runtime.verify import Difference, Outcome, PromptCheck

    from ..prompts import TaskPrompt

EXIT_MISMATCH = 3


@click.command(name="verify")
@click.option("-b", "--bundle", required=True, type=click.Path(path_type=Path))
@click.option("--target", help="Which target of the bundle [default: its first].")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help='Rows {"prompt", "task"} in a JSONL file, or one prompt in a .txt [default: built-in].',
)
@click.option("--per-task", type=click.IntRange(min=1), help="At most so many prompts of a task.")
@click.option("--max-new-tokens", default=48, show_default=True, help="Most tokens per response.")
@click.option(
    "--draft-tokens",
    type=DraftLengths(),
    default="4",
    show_default=True,
    help="Draft lengths to try, as in 1,2,4,8.",
)
@click.option("--threads", type=int, help="Threads of one operator [default: physical cores].")
@click.option("--raw", is_flag=True, help="Give the model bare prompts, without a chat template.")
@click.option(
    "--tie-tolerance",
    default=0.01,
    show_default=True,
    help="A logit gap up to this part of the row's range is a near-tie.",
)
@click.option("--strict", is_flag=True, help="Let near-ties fail too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(
    ctx: click.Context,
    bundle: Path,
    target: str | None,
    prompts_file: Path | None,
    per_task: int | None,
    max_new_tokens: int,
    draft_tokens: tuple[int, ...],
    threads: int | None,
    raw: bool,
    tie_tolerance: float,
    strict: bool,
    as_json: bool,
) -> None:
    """Decode prompts with and without the drafter and compare the responses token for token.

    At a first difference the report names the prompt, the position, both tokens and the gap
    between their logits in the plain run. A gap within the tolerance is a near-tie, which
    another order of summation may flip: it is reported and passes, unless --strict is given.
    On the CPU provider the graphs that `export` builds score a token with the same bits
    alone and among drafts, so there not even near-ties should be seen. Any other difference
    is a bug, as are logits that are NaN and a target that does not see its prompt.

    Exit code 0: all equal, or near-ties only; 3: a mismatch.

    \b
    Examples:
      omnidraft-npu verify -b bundle
      omnidraft-npu verify -b bundle --prompts mine.jsonl --draft-tokens 1,4,8 --json
    """
    from ..config import DecodeConfig

    if not 0 <= tie_tolerance < 1:
        raise ConfigError(
            f"tie_tolerance is {tie_tolerance}, must be at least 0 and below 1: "
            "use --tie-tolerance 0.01"
        )
    config = DecodeConfig(max_new_tokens=max_new_tokens)
    prompts = load_prompts(prompts_file, per_task)

    from omnidraft_npu.runtime.session import open_session
    from omnidraft_npu.runtime.verify import check_greedy, find_blindness

    session = open_session(bundle, target=target, threads=threads)
    encoded = encode_prompts(session, prompts, raw=raw)
    blindness = find_blindness(session.pair, encoded)
    checks = []
    with stage_progress() as report:
        for check in check_greedy(
            session.pair, encoded, config, draft_tokens, tie_tolerance=tie_tolerance
        ):
            checks.append(check)
            report("greedy, prompts compared", len(checks), len(prompts))
    outcome = _worst([*(c.outcome for c in checks), "bug" if blindness else "equal"])
    if as_json:
        document = {
            "schema_version": 1,
            "outcome": outcome,
            "target": session.target_name,
            "target_provider": session.target_provider,
            "draft_provider": session.draft_provider,
            "draft_tokens": draft_tokens,
            "max_new_tokens": max_new_tokens,
            "tie_tolerance": tie_tolerance,
            "blindness": blindness,
            "prompts": [_row(p, c) for p, c in zip(prompts, checks, strict=True)],
        }
        click.echo(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        _print_report(session, prompts, checks, blindness)
    if outcome == "bug" or (strict and outcome == "near-tie"):
        ctx.exit(EXIT_MISMATCH)


def _worst(outcomes: "list[Outcome]") -> "Outcome":
    order: tuple[Outcome, ...] = ("equal", "near-tie", "bug")
    return max(outcomes, key=order.index)


def _row(prompt: "TaskPrompt", check: "PromptCheck") -> dict[str, Any]:
    return {
        "prompt": prompt.prompt,
        "task": prompt.task,
        "outcome": check.outcome,
        "num_tokens": check.num_tokens,
        "num_broken_rows": check.num_broken,
        "differences": [dataclasses.asdict(d) for d in check.differences],
    }


def _print_report(
    session: "Session",
    prompts: "list[TaskPrompt]",
    checks: "list[PromptCheck]",
    blindness: str | None,
) -> None:
    for prompt, check in zip(prompts, checks, strict=True):
        where = f"prompt {check.index + 1} ({_shorten(prompt.prompt)})"
        if check.num_broken:
            click.echo(f"{where}: bug: {check.num_broken} rows of logits hold NaN or infinity")
        for difference in check.differences:
            click.echo(f"{where}, {_describe(session, difference)}")
    if blindness:
        click.echo(f"bug: {blindness}: its graph or its cache is broken, export it again")
    tokens = sum(check.num_tokens for check in checks)
    counts = {
        name: sum(check.outcome == name for check in checks)
        for name in ("equal", "near-tie", "bug")
    }
    click.echo(
        f"{len(checks)} prompts, {tokens} tokens: {counts['equal']} equal, "
        f"{counts['near-tie']} parted at a near-tie, {counts['bug']} wrong"
    )


def _describe(session: "Session", difference: "Difference") -> str:
    tokenizer = session.pair.target.tokenizer

    def name(token_id: int | None) -> str:
        if token_id is None:
            return "nothing"
        text = tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")
        return f"{text!r} ({token_id})"

    where = (
        f"draft length {difference.draft_tokens}, token {difference.position + 1}: plain "
        f"{name(difference.plain_token)}, drafted {name(difference.drafted_token)}"
    )
    if difference.logit_gap is None:
        return f"{where}: bug, one response ended"
    verdict = "near-tie" if difference.is_near_tie else "bug"
    return (
        f"{where}, logit gap {difference.logit_gap:.4g} of a range of "
        f"{difference.logit_range:.4g}: {verdict}"
    )


def _shorten(text: str, length: int = 40) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= length else line[: length - 1] + "…")
