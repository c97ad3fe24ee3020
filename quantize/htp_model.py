"""A model that is to have an NPU flavour, and what can be known of that before any work."""

import dataclasses
import logging

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.text.tokenizer import Tokenizer

from .calibration.texts import calibration_text
from .checkpoints.checkpoint import Checkpoint, TokenizerFiles
from .htp.decoder_graph import HtpGraphOptions
from .htp_request import DEFAULT_CONTEXT_LENGTH, HtpRequest
from .preflight import HtpEstimate, check_memory, estimate, size_text
from .recipes import RECIPES, Recipe

logger = logging.getLogger(__name__)

_FEW_PROMPTS, _FEW_TOKENS = 8, 1000
"""Calibration on less is not trusted without a word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HtpModel:
    """A model that is to have an NPU flavour, and what its graphs can do."""

    name: str
    request: HtpRequest
    checkpoint: Checkpoint
    tokenizer: TokenizerFiles
    max_context_length: int
    """Most tokens of a conversation, on any device."""
    lora_rank: int
    has_hidden_states: bool

    @property
    def recipe(self) -> Recipe:
        """What it is made of, by the chips and its size."""
        return self.request.recipe(self.checkpoint.config.num_weights)

    @property
    def options(self) -> HtpGraphOptions:
        """Lengths, context and inputs of the graphs."""
        config, wanted = self.checkpoint.config, self.request.options
        context_length = min(
            wanted.context_length or DEFAULT_CONTEXT_LENGTH,
            self.max_context_length,
            config.context_length,
        )
        lengths = self.request.lengths(
            self.recipe, context_length, config.num_heads // config.num_kv_heads
        )
        has_prefill = wanted.verify_length in lengths[:-1]
        return HtpGraphOptions(
            lengths=lengths,
            context_length=context_length,
            prefill_length=lengths[-1] if has_prefill else None,
            lora_rank=self.lora_rank,
            has_hidden_states=self.has_hidden_states,
        )


def check_htp(model: HtpModel, available_ram: int | None) -> HtpEstimate:
    """What can be known to fail before anything is made; what may disappoint is logged.

    Returns:
        What the model takes.

    Raises:
        ConfigError, ExportError: memory here, or that of a chip, does not suffice; options that
            a chip or the model cannot have.
        PromptError: the calibration file cannot be used.
    """
    request, options = model.request, model.options
    _check_options(model)
    _tell_recipe(model)
    if model.recipe.weights is not None:
        tokenizer = Tokenizer.from_documents(
            model.tokenizer.tokenizer_json, model.tokenizer.tokenizer_config
        )
        text = calibration_text(
            request.options.calibration,
            tokenizer,
            context_length=options.context_length,
            window=max(options.lengths),
        )
        if text.num_prompts < _FEW_PROMPTS or text.num_tokens < _FEW_TOKENS:
            logger.warning(
                "%s is calibrated on %d prompts of %d tokens in all, and other text may go beyond "
                "their range: give %d prompts and %d tokens or more, or leave out --calibration",
                model.name,
                text.num_prompts,
                text.num_tokens,
                _FEW_PROMPTS,
                _FEW_TOKENS,
            )
    found = estimate_htp(model)
    check_memory(model.name, found, request.options.max_ram_bytes or available_ram)
    if len(found.parts) > 1:
        logger.info(
            "%s has %s of weights and cache and goes into %d parts, each a context of its own on "
            "the NPU",
            model.name,
            size_text(found.weight_bytes + found.kv_bytes),
            len(found.parts),
        )
        if not request.options.share_weights:
            logger.warning(
                "the graphs of %s for %s tokens each hold the weights, %s in all: --share-weights "
                "keeps them once, in binaries that only a device loads",
                model.name,
                ", ".join(map(str, options.lengths)),
                size_text(found.weight_bytes * len(options.lengths)),
            )
    return found


def _tell_recipe(model: HtpModel) -> None:
    """Say what was chosen for the user."""
    if model.request.options.precision is None:
        logger.info(
            "%s has %s weights and goes to the NPU in %s; with --htp-precision it can be any of %s",
            model.name,
            f"{model.checkpoint.config.num_weights:,}",
            model.recipe.name,
            ", ".join(RECIPES),
        )


def _check_options(model: HtpModel) -> None:
    options, recipe = model.request.options, model.recipe
    wanted, limit = options.context_length, model.checkpoint.config.context_length
    if wanted is not None and wanted > model.max_context_length:
        raise ConfigError(
            f"--htp-context-length {wanted} is more than --context-length "
            f"{model.max_context_length}, the most that a conversation holds: give "
            f"{model.max_context_length} or less, or a larger --context-length"
        )
    if wanted is not None and wanted > limit:
        logger.warning(
            "%s is for %d tokens at most: its cache on the NPU has %d slots, not %d",
            model.name,
            limit,
            limit,
            wanted,
        )
    without = model.request.chips_without_adapters()
    if model.lora_rank and without:
        raise ConfigError(
            f"adapters of {model.name} are computed in fp16 on the NPU, which no source claims for "
            f"{without[0].name}: leave out --soc {without[0].key}, or --lora-rank"
        )
    if recipe.kv_bits == 16:
        logger.warning(
            "%s gets a cache of 16 bits, twice the memory of 8; as far as QNN's simulator shows, "
            "the NPU multiplies by no more than 8 of them: compare with --kv-bits 8",
            model.name,
        )


def estimate_htp(model: HtpModel) -> HtpEstimate:
    """What the model takes, and its parts: the same whenever it is asked."""
    request, options = model.request, model.options
    return estimate(
        model.name,
        model.checkpoint.config,
        model.recipe,
        context_length=options.context_length,
        chips=request.chips,
        num_binaries=(1 if request.options.share_weights else len(options.lengths))
        * (1 if request.options.one_binary else len(request.chips)),
        max_ram_bytes=request.options.max_ram_bytes,
    )
