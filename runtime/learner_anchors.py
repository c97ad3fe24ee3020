"""Text of other kinds that a drafter must go on drafting as it did before it learned.

What is learned from answers of one kind alone costs acceptance for the others, of which a device
may have none to learn from. So every update also holds rows of text that ships with the package,
with the law that the drafter itself had there at first.

Source:
    Li and Hoiem 2016, Learning without Forgetting, arXiv:1606.09282.
"""

import numpy as np

from omnidraft_npu.prompts import calibration_prompts
from omnidraft_npu.replay import Example
from omnidraft_npu.text.tokenizer import Tokenizer

from .learner_judge import Judge

_NUM_CONTEXT = 16
"""Pieces at the beginning of a text that nothing is learned of: too little came before them."""


class Anchors:
    """The package's calibration prompts with the drafter's own laws: an example of each.

    A lesson takes few of them, and each is a pass of the drafter, made when it is first taken.
    """

    def __init__(
        self, tokenizer: Tokenizer, judge: Judge, *, max_pieces: int, num_top: int
    ) -> None:
        """Cut the prompts into pieces.

        Args:
            tokenizer: The drafter's.
            judge: Of the drafter.
            max_pieces: Longer texts are cut.
            num_top: Pieces that a law names.
        """
        texts = (tokenizer.encode(one.prompt, add_special=True) for one in calibration_prompts())
        cut = (pieces[:max_pieces] for pieces in texts)
        self._texts = [pieces for pieces in cut if len(pieces) > _NUM_CONTEXT]
        self._judge, self._num_top = judge, num_top
        self._made: dict[int, Example] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Example:
        if index not in self._made:
            self._made[index] = self._make(self._texts[index])
        return self._made[index]

    def _make(self, pieces: list[int]) -> Example:
        count = len(pieces) - _NUM_CONTEXT
        # A piece that was drafted would be one for the acceptance head to learn of.
        return Example(
            pieces=np.array(pieces, np.int32),
            laws=self._judge.laws(pieces, count, num_top=self._num_top),
            tokens=np.arange(count, dtype=np.int32),
            is_drafted=np.zeros(count, np.bool_),
            is_direct=np.ones(count, np.bool_),
        )
