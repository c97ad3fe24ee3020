"""What a static graph knows of where its tokens stand: masks and rotary embeddings."""

from functools import partial

import numpy as np
import numpy.typing as npt

from ..architecture import DecoderConfig
from ..graph_writer import GraphWriter
from ..rotary import rotary_tables

Floats = npt.NDArray[np.float32]


class TokenPlaces:
    """Adds the inputs for masks and positions, and what the layers make of them.

    All of it is for rows ``group * S``: the new tokens once for each of the queries that share
    a key head.
    """

    def __init__(
        self,
        graph: GraphWriter,
        config: DecoderConfig,
        *,
        length: int,
        context_length: int,
        num_positions: int,
    ) -> None:
        self._graph = graph
        self._config = config
        self._length = length
        self._context_length = context_length
        self._num_positions = num_positions

    def add(self, layers: range) -> None:
        """Add what `layers` need."""
        self._add_masks(layers)
        self._add_rotations(layers)

    def mask(self, layer: int) -> str:
        """``[1, 1, group * S, C + S]`` to add to the scores of a layer."""
        return f"{self._mask_input(layer)}.grouped"

    def rotate(self, x: str, layer: int, side: str, output: str) -> str:
        """The rotary embedding of a layer, of ``[1, heads, rows, head_dim]``.

        Args:
            x: Queries, rows ``group * S``, or keys, rows S.
            layer: Its index.
            side: ``query`` or ``key``; a query takes on the scale of the scores.
            output: Name of the result.
        """
        tables = f"{self._rope(layer)}.{side}"
        return self._graph.node("RotaryEmbedding", [x, f"{tables}.cos", f"{tables}.sin"], output)

    def _add_masks(self, layers: range) -> None:
        shape = [1, 1, self._length, self._context_length + self._length]
        used = {self._mask_input(i) for i in layers}
        for name in sorted({"attention_mask", *used}):
            self._graph.input(name, np.float32, shape)
            if name in used:
                self._repeat(name, f"{name}.grouped", axis=2)

    def _mask_input(self, layer: int) -> str:
        """The mask of a layer; a window that spans the whole context hides nothing."""
        window = self._config.sliding_window
        is_sliding = self._config.layer_types[layer] == "sliding"
        has_window = is_sliding and window is not None and window < self._context_length
        return "sliding_mask" if has_window else "attention_mask"

    def _add_rotations(self, layers: range) -> None:
        """Cosines and sines of the new positions."""
        graph = self._graph
        positions = graph.input("position_ids", np.int32, [1, self._length])
        for rope in sorted({self._rope(i) for i in layers}):
            for side in ("query", "key"):
                for part in ("cos", "sin"):
                    name = f"{rope}.{side}.{part}"
                    make = partial(self._rotary_table, rope, side, part)
                    table = graph.shared_tensor(f"{name}.table", make)
                    if side == "key":
                        graph.node("Gather", [table, positions], name)
                    else:
                        rows = graph.node("Gather", [table, positions], f"{name}.rows")
                        self._repeat(rows, name, axis=1)

    def _rotary_table(self, rope: str, side: str, part: str) -> Floats:
        config = self._config
        waves = config.local_rope if rope == "local_rope" else config.rope
        assert waves is not None, "only a sliding layer has a local rope, and only if there is one"
        cos, sin = rotary_tables(waves, config.head_dim, self._num_positions)
        table = cos if part == "cos" else sin
        return table * np.float32(config.attention_scale) if side == "query" else table

    def _rope(self, layer: int) -> str:
        is_sliding = self._config.layer_types[layer] == "sliding"
        return "local_rope" if is_sliding and self._config.local_rope is not None else "rope"

    def _repeat(self, rows: str, output: str, axis: int) -> str:
        group = self._config.num_heads // self._config.num_kv_heads
        return self._graph.node("Concat", [rows] * group, output, axis=axis)
