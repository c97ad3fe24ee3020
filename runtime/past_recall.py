"""The latest answers that are kept to learn from, in the target's tokens, to draft from too."""

import logging

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.bundle import Bundle
from omnidraft_npu.manifest import ModelEntry
from omnidraft_npu.past_answers import PastAnswers
from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.state_folder import replay_path

logger = logging.getLogger(__name__)

MAX_ANSWERS, MAX_TOKENS = 128, 16_384
"""Answers at most, and drafter tokens of them together; reading them takes some 0.3 s."""


def replay_of(bundle: Bundle, target: ModelEntry) -> ReplayBuffer:
    """Where the answers of a target are kept."""
    return ReplayBuffer(
        folder=replay_path(bundle.state_root, target.name),
        pair=f"{bundle.manifest.drafter.tokenizer_sha256}-{target.tokenizer_sha256}",
        num_pieces=bundle.manifest.drafter.vocab_size,
    )


def recall_past(
    buffer: ReplayBuffer | None,
    drafter: Vocabulary | None = None,
    target: PieceEncoder | None = None,
) -> PastAnswers:
    """What `PastAnswers` would be, had it been told of these answers as they were written.

    Their pieces spell the text, which is cut into tokens anew; the few that the target cut in
    another way only foretell less.

    Args:
        buffer: Where they are kept; None for nowhere.
        drafter: Spells their pieces; None where these are the target's tokens.
        target: Cuts the text; None as well.
    """
    past = PastAnswers()
    if buffer is None:
        return past
    try:
        for example in buffer.latest(max_examples=MAX_ANSWERS, max_tokens=MAX_TOKENS):
            pieces = example.pieces[-example.num_response :].tolist()
            if drafter is None or target is None:
                past.add(pieces)
            else:
                past.add(target.encode(b"".join(map(drafter.token_bytes, pieces)))[0])
    except OSError as error:
        logger.warning("answers of before are not drafted from: %s", error)
    return past
