"""The checks that `verify` makes, and how it tells what they found."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omnidraft_npu.runtime.opened_pair import OpenedPair
from omnidraft_npu.runtime.verify import (
    Difference,
    Outcome,
    PromptCheck,
    check_greedy,
    find_blindness,
)
from omnidraft_npu.runtime.verify_sampling import FALSE_ALARMS, LawCheck, check_laws

from ..chi_square import ChiSquare
from ..config import DecodeConfig
from ..progress import Report
from ..prompts import TaskPrompt
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Everything that was found."""

    blindness: str | None
    """What of the prompt the target does not see; None where it sees all."""
    greedy: tuple[PromptCheck, ...]
    laws: dict[float, tuple[LawCheck, ...]]
    """By temperature."""

    @property
    def threshold(self) -> float:
        """Least p-value of one check."""
        return FALSE_ALARMS / max(1, sum(len(checks) for checks in self.laws.values()))

    @property
    def outcome(self) -> Outcome:
        """The worst of all."""
        outcomes = {check.outcome for check in self.greedy}
        wrong = any(self.is_wrong(c) for checks in self.laws.values() for c in checks)
        if self.blindness or wrong or "bug" in outcomes:
            return "bug"
        return "near-tie" if "near-tie" in outcomes else "equal"

    def is_wrong(self, check: LawCheck) -> bool:
        """Whether samples differ from the law by more than chance."""
        return check.p_value < self.threshold


def run_checks(
    pair: OpenedPair,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[DecodeConfig],
    *,
    draft_lengths: Sequence[int],
    tie_tolerance: float,
    num_samples: int,
    report: Report,
) -> Verification:
    """Look for blindness, then check every configuration, greedy or sampling."""
    greedy: list[PromptCheck] = []
    laws = {}
    blindness = find_blindness(
        pair, prompts, lambda done, total: report("contexts that the target sees", done, total)
    )
    for config in configs:
        temperature = config.sampling.temperature
        if temperature > 0:
            stage = f"rounds sampled at temperature {temperature:g}"
            checks = check_laws(
                pair,
                prompts,
                config,
                num_samples,
                lambda done, total, stage=stage: report(stage, done, total),  # type: ignore[misc]
            )
            laws[temperature] = tuple(checks)
            continue
        greedy += check_greedy(
            pair,
            prompts,
            config,
            draft_lengths,
            tie_tolerance=tie_tolerance,
            report=lambda done, total: report("tokens decoded greedily", done, total),
        )
    return Verification(blindness=blindness, greedy=tuple(greedy), laws=laws)


def report_document(found: Verification, prompts: Sequence[TaskPrompt]) -> dict[str, Any]:
    """For programs."""
    return {
        "outcome": found.outcome,
        "blindness": found.blindness,
        "prompts": [_greedy_row(prompts[check.index], check) for check in found.greedy],
        "sampling": [
            {
                "temperature": temperature,
                "threshold": found.threshold,
                "prompts": [_law_row(found, prompts[c.index], c) for c in checks],
            }
            for temperature, checks in found.laws.items()
        ],
    }


def _greedy_row(prompt: TaskPrompt, check: PromptCheck) -> dict[str, Any]:
    return {
        "prompt": prompt.prompt,
        "task": prompt.task,
        "outcome": check.outcome,
        "num_tokens": check.num_tokens,
        "num_broken_rows": check.num_broken,
        "differences": [dataclasses.asdict(d) for d in check.differences],
    }


def _law_row(found: Verification, prompt: TaskPrompt, check: LawCheck) -> dict[str, Any]:
    return {
        "prompt": prompt.prompt,
        "task": prompt.task,
        "outcome": "bug" if found.is_wrong(check) else "equal",
        "num_samples": check.num_samples,
        "p_value": check.p_value,
        "first": _test_row(check.first),
        "second": _test_row(check.second),
    }


def _test_row(test: ChiSquare) -> dict[str, Any]:
    """Without the statistic where a token of no probability made it infinite."""
    is_possible = test.p_value > 0 or test.num_degrees > 0
    return {
        "statistic": test.statistic if is_possible else None,
        "num_degrees": test.num_degrees,
        "p_value": test.p_value,
    }


def report_lines(
    found: Verification, prompts: Sequence[TaskPrompt], tokenizer: Tokenizer
) -> Iterator[str]:
    """For people: what is wrong, then counts."""
    for check in found.greedy:
        where = _name(check.index, prompts)
        if check.num_broken:
            yield f"{where}: bug: {check.num_broken} rows of logits hold NaN or infinity"
        for difference in check.differences:
            yield f"{where}, {_describe(difference, tokenizer)}"
    if found.blindness:
        yield f"bug: {found.blindness}: its graph or its cache is broken, export it again"
    if found.greedy:
        yield _greedy_counts(found.greedy)
    for temperature, checks in found.laws.items():
        yield from _law_lines(found, temperature, checks, prompts)


def _greedy_counts(checks: Sequence[PromptCheck]) -> str:
    counts = {
        name: sum(check.outcome == name for check in checks)
        for name in ("equal", "near-tie", "bug")
    }
    return (
        f"{len(checks)} prompts, {sum(c.num_tokens for c in checks)} tokens: "
        f"{counts['equal']} equal, {counts['near-tie']} parted at a near-tie, "
        f"{counts['bug']} wrong"
    )


def _law_lines(
    found: Verification,
    temperature: float,
    checks: Sequence[LawCheck],
    prompts: Sequence[TaskPrompt],
) -> Iterator[str]:
    for check in checks:
        if found.is_wrong(check):
            yield (
                f"{_name(check.index, prompts)}, temperature {temperature:g}: bug: samples do "
                f"not follow the target's law, p = {check.p_value:.2g} (first tokens "
                f"{check.first.p_value:.2g}, second {check.second.p_value:.2g})"
            )
    wrong = sum(found.is_wrong(check) for check in checks)
    yield (
        f"temperature {temperature:g}: {len(checks)} prompts, {checks[0].num_samples} samples "
        f"each: {wrong} wrong, least p = {min(c.p_value for c in checks):.2g}, "
        f"threshold {found.threshold:.2g}"
    )


def _describe(difference: Difference, tokenizer: Tokenizer) -> str:
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


def _name(index: int, prompts: Sequence[TaskPrompt]) -> str:
    line = " ".join(prompts[index].prompt.split())
    shown = line if len(line) <= 40 else f"{line[:39]}…"
    return f"prompt {index + 1} ({shown!r})"
