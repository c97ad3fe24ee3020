"""Which layers go into which part of a model that fits no single context of the HTP."""

from collections.abc import Sequence
from itertools import accumulate

from omnidraft_npu.errors import ExportError


def split_layers(
    num_layers: int,
    *,
    layer_bytes: int,
    first_bytes: int,
    last_bytes: int,
    room: int,
    smaller: str = "",
) -> tuple[range, ...]:
    """The fewest parts that each fit, the largest of them as small as it can be.

    Compiling takes memory in proportion to the largest part, so even parts are worth having.

    Args:
        num_layers: Of the model.
        layer_bytes: Weights and cache of a layer.
        first_bytes: What the first part holds besides, the embedding.
        last_bytes: What the last part holds besides, the head.
        room: What a part may hold.
        smaller: What else makes a layer smaller, for the message, with a comma after it.

    Returns:
        Runs of layers that follow one another, for `HtpGraphOptions.layers`.

    Raises:
        ExportError: the embedding or the head with a single layer is more than the room.
    """
    sizes = [layer_bytes] * num_layers
    sizes[0] += first_bytes
    sizes[-1] += last_bytes
    if max(sizes) > room:
        raise ExportError(
            f"a single layer with its embedding or head takes {max(sizes):,} bytes, a context "
            f"holds {room:,}: use {smaller}a shorter --htp-context-length, or a smaller model"
        )
    fewest = len(_fill(sizes, room))
    limits = sorted(
        {total for i in range(num_layers) for total in accumulate(sizes[i:]) if total <= room}
    )
    return next(parts for limit in limits if len(parts := _fill(sizes, limit)) == fewest)


def _fill(sizes: Sequence[int], limit: int) -> tuple[range, ...]:
    """Layers one after the other into parts of at most `limit`; a single one may be more."""
    starts, total = [0], 0
    for i, size in enumerate(sizes):
        if i > starts[-1] and total + size > limit:
            starts.append(i)
            total = 0
        total += size
    return tuple(map(range, starts, [*starts[1:], len(sizes)]))
