"""Spellings: every target token as a run of drafter pieces."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .pieces import PieceEncoder
from .vocabulary import END_ROLES, Role, Vocabulary

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Spellings:
    """One run of pieces for each mapped target token; unmapped tokens do not appear."""

    token_ids: Ids
    """``[mapped]`` target ids. Among tokens that are spelled alike the preferred comes first."""
    offsets: Ids
    """``[mapped + 1]``; token i is spelled ``pieces[offsets[i]:offsets[i + 1]]``."""
    pieces: Ids
    aliases: Ids
    """``[aliases, 2]`` end-of-response pieces without a token, each with its stand-in."""

    @classmethod
    def from_runs(
        cls, runs: dict[int, list[int]], aliases: dict[int, int] | None = None
    ) -> "Spellings":
        """Spellings from target id -> pieces, in order of preference."""
        offsets = np.zeros(len(runs) + 1, np.int32)
        np.cumsum([len(run) for run in runs.values()], out=offsets[1:])
        return cls(
            token_ids=np.fromiter(runs, np.int32, len(runs)),
            offsets=offsets,
            pieces=np.fromiter((p for run in runs.values() for p in run), np.int32, offsets[-1]),
            aliases=np.array(list((aliases or {}).items()), np.int32).reshape(-1, 2),
        )

    @classmethod
    def of_pieces(cls, num_pieces: int) -> "Spellings":
        """For equal vocabularies: every token is the piece of the same id."""
        ids = np.arange(num_pieces + 1, dtype=np.int32)
        return cls(
            token_ids=ids[:-1],
            offsets=ids,
            pieces=ids[:-1],
            aliases=np.empty((0, 2), np.int32),
        )


def direct_spellings(drafter: Vocabulary, target: Vocabulary) -> Spellings:
    """Only the tokens that are equal, byte for byte, to one piece, and the ends of a response."""
    return Spellings.from_runs(_direct_runs(drafter, target), end_aliases(drafter, target))


def full_spellings(encoder: PieceEncoder, target: Vocabulary) -> Spellings:
    """Every token that has bytes, and the ends of a response; a few seconds for 262k tokens.

    A token without an equal piece is spelled as the drafter's tokenizer would write it
    alone. One that holds a byte the drafter cannot write is left out.
    """
    drafter = encoder.vocabulary
    runs = _direct_runs(drafter, target)
    tokens = target.all_bytes()
    rest = [i for i in _preference(target) if i not in runs and tokens[i]]
    for i, run in zip(rest, encoder.encode_batch([tokens[i] for i in rest]), strict=True):
        if run:
            runs[i] = run
    return Spellings.from_runs(runs, end_aliases(drafter, target))


def end_pieces(drafter: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """Target end-of-response ids -> the drafter's piece for it; equal role first, else the other.

    Nothing where the drafter has no such piece. BOS, padding and unused rows are never mapped.
    """
    pieces = {role: drafter.special_ids(role) for role in END_ROLES}
    mapped: dict[int, int] = {}
    for role, other in (END_ROLES, END_ROLES[::-1]):
        for i in target.special_ids(role):
            equal = [
                piece
                for piece in (*pieces[role], *pieces[other])
                if drafter.special_contents.get(piece) == target.special_contents.get(i)
            ]
            choices = (*equal, *pieces[role], *pieces[other])
            if choices:
                mapped[i] = choices[0]
    return mapped


def end_aliases(drafter: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """End-of-response pieces that no target token is spelled with -> a piece that one is."""
    used = list(end_pieces(drafter, target).values())
    ends = drafter.special_ids(*END_ROLES)
    return {piece: used[0] for piece in ends if piece not in used} if used else {}


def _direct_runs(drafter: Vocabulary, target: Vocabulary) -> dict[int, list[int]]:
    tokens, table = target.all_bytes(), drafter.by_bytes
    runs = {i: [table[tokens[i]]] for i in _preference(target) if tokens[i] in table}
    ends = end_pieces(drafter, target)
    # A token whose role is that of its piece is preferred over one that borrows it.
    in_order = sorted(ends, key=lambda i: (target.roles[i] != drafter.roles[ends[i]], i))
    return runs | {i: [ends[i]] for i in in_order}


def _preference(target: Vocabulary) -> list[int]:
    """All text ids: the preferred ones of `Vocabulary.by_bytes` before their duplicates."""
    is_text = target.roles == Role.TEXT
    order: Any = np.argsort(target.is_fallback[is_text], kind="stable")
    ids: list[int] = np.flatnonzero(is_text)[order].tolist()
    return ids
