"""What compiling a model takes, told before hours of work: memory, disk, what a chip can map."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft_npu.chips.table import Chip
from omnidraft_npu.errors import ConfigError, ExportError

from .architecture import DecoderConfig
from .recipes import Recipe
from .scale_search import WeightFormat

_RAM_PER_BINARY_BYTE = 12.2
"""Of a compiling process: 1.4 GB for the 115 MB of a 7B layer at 4 bits; 3.8 GB for the 327 MB
of SmolLM2-135M in fp16."""
_RAM_BASE = 250e6
_BLOCK_SCALE_BYTES = 0.068
"""A weight's share of its block's scale; with it a 7B layer at 4 bits has 115 MB."""
_FULL_SHARE = 0.9
"""Of a context's limit, for weights and cache; the rest is for what lies between operators."""


@dataclass(frozen=True, kw_only=True)
class HtpEstimate:
    """What the NPU flavour of one model takes, in bytes."""

    weight_bytes: int
    """Of one binary, whatever its length."""
    kv_bytes: int
    """Of the cache."""
    kv_bytes_per_token: int
    compile_ram_bytes: int
    """Of a process that compiles one graph."""
    disk_bytes: int
    """Of all files, those included that are gone when it is done."""


def estimate(
    config: DecoderConfig,
    recipe: Recipe,
    *,
    context_length: int,
    num_binaries: int,
) -> HtpEstimate:
    """What compiling a model takes.

    Args:
        config: Of the model.
        recipe: Of its weights and cache.
        context_length: Slots of the cache.
        num_binaries: How many hold the weights: one for each length and chip, if nothing is
            shared.
    """
    shapes = config.tensor_shapes()
    layer_weights = sum(
        math.prod(shape) for name, shape in shapes.items() if name.startswith("layers.")
    )
    table = config.num_logits * config.hidden_size
    weight_bytes = int(
        layer_weights * _bytes_per_weight(recipe.weights)
        + table * 2
        + table * _bytes_per_weight(recipe.head)
    )
    kv_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    kv_per_token *= (recipe.kv_bits or 32) // 8
    float_bytes = 4 * (layer_weights + 2 * table)
    return HtpEstimate(
        weight_bytes=weight_bytes,
        kv_bytes=kv_per_token * context_length,
        kv_bytes_per_token=kv_per_token,
        compile_ram_bytes=int(_RAM_BASE + _RAM_PER_BINARY_BYTE * weight_bytes),
        disk_bytes=float_bytes + (2 + num_binaries) * weight_bytes,
    )


def check_memory(name: str, found: HtpEstimate, available: int | None) -> None:
    """Pass if a process that compiles the model gets the memory that it needs.

    Raises:
        ExportError: it does not.
    """
    if available is not None and found.compile_ram_bytes > available:
        raise ExportError(
            f"compiling {name} for the NPU takes about {size_text(found.compile_ram_bytes)} of "
            f"memory, {size_text(available)} are available: free some, use a --htp-precision of "
            "fewer bits, or --max-ram to try all the same"
        )


def check_disk(needed: int, free: int, where: str) -> None:
    """Pass if there is room for the files of all models.

    Raises:
        ExportError: there is not.
    """
    if needed > free:
        raise ExportError(
            f"the files for the NPU take about {size_text(needed)} while they are made, {where} "
            f"has {size_text(free)} free: free some, or choose another --output"
        )


def check_context(name: str, found: HtpEstimate, chips: Sequence[Chip]) -> None:
    """Pass if every chip can map the model's weights and its cache together.

    Raises:
        ConfigError: the cache is too long beside the weights; says how long it may be.
        ExportError: the weights alone are too much.
    """
    for chip in chips:
        room = int(_FULL_SHARE * chip.context_limit_bytes)
        holds = f"a context of {chip.name} holds {size_text(room)}"
        if found.weight_bytes > room:
            raise ExportError(
                f"{name} has {size_text(found.weight_bytes)} of weights, {holds}: use a "
                "--htp-precision of fewer bits, or a smaller model"
            )
        if found.weight_bytes + found.kv_bytes > room:
            most = (room - found.weight_bytes) // found.kv_bytes_per_token // 64 * 64
            raise ConfigError(
                f"a cache of {found.kv_bytes // found.kv_bytes_per_token:,} tokens takes "
                f"{size_text(found.kv_bytes)} beside {size_text(found.weight_bytes)} of {name}'s "
                f"weights, and {holds}: use --htp-context-length {most} or less"
            )


def num_parts(found: HtpEstimate, chips: Sequence[Chip]) -> int:
    """Into how many contexts the weights must be split for the chip with the least room."""
    room = min(int(_FULL_SHARE * chip.context_limit_bytes) for chip in chips)
    return math.ceil((found.weight_bytes + found.kv_bytes) / room)


def _bytes_per_weight(form: WeightFormat | None) -> float:
    if form is None:
        return 2.0
    return form.bits / 8 + (_BLOCK_SCALE_BYTES if form.granularity == "block" else 0.0)


def size_text(num_bytes: float) -> str:
    """A size for people, in MB of 10^6 or GB of 10^9 bytes."""
    unit = "GB" if num_bytes >= 1e9 else "MB"
    return f"{num_bytes / (1e9 if unit == 'GB' else 1e6):,.1f} {unit}"
