"""Text of other kinds that a drafter must go on drafting as it did before it learned.

What is learned from answers of one kind alone costs acceptance for the others, of which a device
may have none to learn from. So every update also holds rows of text that ships with the package,
with the law that the drafter itself had there at first.

Source:
    Li and Hoiem 2016, Learning without Forgetting, arXiv:1606.09282.
"""

from collections.abc import Iterator

import numpy as np

from omnidraft_npu.prompts import calibration_prompts
from omnidraft_npu.replay import Example
from omnidraft_npu.text.tokenizer import Tokenizer

from .learner_judge import Judge

_NUM_CONTEXT = 16
"""Pieces at the beginning of a text that nothing is learned of: too little came before them."""


def make_anchors(
    tokenizer: Tokenizer, judge: Judge, *, max_pieces: int, num_top: int
) -> Iterator[Example]:
    """The package's calibration prompts with the drafter's own laws, one example for each.

    Args:
        tokenizer: The drafter's.
        judge: Of the drafter.
        max_pieces: Longer texts are cut.
        num_top: Pieces that a law names.
    """
    for prompt in calibration_prompts():
        pieces = np.array(tokenizer.encode(prompt.prompt, add_special=True)[:max_pieces], np.int32)
        count = len(pieces) - _NUM_CONTEXT
        if count < 1:
            continue
        # A piece that was drafted would be one for the acceptance head to learn of.
        yield Example(
            pieces=pieces,
            laws=judge.laws(pieces.tolist(), count, num_top=num_top),
            tokens=np.arange(count, dtype=np.int32),
            is_drafted=np.zeros(count, np.bool_),
            is_direct=np.ones(count, np.bool_),
        )
