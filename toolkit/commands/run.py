"""`omnidraft-npu run`: answer a prompt."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError, PromptError
from ..printing import echo, echo_json, echo_model_text
from ..prompt_text import decode_prompt, read_prompt_file, read_stream, without_line_end
from .decoding_options import (
    bundle_options,
    device_options,
    draft_length_fields,
    draft_length_option,
    drafting_options,
    model_sampling_options,
    repeatable_draft_length,
    threads_option,
)
from .learning import keep_answers, learn_later, learn_now
from .measuring import tell_devices

if TYPE_CHECKING:
    from omnidraft_npu.runtime.opened_pair import DraftMode, ProposerName
    from omnidraft_npu.runtime.session import Delta, Session

    from ..config import DecodeConfig, DeviceConfig
    from .decoding_options import DraftLengthChoice


@click.command(name="run")
@click.argument("prompt", required=False)
@click.option(
    "-f",
    "--prompt-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read the prompt from a UTF-8 file.",
)
@bundle_options
@click.option("--max-new-tokens", default=128, show_default=True, help="Most tokens to write.")
@draft_length_option
@drafting_options
@model_sampling_options
@device_options
@threads_option
@click.option(
    "--raw",
    is_flag=True,
    help="Give the model the bare prompt, without a chat template; control tokens are parsed.",
)
@click.option(
    "--parse-special",
    is_flag=True,
    help="Let text of the prompt that spells a control token be that token.",
)
@click.option("--no-draft", is_flag=True, help="Decode with the target alone.")
@click.option(
    "--no-learn",
    is_flag=True,
    help="Use and keep nothing that is learned: neither read nor write the bundle's `state/`.",
)
@click.option(
    "--learn-now",
    "learns_now",
    is_flag=True,
    help="Learn from the kept answers before the command ends, not in the background.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
def command(
    prompt: str | None,
    prompt_file: Path | None,
    bundle: Path | None,
    target: str | None,
    max_new_tokens: int,
    draft_length: "DraftLengthChoice | None",
    draft_mode: "DraftMode",
    proposer: "ProposerName",
    given: dict[str, float | None],
    seed: int | None,
    devices: "DeviceConfig",
    threads: int | None,
    raw: bool,
    parse_special: bool,
    no_draft: bool,
    no_learn: bool,
    learns_now: bool,
    as_json: bool,
    accept_terms: bool,
) -> None:
    """Answer PROMPT with a target model, drafted for by a small one.

    The text goes to stdout as it is written, statistics to stderr. PROMPT may come from a
    file or from stdin, less one line end after it. Greedy decoding gives exactly
    what the target alone would write, and sampling draws from exactly the target's
    probabilities. The sampling that the model's maker recommends (`generation_config.json`)
    holds where no option says otherwise. With --seed the same command gives the same text again
    on the same machine and version: it drafts with nothing that earlier runs left in the bundle.

    Where the bundle's drafter can learn, it learns from every eight answers, on this machine,
    in a background process of low priority that pauses while a command is at work. Without a
    terminal and with --json none is started; --learn-now learns in the foreground. What is
    kept lies in the bundle's `state/`: numbers of tokens and their probabilities.
    `omnidraft-npu adapters forget` erases it.

    \b
    Examples:
      omnidraft-npu run "The three laws of robotics are"
      omnidraft-npu run -b bundle --target gemma3-270m --draft-length 6 -f prompt.txt
      echo "Name three rivers." | omnidraft-npu run --target smollm2-135m --json
    """
    from ..activity import at_work
    from ..config import DecodeConfig

    if no_learn and learns_now:
        raise ConfigError("--no-learn and --learn-now exclude each other: give one of them")
    # With what is given alone, so that a wrong option is refused before anything is opened.
    DecodeConfig(max_new_tokens=max_new_tokens, **draft_length_fields(draft_length or "auto"))
    text = _read_prompt(prompt, prompt_file)
    announced = contextlib.ExitStack()
    click.get_current_context().call_on_close(announced.close)
    announced.enter_context(at_work())

    from omnidraft_npu.runtime.session import open_session

    from .default_pair import choose_bundle

    bundle, target = choose_bundle(bundle, target, accept_terms=accept_terms)
    session = open_session(
        bundle,
        target=target,
        threads=threads,
        use_drafter=not no_draft,
        proposer=proposer,
        draft_mode=draft_mode,
        devices=devices,
        recalls=seed is None and not no_learn,
        keeps=not no_learn,
    )
    sampling = session.generation_defaults.sampling(seed=seed, **given)
    if used := session.generation_defaults.used(**given):
        echo(
            f"{session.target_name} is decoded with its own {used}; options change them, "
            "--temperature 0 --repetition-penalty 1 is greedy decoding alone",
            err=True,
        )
    given_length = draft_length
    draft_length = repeatable_draft_length(
        given_length, temperature=sampling.temperature, seed=seed
    )
    if given_length == "auto" != draft_length:
        echo(
            f"--draft-length auto depends on measured times, which would change the text of a "
            f"--seed: {draft_length} is used",
            err=True,
        )
    config = DecodeConfig(
        max_new_tokens=max_new_tokens, **draft_length_fields(draft_length), sampling=sampling
    )
    if draft_mode == "paper" and sampling.temperature > 0 and not no_draft:
        echo(
            "--draft-mode paper is approximate: sampled text does not have the target's law; "
            "--draft-mode full does",
            err=True,
        )
    if not raw and not session.has_chat_template:
        echo(
            f"{session.target_name} has no chat template: the prompt is continued as it is",
            err=True,
        )
        raw = True
    prompt_ids = session.encode(text, raw=raw, parse_special=parse_special)
    session.make_room(len(prompt_ids))
    tell_devices(session, 0 if draft_length == "auto" else draft_length)
    extra: dict[str, Any] = {"placement": session.pair.placement}
    if not no_draft:
        extra |= {"draft_mode": draft_mode, "draft_length": draft_length}
    can_learn = not no_learn and keep_answers(session)
    _answer(session, prompt_ids, config, extra if as_json else None)
    announced.close()
    if not can_learn:
        return
    if learns_now:
        learn_now(session.pair, threads=threads)
    elif not as_json:
        learn_later(session.pair, threads=threads, devices=devices)


def _answer(
    session: "Session",
    prompt_ids: list[int],
    config: "DecodeConfig",
    stats_of_json: dict[str, Any] | None,
) -> None:
    """Decode and print; with `stats_of_json` one document, whose statistics hold it too."""
    last: Delta | None = None
    text: list[str] = []
    token_ids: list[int] = []
    for last in session.generate(prompt_ids, config):
        text.append(last.text)
        token_ids += last.token_ids
        if stats_of_json is None:
            echo_model_text(last.text)
    assert last is not None, "a response has at least one round"
    if stats_of_json is not None:
        document = {
            "schema_version": 1,
            "text": "".join(text),
            "token_ids": token_ids,
            "finish_reason": last.finish_reason,
            "stats": last.stats.to_json() | stats_of_json,
        }
        echo_json(document)
        return
    echo()
    echo(last.stats.summary(), err=True)
    if last.stats.notice:
        echo(last.stats.notice, err=True)
    if last.finish_reason == "context":
        graph = session.pair.target.graph
        echo(
            f"the text ends here because the context of {graph.context_length} tokens is full: "
            f"shorten the prompt, or {graph.more_room}",
            err=True,
        )
    elif last.finish_reason == "length":
        echo(f"the text was cut at --max-new-tokens {config.max_new_tokens}", err=True)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from whichever of argument, file and stdin was given.

    Raises:
        ConfigError: none or two of them.
        PromptError: it cannot be read, is not UTF-8, or is empty.
    """
    if prompt is not None and prompt_file is not None:
        raise ConfigError("there is a PROMPT and a --prompt-file: give one of them")
    if prompt is not None and prompt != "-":
        where, text = "PROMPT", decode_prompt(os.fsencode(prompt), "PROMPT")
    elif prompt_file is not None:
        where = str(prompt_file)
        text = without_line_end(decode_prompt(read_prompt_file(prompt_file), where))
    else:
        where, text = "stdin", _read_stdin(is_asked_for=prompt == "-")
    if not text:
        raise PromptError(f"{where} is empty: give the model some text")
    return text


def _read_stdin(*, is_asked_for: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not is_asked_for):
        raise ConfigError("there is no prompt: give PROMPT, --prompt-file, or text on stdin")
    return without_line_end(decode_prompt(read_stream(sys.stdin.buffer, "stdin"), "stdin"))
