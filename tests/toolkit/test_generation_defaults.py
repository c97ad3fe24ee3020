"""What `generation_config.json` asks for, by the class of the installed transformers."""

import pytest

from omnidraft_npu.config import SamplingConfig
from omnidraft_npu.errors import BundleError, ConfigError
from omnidraft_npu.generation_defaults import (
    FOLLOWED,
    NOT_FOLLOWED,
    WITHOUT_EFFECT,
    GenerationDefaults,
    generation_defaults,
    not_followed,
)

LLAMA_3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}


def read(**document):
    return generation_defaults(document, "generation_config.json")


def test_every_setting_of_transformers_is_decided_on():
    from transformers import GenerationConfig

    settings = {*GenerationConfig().to_dict(), *GenerationConfig._get_default_generation_params()}
    decided = [FOLLOWED, WITHOUT_EFFECT, NOT_FOLLOWED]
    assert settings <= set().union(*decided)
    assert sum(map(len, decided)) == len(set().union(*decided))


def test_the_defaults_of_transformers_themselves_change_nothing():
    from transformers import GenerationConfig

    for document in (
        GenerationConfig().to_dict(),
        GenerationConfig._get_default_generation_params(),
    ):
        assert read(**document).sampling() == SamplingConfig(top_k=document["top_k"] or 0)
        assert read(**document).used() == ""
        assert not_followed(document) == []


def test_where_sampling_is_on_silent_settings_are_those_of_transformers():
    from transformers import GenerationConfig

    theirs = GenerationConfig._get_default_generation_params()
    ours = read(do_sample=True).sampling()
    for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
        assert getattr(ours, name) == theirs[name]
    assert ours.min_p == 0


def test_options_override_the_model_one_by_one():
    llama = read(**LLAMA_3)

    assert llama.sampling() == SamplingConfig(temperature=0.6, top_k=50, top_p=0.9)
    assert llama.sampling(temperature=0.0, seed=3) == SamplingConfig(top_k=50, top_p=0.9, seed=3)
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert llama.sampling(**given) == SamplingConfig(temperature=1.0)
    assert llama.used() == "temperature 0.6, top-k 50, top-p 0.9"
    assert llama.used(temperature=0.8, top_k=5) == "top-p 0.9"
    assert llama.used(temperature=0.0) == ""
    assert llama.used(temperature=0.6, top_k=50, top_p=0.9) == ""
    assert GenerationDefaults().sampling() == SamplingConfig()


def test_without_sampling_only_the_penalty_holds():
    greedy = read(repetition_penalty=1.3, temperature=0.7, top_p=0.8, do_sample=False)

    assert greedy.sampling().temperature == 0
    assert greedy.sampling().repetition_penalty == 1.3
    assert greedy.used() == "repetition-penalty 1.3"
    assert greedy.used(temperature=0.5) == "top-p 0.8, repetition-penalty 1.3"


def test_no_share_at_all_keeps_the_likeliest_token():
    assert 0 < read(top_p=0.0).sampling(temperature=1.0).top_p < 1e-6


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("do_sample", "yes"),
        ("do_sample", 1),
        ("temperature", -0.1),
        ("temperature", "0.5"),
        ("temperature", [0.5]),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", 2**40),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", True),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_file(setting, value):
    with pytest.raises(BundleError, match=rf"generation_config\.json.*{setting}") as caught:
        read(**{setting: value})
    assert "\n" not in str(caught.value)


def test_an_option_that_cannot_be_is_refused_whatever_the_model_wants():
    with pytest.raises(ConfigError, match="top_p is 2"):
        read(**LLAMA_3).sampling(top_p=2.0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("bad_words_ids", [[5]]),
        ("suppress_tokens", [5]),
        ("forced_bos_token_id", 1),
        ("forced_eos_token_id", 2),
        ("min_new_tokens", 5),
        ("num_beams", 4),
        ("guidance_scale", 1.5),
        ("stop_strings", ["END"]),
        ("sequence_bias", [[[5], -1.0]]),
    ],
)
def test_what_is_not_followed_is_known_by_name(setting, value):
    assert not_followed({setting: value}) == [setting]


def test_settings_of_sampling_matter_only_where_it_is_on():
    assert not_followed({"typical_p": 0.9}) == []
    assert not_followed({"typical_p": 0.9, "do_sample": True}) == ["typical_p"]
