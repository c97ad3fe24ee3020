"""What a model for the NPU takes, told before hours of work: memory, disk, a chip's contexts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft_npu.chips.table import Chip
from omnidraft_npu.errors import ConfigError, ExportError
from omnidraft_npu.lora import MODULES

from .architecture import DecoderConfig
from .htp.parts import split_layers
from .recipes import RECIPES, Recipe, recipe_for
from .scale_search import WeightFormat

_FLOAT_RAM_PER_BYTE = 12.2
"""Memory of a compiling process for a byte of weights, where activations are fp16: 1.4 GB for
the 115 MB of a 7B layer at 4 bits; 3.8 GB for the 327 MB of SmolLM2-135M in fp16."""
_INTEGER_RAM_PER_BYTE = 5.5
"""The same for 16-bit integers: 1.1 GB for the 196 MB of SmolLM2-135M in w8a16, 0.95 GB for its
147 MB in w4a16."""
_RAM_BASE = 150e6
_PART_RAM_PER_BYTE = 1.2
"""Memory for a byte of a part's weights in floats, while it is calibrated and compared with its
quantised self; of that the embedding or the head is in floats for a moment too."""
_ROOT_RAM = 28
"""Memory of inverting the root of a layer's moments, for each pair of its inputs."""
_ACTIVATION_RAM = 120e3
"""Of what some 10,000 tokens of calibration text are in a layer, for each of the widest inputs."""
_TWICE_FLOAT = 8
"""Bytes of a weight as it was and as it is rounded."""
_TABLE_RAM = 10
"""Of an embedding, two copies in floats and one of 16 bits."""
_BLOCK_SCALE_BYTES = 0.068
"""A weight's share of its block's scale; with it a 7B layer at 4 bits has 115 MB."""
_FULL_SHARE = 0.9
"""Of a context's limit, for weights and cache; the rest is for what lies between operators."""
_CACHE_SHARE = 0.5
"""Of that room, the most for the cache, in each of the contexts that the weights need."""


@dataclass(frozen=True, kw_only=True)
class HtpEstimate:
    """What the NPU flavour of one model takes, in bytes."""

    parts: tuple[range, ...]
    """Layers of each context; one for a model that fits a single context."""
    weight_bytes: int
    """Of all parts, for one length."""
    kv_bytes: int
    """Of the cache."""
    compile_ram_bytes: int
    """Of a process that compiles one graph."""
    quantize_ram_bytes: int
    """Of the process that rounds the weights of a layer, then runs a part in floats."""
    disk_bytes: int
    """Of all files, those included that are gone when it is done."""
    smaller_recipes: tuple[str, ...] = ()
    """Names of those of fewer bits that all chips can run."""

    @property
    def ram_bytes(self) -> int:
        """Of the step that takes the most memory; steps follow one another."""
        return max(self.compile_ram_bytes, self.quantize_ram_bytes)


def estimate(
    name: str,
    config: DecoderConfig,
    recipe: Recipe,
    *,
    context_length: int,
    chips: Sequence[Chip],
    num_binaries: int,
    max_ram_bytes: int | None = None,
) -> HtpEstimate:
    """What compiling a model takes, and into how many contexts it goes.

    Args:
        name: Of the model, for messages.
        config: Of the model.
        recipe: Of its weights and cache.
        context_length: Slots of the cache.
        chips: Every one must hold each part.
        num_binaries: How many hold the weights: one for each length and chip, if nothing is
            shared.
        max_ram_bytes: What a step may take, which smaller parts keep to; None for as few parts
            as the chips allow.

    Raises:
        ConfigError: the cache is too long for a chip; says how long it may be.
        ExportError: a single layer is more than a context holds.
    """
    table = config.num_logits * config.hidden_size
    layer_bytes = _layer_bytes(config, recipe)
    first_bytes, last_bytes = 2 * table, int(table * _bytes_per_weight(recipe.head))
    weight_bytes = int(layer_bytes * config.num_layers) + first_bytes + last_bytes
    kv_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    kv_per_token *= (recipe.kv_bits or 32) // 8
    kv_bytes = kv_per_token * context_length
    chip = min(chips, key=lambda chip: chip.context_limit_bytes)
    room = int(_FULL_SHARE * chip.context_limit_bytes)
    spare = _CACHE_SHARE * room * math.ceil(weight_bytes / room)
    most = int(spare) // kv_per_token // 64 * 64
    if context_length > most:
        raise ConfigError(
            f"a cache of {context_length:,} tokens of {name} takes {size_text(kv_bytes)}, and the "
            f"contexts of {chip.name} that hold its weights have {size_text(spare)} to spare for "
            f"it: use --htp-context-length {most} or less"
        )
    smaller = smaller_recipes(recipe, chips)
    per_layer = int(layer_bytes + kv_bytes / config.num_layers)
    in_layer = sum(math.prod(shape) for shape in _layer_shapes(config).values())
    ram = _INTEGER_RAM_PER_BYTE if recipe.has_integer_activations else _FLOAT_RAM_PER_BYTE
    if max_ram_bytes is not None:
        ends = (first_bytes, last_bytes)
        least = per_layer + (sum(ends) if config.num_layers == 1 else max(ends))
        per_byte = max(ram, _PART_RAM_PER_BYTE * 4 * in_layer / layer_bytes)
        room = min(room, max(least, int((max_ram_bytes - _RAM_BASE) / per_byte)))
    parts = split_layers(
        config.num_layers,
        layer_bytes=per_layer,
        first_bytes=first_bytes,
        last_bytes=last_bytes,
        room=room,
        smaller="".join(f"--htp-precision {one}, " for one in smaller),
    )
    part = 4 * _largest(parts, in_layer, table, table)
    return HtpEstimate(
        parts=parts,
        smaller_recipes=smaller,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        compile_ram_bytes=int(
            _RAM_BASE + ram * _largest(parts, layer_bytes, first_bytes, last_bytes)
        ),
        quantize_ram_bytes=int(
            _RAM_BASE
            + max(_PART_RAM_PER_BYTE * part + 4 * table, _rounding_ram(config, recipe, in_layer))
        ),
        disk_bytes=int(part)
        + (config.num_weights if recipe.weights is not None else 0)
        + (1 + num_binaries) * weight_bytes,
    )


def _largest(parts: Sequence[range], layer: float, first: float, last: float) -> float:
    """Size of the largest part, of that of a layer and what its ends hold besides."""
    sizes = [len(part) * layer for part in parts]
    sizes[0] += first
    sizes[-1] += last
    return max(sizes)


def _rounding_ram(config: DecoderConfig, recipe: Recipe, in_layer: int) -> float:
    """Of rounding a layer, or the embedding; nothing where weights stay as they are."""
    if recipe.weights is None:
        return 0
    widest = max(config.intermediate_size, config.hidden_size, config.num_heads * config.head_dim)
    table = config.num_logits * config.hidden_size
    layer = (_ROOT_RAM * widest + _ACTIVATION_RAM) * widest + _TWICE_FLOAT * in_layer
    return max(layer, _TABLE_RAM * table)


def _layer_bytes(config: DecoderConfig, recipe: Recipe) -> float:
    """Weights of one layer, each in its own format."""
    return sum(
        math.prod(shape) * _bytes_per_weight(recipe.format_of(name) if name in MODULES else None)
        for name, shape in _layer_shapes(config).items()
    )


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors of one layer, by their names in it."""
    first = "layers.0."
    shapes = config.tensor_shapes()
    return {name.removeprefix(first): s for name, s in shapes.items() if name.startswith(first)}


def smaller_recipes(recipe: Recipe, chips: Sequence[Chip]) -> tuple[str, ...]:
    """Names of recipes whose weights have fewer bits and that every chip can run."""

    def runs(name: str) -> bool:
        try:
            return all(recipe_for(chip, 0, name=name) for chip in chips)
        except ConfigError:
            return False

    return tuple(
        name for name, other in RECIPES.items() if _bits(other) < _bits(recipe) and runs(name)
    )


def _bits(recipe: Recipe) -> int:
    return 16 if recipe.weights is None else recipe.weights.bits


def check_memory(name: str, found: HtpEstimate, available: int | None) -> None:
    """Pass if every step gets the memory that it needs.

    Raises:
        ExportError: it does not.
    """
    if available is not None and found.ram_bytes > available:
        smaller = "".join(f"use --htp-precision {one}, " for one in found.smaller_recipes)
        raise ExportError(
            f"exporting {name} for the NPU takes about {size_text(found.ram_bytes)} of memory, "
            f"{size_text(available)} are available: free some, {smaller}or give --max-ram what "
            "it may take, and it goes into smaller parts"
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


def _bytes_per_weight(form: WeightFormat | None) -> float:
    if form is None:
        return 2.0
    return form.bits / 8 + (_BLOCK_SCALE_BYTES if form.granularity == "block" else 0.0)


def size_text(num_bytes: float) -> str:
    """A size for people, in MB of 10^6 or GB of 10^9 bytes."""
    unit = "GB" if num_bytes >= 1e9 else "MB"
    return f"{num_bytes / (1e9 if unit == 'GB' else 1e6):,.1f} {unit}"
