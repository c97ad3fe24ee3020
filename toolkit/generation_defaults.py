"""How a model's maker wants it sampled: the defaults of `generation_config.json`.

They are what `generate` of transformers takes where the caller gives nothing else.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from .config import SamplingConfig
from .documents import convert_document
from .errors import BundleError, OmniDraftError

GENERATION_CONFIG = "generation_config.json"

_TOP_K_WHEN_SAMPLING = 50
"""What transformers takes where a file that samples names none (`GenerationConfig`)."""
_LEAST_TOP_P = 2.0**-24
"""Stands for 0, which keeps the likeliest token alone."""

WITHOUT_EFFECT = frozenset(
    {
        # How long a response may be, which --max-new-tokens decides.
        "max_length",
        "max_new_tokens",
        "max_time",
        # Ids, which the tokenizer's documents are read with.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        # What a call in Python returns, how fast, and with which cache.
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "low_memory",
        "prefill_chunk_size",
        "remove_invalid_values",
        "renormalize_logits",
        "transformers_version",
        "_from_model_config",
        # Of beams, where there are any.
        "early_stopping",
        "length_penalty",
        # Drafting, which changes no text.
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "assistant_ensemble_weight",
        "speculation_type",
        "target_lookbehind",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
    }
)

_EMPTY: tuple[Any, ...] = (None, False, 0, [], {})
_ONE = (None, 1)
# Settings that change a text and are not followed, with the values that change nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "min_length",
            "min_new_tokens",
            "stop_strings",
            "diversity_penalty",
            "penalty_alpha",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "force_words_ids",
            "constraints",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "exponential_decay_length_penalty",
            "suppress_tokens",
            "begin_suppress_tokens",
            "sequence_bias",
            "token_healing",
            "watermarking_config",
            "dola_layers",
        ),
        _EMPTY,
    ),
    **dict.fromkeys(
        (
            "num_beams",
            "num_beam_groups",
            "num_return_sequences",
            "encoder_repetition_penalty",
            "guidance_scale",
        ),
        _ONE,
    ),
}
# The same, of sampling only.
_NOT_FOLLOWED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": _ONE,
    "epsilon_cutoff": _EMPTY,
    "eta_cutoff": _EMPTY,
    "top_h": (None,),
    "xtc_probability": _EMPTY,
    "mirostat": _EMPTY,
}

_Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class _Document:
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


FOLLOWED = frozenset(_Document.__dataclass_fields__)
NOT_FOLLOWED = _NOT_FOLLOWED.keys() | _NOT_FOLLOWED_SAMPLING.keys()


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Options where the user gives none; None where the maker gives none either."""

    temperature: float | None = None
    """None, and so greedy, unless the maker wants sampling."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampling(self, *, seed: int | None = None, **given: float | None) -> SamplingConfig:
        """What is decoded with: the options that are given, then these, then greedy decoding.

        Args:
            seed: as for `SamplingConfig`.
            given: fields of this class; None for an option that is not given.

        Raises:
            ConfigError: an option has a value that cannot be used.
        """
        return SamplingConfig(seed=seed, **_present(asdict(self)) | _present(given))

    def used(self, **given: float | None) -> str:
        """Those that take effect beside the options given: "temperature 0.6, top-p 0.9".

        Empty where none does.
        """
        with_them, without = (
            self.sampling(seed=None, **given),
            GenerationDefaults().sampling(seed=None, **given),
        )
        is_greedy = with_them.temperature == 0
        names = ["repetition_penalty"] if is_greedy else list(asdict(self))
        return ", ".join(
            f"{name.replace('_', '-')} {getattr(with_them, name):g}"
            for name in names
            if getattr(with_them, name) != getattr(without, name)
        )


def generation_defaults(
    document: Mapping[str, Any],
    where: str,
    *,
    error: type[OmniDraftError] = BundleError,
    advice: str = "export the bundle again",
) -> GenerationDefaults:
    """What a `generation_config.json` asks for.

    Args:
        document: the parsed file.
        where: what to call it.
        error: what is raised.
        advice: what to do about a value that cannot be.

    Raises:
        OmniDraftError: of the class `error`; a value has a wrong type or is out of range.
    """
    found = convert_document(dict(document), _Document, where, error=error, advice=advice)
    top_p = found.top_p if found.top_p is None else max(found.top_p, _LEAST_TOP_P)
    temperature, top_k = None, found.top_k
    if found.do_sample:
        temperature = 1.0 if found.temperature is None else found.temperature
        top_k = _TOP_K_WHEN_SAMPLING if top_k is None else top_k
    return GenerationDefaults(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=found.min_p,
        repetition_penalty=found.repetition_penalty,
    )


def not_followed(document: Mapping[str, Any]) -> list[str]:
    """Settings of a `generation_config.json` that change a text and are not followed."""
    known = _NOT_FOLLOWED | (_NOT_FOLLOWED_SAMPLING if document.get("do_sample") else {})
    return [name for name, neutral in known.items() if document.get(name) not in neutral]


def _present(options: Mapping[str, float | None]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
