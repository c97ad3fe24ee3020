"""Entries of an n-gram cache, written down row by row."""

import numpy as np

from omnidraft_npu.bridge.ngram_entries import NgramEntries
from omnidraft_npu.bridge.spelling import Spellings


def make_entries(*rows):
    """From (target id, pieces, uses)."""
    runs = Spellings.from_runs({token_id: list(pieces) for token_id, pieces, _ in rows})
    return NgramEntries(
        token_ids=runs.token_ids,
        offsets=runs.offsets,
        pieces=runs.pieces,
        uses=np.array([uses for _, _, uses in rows], np.int32),
    )
