"""`omnidraft-npu verify`: is drafted text the target's own?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from ..printing import echo, echo_json
from .decoding_options import (
    bundle_options,
    device_options,
    drafting_options,
    prompt_options,
    sampling_options,
    threads_option,
)
from .measuring import draft_lengths, encode_prompts, load_prompts, tell_devices
from .progress import stage_progress

if TYPE_CHECKING:
    from omnidraft_npu.runtime.opened_pair import DraftMode, ProposerName

    from ..config import DeviceConfig

EXIT_MISMATCH = 3


@click.command(name="verify")
@bundle_options
@prompt_options
@click.option("--max-new-tokens", default=48, show_default=True, help="Most tokens per response.")
@click.option(
    "--draft-tokens",
    metavar="INTEGERS",
    callback=draft_lengths,
    default="4",
    show_default=True,
    help="Draft lengths to try, as in 1,2,4,8; samples use the largest.",
)
@drafting_options
@click.option(
    "--temperature",
    "temperatures",
    type=float,
    multiple=True,
    default=(0.0,),
    show_default=True,
    help="0 compares greedy texts, above it samples are tested; may be repeated.",
)
@sampling_options
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Sampled rounds for each prompt and temperature; more see smaller faults.",
)
@device_options
@threads_option
@click.option("--raw", is_flag=True, help="Give the model bare prompts, without a chat template.")
@click.option(
    "--tie-tolerance",
    default=0.01,
    show_default=True,
    help="A logit gap up to this part of the row's range is a near-tie.",
)
@click.option("--strict", is_flag=True, help="Let near-ties fail too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    bundle: Path | None,
    target: str | None,
    accept_terms: bool,
    prompts_file: Path | None,
    per_task: int | None,
    max_new_tokens: int,
    draft_tokens: tuple[int, ...],
    proposer: "ProposerName",
    draft_mode: "DraftMode",
    temperatures: tuple[float, ...],
    samples: int,
    devices: "DeviceConfig",
    threads: int | None,
    raw: bool,
    tie_tolerance: float,
    strict: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Decode prompts with and without drafts and compare what comes out.

    Greedy responses are compared token for token. At a first difference the report names the
    prompt, the position, both tokens and the gap between their logits in the plain run. A
    gap within the tolerance is a near-tie, which another order of summation may flip: it is
    reported and passes, unless --strict is given. On the CPU provider the graphs that
    `export` builds score a token with the same bits alone and among drafts, so there not
    even near-ties should be seen. Any other difference is a bug, as are logits that are NaN
    and a target that does not see its prompt.

    At a temperature above 0 the first tokens of many drafted rounds are counted and tested
    against the target's own law (chi-square, outcomes expected fewer than 5 times pooled).
    The threshold is such that a right bundle fails in one of 1,000 runs.

    Exit code 0: all equal, or near-ties only; 3: a mismatch.

    \b
    Examples:
      omnidraft-npu verify --accept-terms
      omnidraft-npu verify -b bundle
      omnidraft-npu verify -b bundle --prompts mine.jsonl --draft-tokens 1,4,8 --json
      omnidraft-npu verify -b bundle --temperature 0 --temperature 0.8 --samples 1000
    """
    from ..activity import at_work
    from ..config import DecodeConfig, SamplingConfig
    from ..statistics import NEAR_TIES

    click.get_current_context().with_resource(at_work())
    if not 0 <= tie_tolerance < 1:
        raise ConfigError(
            f"tie_tolerance is {tie_tolerance}, must be at least 0 and below 1: "
            "use --tie-tolerance 0.01"
        )
    configs = [
        DecodeConfig(
            max_new_tokens=max_new_tokens,
            max_draft_tokens=max(draft_tokens),
            sampling=SamplingConfig(temperature=temperature, **sampling),
        )
        for temperature in dict.fromkeys(temperatures)
    ]
    prompts = load_prompts(prompts_file, per_task)

    from omnidraft_npu.runtime.session import open_session

    from .default_pair import choose_bundle
    from .verify_report import Verification, report_document, report_lines, run_checks

    bundle, target = choose_bundle(bundle, target, accept_terms=accept_terms)
    session = open_session(
        bundle,
        target=target,
        threads=threads,
        proposer=proposer,
        draft_mode=draft_mode,
        devices=devices,
    )
    encoded = encode_prompts(session, prompts, raw=raw)
    tell_devices(session, max(draft_tokens))
    with stage_progress() as report:
        found: Verification = run_checks(
            session.pair,
            encoded,
            configs,
            draft_lengths=draft_tokens,
            tie_tolerance=tie_tolerance,
            num_samples=samples,
            report=report,
        )
    if as_json:
        document = {
            "schema_version": 1,
            "target": session.target_name,
            "target_provider": session.target_provider,
            "draft_provider": session.draft_provider,
            "placement": session.pair.placement,
            "proposer": proposer,
            "draft_mode": draft_mode,
            "draft_tokens": draft_tokens,
            "max_new_tokens": max_new_tokens,
            "tie_tolerance": tie_tolerance,
            "exactness": NEAR_TIES if session.pair.target.graph.has_near_ties else None,
            **report_document(found, prompts),
        }
        echo_json(document)
    else:
        for line in report_lines(found, prompts, session.pair.target.tokenizer):
            echo(line)
        if session.pair.target.graph.has_near_ties:
            echo(f"drafted text is {NEAR_TIES} on this machine")
    if found.outcome == "bug" or (strict and found.outcome == "near-tie"):
        raise click.exceptions.Exit(EXIT_MISMATCH)
