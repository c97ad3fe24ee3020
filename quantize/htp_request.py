"""What the NPU flavour of one model shall be, once chips and options are known to fit."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omnidraft_npu.chips.table import Chip, find_chip
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lora import DEFAULT_RANK

from .calibration.texts import read_calibration_prompts
from .compile import check_compilable
from .recipes import SMALL, KvBits, Recipe, recipe_for
from .stages import Facts

logger = logging.getLogger(__name__)

PREFILL_LENGTH = 128
DEFAULT_VERIFY_LENGTH = 8
MAX_VERIFY_LENGTH = 32
DEFAULT_CONTEXT_LENGTH = 1024

_FEWEST_ROWS_V69 = 5
"""Hexagon v69 gets a product of 16-bit queries and 8-bit keys wrong in all heads but the first
where a head has fewer rows, which one token seldom has: there, it takes the verify graph."""


@dataclass(frozen=True, kw_only=True)
class HtpOptions:
    """The options of an export that are about the NPU, for all of its models."""

    soc: tuple[str, ...]
    """Names of chips."""
    precision: str | None = None
    """Name of a recipe; None for what the chips and the model's size suggest."""
    kv_bits: KvBits | None = None
    verify_length: int = DEFAULT_VERIFY_LENGTH
    """Tokens of the graph that verifies: one more than the longest draft."""
    context_length: int | None = None
    """Slots of the cache, all of which every pass computes with; None for
    `DEFAULT_CONTEXT_LENGTH`, or fewer where a conversation holds no more."""
    calibration: Path | None = None
    """Prompts of the user's; None for the built-in ones."""
    share_weights: bool = False
    one_binary: bool = False
    """Whether one binary is for all chips."""
    max_ram_bytes: int | None = None
    """What compiling may take; None for what is available."""

    def __post_init__(self) -> None:
        if not 2 <= self.verify_length <= MAX_VERIFY_LENGTH:
            raise ConfigError(
                f"verify_length is {self.verify_length}, must be from 2 to {MAX_VERIFY_LENGTH}: "
                "use --verify-length 8"
            )
        if self.context_length is not None and self.context_length < 16:
            raise ConfigError(
                f"htp_context_length is {self.context_length}, must be at least 16: "
                "use --htp-context-length 1024"
            )
        if self.share_weights and self.one_binary:
            raise ConfigError(
                "QNN cannot share weights in a binary for several chips: "
                "leave out --share-weights or --one-binary"
            )


@dataclass(frozen=True, kw_only=True)
class HtpRequest:
    """The NPU flavour of any model."""

    chips: tuple[Chip, ...]
    options: HtpOptions

    def recipe(self, num_weights: int) -> Recipe:
        """What a model of so many weights is made of.

        Raises:
            ConfigError: a recipe that a chip cannot run, or chips that need different ones.
        """
        first, *others = self.chips
        recipe = self._recipe_on(first, num_weights)
        for chip in others:
            if (other := self._recipe_on(chip, num_weights)) != recipe:
                raise ConfigError(
                    f"{first.name} needs {_describe(recipe)}, and {chip.name} "
                    f"{_describe(other)}: export for each of them apart"
                )
        return recipe

    def _recipe_on(self, chip: Chip, num_weights: int) -> Recipe:
        options = self.options
        return recipe_for(chip, num_weights, name=options.precision, kv_bits=options.kv_bits)

    def chips_without_adapters(self) -> tuple[Chip, ...]:
        """Those that compute nothing in fp16, which the branch of an adapter needs."""
        return tuple(chip for chip in self.chips if not chip.fp16)

    def lengths(self, recipe: Recipe, context_length: int, group: int) -> tuple[int, ...]:
        """Tokens of each graph of a model with so many slots: draft, verify, prefill.

        Args:
            recipe: Of the model.
            context_length: Slots of the cache.
            group: Queries that share a key head.
        """
        wanted = {1, self.options.verify_length, PREFILL_LENGTH}
        has_integer_attention = recipe.has_integer_activations and not recipe.has_float_attention
        if has_integer_attention and any(chip.arch == 69 for chip in self.chips):
            wanted = {length for length in wanted if length * group >= _FEWEST_ROWS_V69}
        return tuple(sorted({min(length, context_length) for length in wanted}))

    def identity(self) -> Facts:
        """What decides the exported files, for taking over finished stages."""
        calibration = self.options.calibration
        return {
            "chips": [chip.key for chip in self.chips],
            "recipes": [repr(self._recipe_on(self.chips[0], size)) for size in (0, SMALL)],
            "verify_length": self.options.verify_length,
            "context_length": self.options.context_length,
            "max_ram_bytes": self.options.max_ram_bytes,
            "calibration": None if calibration is None else _fingerprint(calibration),
            "share_weights": self.options.share_weights,
            "one_binary": self.options.one_binary,
        }


def htp_request(options: HtpOptions) -> HtpRequest | None:
    """What the options mean; None where no chip is named.

    Raises:
        ConfigError: an unknown chip, one that is too old or that nothing can be compiled for
            here, a recipe that a chip cannot run, or chips that need different ones.
        DeviceError: there is no QNN here that can compile.
        PromptError: the calibration file cannot be read.
    """
    chips = tuple({chip.key: chip for chip in map(find_chip, options.soc)}.values())
    if not chips:
        return None
    check_compilable(chips)
    read_calibration_prompts(options.calibration)
    request = HtpRequest(chips=chips, options=options)
    recipe = request.recipe(0)
    _check_shared(options, chips)
    if options.calibration is not None and recipe.weights is None:
        raise ConfigError(f"{recipe.name} is not calibrated: leave out --calibration")
    return request


def default_lora_rank(htp: HtpRequest | None) -> int:
    """Rank of what a drafter can learn unless told otherwise; 0 where a chip cannot compute it.

    Args:
        htp: The drafter's NPU flavour; None for none.
    """
    without = () if htp is None else htp.chips_without_adapters()
    if without:
        logger.info(
            "the drafter will not learn: adapters are computed in fp16 on the NPU, which no source "
            "claims for %s",
            ", ".join(chip.name for chip in without),
        )
    return 0 if without else DEFAULT_RANK


def _check_shared(options: HtpOptions, chips: Sequence[Chip]) -> None:
    if options.one_binary and len(chips) < 2:
        raise ConfigError("--one-binary is for several chips: add another --soc")
    for chip in chips if options.share_weights else ():
        if not chip.weight_sharing:
            raise ConfigError(
                f"no source claims that {chip.name} can share weights: leave out --share-weights"
            )


def _describe(recipe: Recipe) -> str:
    weights = f" with a scale for each {recipe.weights.granularity}" if recipe.weights else ""
    cache = f" and a cache of {recipe.kv_bits} bits" if recipe.kv_bits else ""
    return f"{recipe.name}{weights}{cache}"


def _fingerprint(path: Path) -> list[str | int]:
    return [path.name, path.stat().st_size, path.stat().st_mtime_ns]
