"""Text that the teacher wrote, with what it would have written instead: shards in a folder."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.array_files import read_arrays
from omnidraft_npu.documents import parse_document, shown_text
from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.files import write_safetensors

Ids = npt.NDArray[np.int32]
_HELD_OUT = 20
"""One in so many prompts is never trained on."""


_AGAIN = "delete it and run the same command with --resume"
_KINDS: dict[str, tuple[type[np.generic], int]] = {
    "prompt_ids": (np.int32, 1),
    "token_ids": (np.int32, 1),
    "top_ids": (np.int32, 2),
    "log_probs": (np.float16, 2),
    "sizes": (np.int32, 2),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Response:
    """One answer of the teacher and its laws."""

    task: str
    prompt: str
    """As the user typed it; responses to equal prompts are held out together."""
    is_greedy: bool
    """Whether every token is the likeliest one."""
    prompt_ids: Ids
    """``[prompt]`` token ids, the chat template included."""
    token_ids: Ids
    """``[tokens]`` of the answer, with the end of the turn where it came."""
    top_ids: Ids
    """``[tokens, top]`` likeliest tokens before each one."""
    log_probs: npt.NDArray[np.float16]
    """``[tokens, top]`` natural logarithms of their probabilities."""
    source: str = ""
    """Prompts made from one source are held out together; empty: the prompt itself."""

    @property
    def is_held_out(self) -> bool:
        """Whether it measures the drafter instead of teaching it."""
        return zlib.crc32((self.source or self.prompt).encode()) % _HELD_OUT == 0


def write_shard(folder: Path, number: int, responses: Sequence[Response]) -> None:
    """Write responses as one file, atomically."""

    def joined(parts: Iterable[npt.NDArray[Any]], kind: type) -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(part, kind) for part in parts])

    rows = [
        {"task": r.task, "prompt": r.prompt, "source": r.source, "greedy": r.is_greedy}
        for r in responses
    ]
    tensors = {
        "prompt_ids": joined((r.prompt_ids for r in responses), np.int32),
        "token_ids": joined((r.token_ids for r in responses), np.int32),
        "top_ids": joined((r.top_ids for r in responses), np.int32),
        "log_probs": joined((r.log_probs for r in responses), np.float16),
        "sizes": np.array([(len(r.prompt_ids), len(r.token_ids)) for r in responses], np.int32),
    }
    write_safetensors(shard_path(folder, number), tensors, {"rows": json.dumps(rows)})


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"{number:05}.safetensors"


def shard_tokens(path: Path) -> int:
    """Tokens of the answers in a shard; reads its header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            size: int = file.get_slice("token_ids").get_shape()[0]
    except (SafetensorError, OSError, IndexError) as error:
        raise _damaged(path, error) from error
    return size


def shards_of(folder: Path, num_tokens: int | None = None) -> list[Path]:
    """The shards of a folder, or the first of them that hold so many tokens together.

    Raises:
        CheckpointError: a shard is damaged.
    """
    shards: list[Path] = []
    for path in sorted(folder.glob("[0-9]*.safetensors")):
        if num_tokens is not None and num_tokens <= 0:
            break
        shards.append(path)
        if num_tokens is not None:
            num_tokens -= shard_tokens(path)
    return shards


def read_responses(shards: Iterable[Path]) -> Iterator[Response]:
    """Every response of some shards, in the order they were written.

    Raises:
        CheckpointError: a shard is damaged.
    """
    for path in shards:
        yield from _read_shard(path)


def _read_shard(path: Path) -> Iterator[Response]:
    tensors, metadata = read_arrays(path, _KINDS, error=CheckpointError, advice=_AGAIN)
    rows = parse_document(
        metadata.get("rows", ""), tuple[_Row, ...], str(path), error=CheckpointError, advice=_AGAIN
    )
    sizes = tensors["sizes"]
    ends = np.cumsum(sizes, axis=0, dtype=np.int64)
    totals = ends[-1].tolist() if len(ends) else [0, 0]
    found = [len(tensors[name]) for name in ("prompt_ids", "token_ids", "top_ids", "log_probs")]
    if (
        sizes.shape != (len(rows), 2)
        or sizes.min(initial=0) < 0
        or found != totals + totals[1:] * 2
    ):
        raise CheckpointError(f"{path} holds arrays that do not fit together: {_AGAIN}")
    for row, (prompt_end, end), (num_prompt, num_tokens) in zip(rows, ends, sizes, strict=True):
        mine = slice(end - num_tokens, end)
        yield Response(
            task=row.task,
            prompt=row.prompt,
            source=row.source,
            is_greedy=row.greedy,
            prompt_ids=tensors["prompt_ids"][prompt_end - num_prompt : prompt_end],
            token_ids=tensors["token_ids"][mine],
            top_ids=tensors["top_ids"][mine],
            log_probs=tensors["log_probs"][mine],
        )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({shown_text(str(error))}): {_AGAIN}")


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What a shard says of one response."""

    task: str
    prompt: str
    source: str
    greedy: bool
