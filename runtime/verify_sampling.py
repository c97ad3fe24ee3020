"""Do drafted samples follow the target's own law? A test of the first tokens of many rounds."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnidraft_npu.chi_square import ChiSquare, chi_square
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.sampling import TargetLaw

from .observed_lm import ObservedLM
from .opened_pair import OpenedPair
from .session import Session

FALSE_ALARMS = 1e-3
"""How often a right runtime may fail: the threshold of all p-values of a run together."""
_MIN_FOLLOWERS = 20
"""Least samples with the same first token for their second tokens to be tested."""


@dataclass(frozen=True, kw_only=True)
class LawCheck:
    """What became of one prompt's samples."""

    index: int
    num_samples: int
    first: ChiSquare
    """Of the first tokens against the target's law after the prompt."""
    second: ChiSquare
    """Of tokens after the commonest first ones in the same round, against the laws there."""

    @property
    def p_value(self) -> float:
        """Of both tests together."""
        return ChiSquare.sum((self.first, self.second)).p_value


def check_laws(
    pair: OpenedPair,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    num_samples: int,
    report: Callable[[int, int], None],
) -> Iterator[LawCheck]:
    """Decode one round after each prompt many times and compare with the target's law.

    Whatever the drafter does, the first token of a round has the target's law after the
    prompt. A second token in the same round has, given the first, the law after that: that
    a draft was accepted says nothing about what comes next.

    Args:
        pair: A target and what drafts for it.
        prompts: Target ids of each.
        config: Sampling, its seed the first of `num_samples`, and draft length.
        num_samples: Rounds after each prompt.
        report: Told of rounds done and all rounds.

    Yields:
        One check a prompt, in order.
    """
    session = Session(pair)
    target = ObservedLM(pair.target.graph.begin())
    config = dataclasses.replace(config, max_new_tokens=config.max_draft_tokens + 1)
    report(0, num_samples * len(prompts))
    for index, prompt in enumerate(prompts):
        rounds = []
        for i in range(num_samples):
            rounds.append(_first_round(session, prompt, config, i))
            report(index * num_samples + i + 1, num_samples * len(prompts))
        firsts = Counter(tokens[0] for tokens in rounds)
        second = []
        for token, count in firsts.most_common():
            followers = [tokens[1] for tokens in rounds if tokens[0] == token and len(tokens) > 1]
            if count < _MIN_FOLLOWERS:
                break
            if len(followers) >= _MIN_FOLLOWERS:
                law = _law(target, config, [*prompt, token])
                second.append(chi_square(_counts(followers, len(law)), law))
        law = _law(target, config, prompt)
        yield LawCheck(
            index=index,
            num_samples=num_samples,
            first=chi_square(_counts(list(firsts.elements()), len(law)), law),
            second=ChiSquare.sum(second),
        )


def _first_round(
    session: Session, prompt: Sequence[int], config: DecodeConfig, number: int
) -> tuple[int, ...]:
    seed = (config.sampling.seed or 0) + number
    sampling = dataclasses.replace(config.sampling, seed=seed)
    deltas = session.generate(prompt, dataclasses.replace(config, sampling=sampling))
    for delta in deltas:
        return delta.token_ids
    raise ValueError("a response has at least one round")


def _law(
    target: ObservedLM, config: DecodeConfig, context: Sequence[int]
) -> npt.NDArray[np.float64]:
    """``[vocab]`` of the target alone, from an empty cache."""
    target.reset()
    target.prefill(context[:-1])
    rows = TargetLaw(config.sampling, context).rows(target.score(context[-1:]), ())
    weights = np.asarray(rows.weights(0), np.float64)
    law: npt.NDArray[np.float64] = weights / weights.sum()
    return law


def _counts(token_ids: Sequence[int], size: int) -> npt.NDArray[np.int64]:
    return np.bincount(token_ids, minlength=size).astype(np.int64)
