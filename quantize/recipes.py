"""Ways to quantise a model for the NPU, as data, and the one a chip gets by default."""

from dataclasses import dataclass, replace
from typing import Literal

from omnidraft_npu.chips.table import Chip
from omnidraft_npu.errors import ConfigError

from .scale_search import WeightFormat

KvBits = Literal[8, 16]

SMALL = 800_000_000
"""Weights below which a model keeps 8 bits: few bytes to save, and 4 bits cost it much. With them
SmolLM2-135M kept its first choice after 75 % of the tokens that an export tests, with 8 bits
after 92 %."""
_OLDEST_FLEXIBLE_ARCH = 73
"""Hexagon version from which 4-bit blocks and a 16-bit cache are documented everywhere."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is stored and computed in how many bits."""

    name: str
    weights: WeightFormat | None
    """Of the projections; None leaves the graph in floating point."""
    head: WeightFormat | None = None
    """Of the product that gives the logits."""
    finer: tuple[str, ...] = ()
    """Projections in the head's format too: small ones whose errors cost most."""
    has_integer_activations: bool = True
    """Whether values between operators are 16-bit integers; otherwise they are fp16."""
    has_float_residual: bool = True
    """Whether the stream that layers add to stays in fp16, with integer activations elsewhere."""
    has_float_attention: bool = False
    """Whether scores and weights of the attention stay in fp16 too."""
    has_rotary_operator: bool = True
    """Whether rotary embeddings of integers are one operator, which QNN takes for v68 and then
    cannot prepare."""
    kv_bits: KvBits | None = None
    """Of the cache, which the host then copies as integers; None for floating point."""
    max_loss: float
    """Share by which the perplexity may rise before an export is marked as poor."""
    min_agreement: float
    """Share of the tokens after which the first choice must stay the same."""
    max_error: float
    """Relative error that the logits may have."""

    def format_of(self, module: str) -> WeightFormat | None:
        """Of the weight of a projection."""
        return self.head if module in self.finer else self.weights


_HEAD = WeightFormat(bits=8, granularity="channel")
_FINER = ("k_proj", "v_proj")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="fp16",
            weights=None,
            has_integer_activations=False,
            max_loss=0.01,
            min_agreement=0.97,
            max_error=0.02,
        ),
        Recipe(
            name="w8a16",
            weights=WeightFormat(bits=8, granularity="channel"),
            head=_HEAD,
            kv_bits=8,
            max_loss=0.01,
            min_agreement=0.9,
            max_error=0.1,
        ),
        Recipe(
            name="w4a16",
            weights=WeightFormat(bits=4, granularity="block"),
            head=_HEAD,
            finer=_FINER,
            kv_bits=8,
            max_loss=0.08,
            min_agreement=0.8,
            max_error=0.2,
        ),
        Recipe(
            name="w4a16-nbits",
            weights=WeightFormat(bits=4, granularity="block"),
            head=_HEAD,
            finer=_FINER,
            has_integer_activations=False,
            max_loss=0.08,
            min_agreement=0.8,
            max_error=0.2,
        ),
    )
}
"""The cache has 8 bits by default: the HTP multiplies 16-bit activations by no more than the
upper half of another 16-bit activation, so that more would be stored than is read.
`w4a16` is LPBQ; `w4a16-nbits` is MatMulNBits, which computes in fp16 and so needs no ranges."""


def recipe_for(
    chip: Chip, num_weights: int, *, name: str | None = None, kv_bits: KvBits | None = None
) -> Recipe:
    """The recipe of a model on a chip.

    Args:
        chip: What will run it.
        num_weights: Of the model. By default one of `SMALL` or more gets 4 bits where the chip
            can: there they save most and cost least. Any other keeps 8.
        name: Key of `RECIPES`; None for the default.
        kv_bits: Of the cache; None for what the recipe and the chip have.

    Raises:
        ConfigError: there is no such recipe, or the chip cannot run it.
    """
    is_flexible = chip.arch >= _OLDEST_FLEXIBLE_ARCH
    if name is None:
        name = "w4a16" if num_weights >= SMALL and is_flexible else "w8a16"
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}: choose from {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if not recipe.has_integer_activations and not chip.fp16:
        raise ConfigError(
            f"{name} computes in fp16, which no source claims for {chip.name}: use w8a16"
        )
    if recipe.weights is not None and recipe.weights.bits == 4 and not is_flexible:
        raise ConfigError(
            f"{name} needs Hexagon v{_OLDEST_FLEXIBLE_ARCH} or later and {chip.name} has "
            f"v{chip.arch}: use w8a16"
        )
    if recipe.kv_bits is None:
        if kv_bits is not None:
            raise ConfigError(f"{name} keeps its cache in floating point: leave out the KV bits")
        return recipe
    if not chip.fp16:
        recipe = replace(recipe, has_float_residual=False)
    if kv_bits == 16 and not is_flexible:
        raise ConfigError(
            f"{chip.name} (Hexagon v{chip.arch}) takes a cache of 8 bits only: use --kv-bits 8"
        )
    if chip.arch == 69 and chip.fp16:
        # In integers, passes of one or two tokens attend wrongly on the simulator of v69.
        recipe = replace(recipe, has_float_attention=True)
    if chip.arch == 68:
        recipe = _for_v68(recipe)
    return recipe if kv_bits is None else replace(recipe, kv_bits=kv_bits)


def _for_v68(recipe: Recipe) -> Recipe:
    """One scale a weight and 8 bits for the cache, as v68 multiplies nothing else."""
    whole = WeightFormat(bits=8, granularity="tensor")
    return replace(recipe, weights=whole, head=whole, kv_bits=8, has_rotary_operator=False)
