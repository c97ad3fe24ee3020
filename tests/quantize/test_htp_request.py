"""Which graphs a chip gets."""

import dataclasses

import pytest

from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.quantize.htp_request import HtpOptions, HtpRequest
from omnidraft_npu.quantize.recipes import RECIPES, SMALL


def lengths(chip, recipe, context_length=1024, group=3, verify_length=8):
    options = HtpOptions(soc=(chip,), verify_length=verify_length)
    request = HtpRequest(chips=(find_chip(chip),), options=options)
    return request.lengths(recipe, context_length, group)


@pytest.mark.parametrize(
    ("chip", "recipe", "group", "wanted"),
    [
        ("x-elite", "w8a16", 3, (1, 8, 128)),
        ("sm8450", "w8a16", 3, (8, 128)),
        ("sm8450", "w8a16", 8, (1, 8, 128)),
        ("sm8450", "fp16", 3, (1, 8, 128)),
    ],
)
def test_a_chip_that_fails_on_few_rows_gets_no_graph_of_one_token(chip, recipe, group, wanted):
    """On v69, quantised attention of one token with three queries a key head came out wrong."""
    assert lengths(chip, RECIPES[recipe], group=group) == wanted


def test_attention_in_floats_gives_v69_the_graph_of_one_token():
    recipe = dataclasses.replace(RECIPES["w8a16"], has_float_attention=True)
    assert lengths("sm8450", recipe) == (1, 8, 128)


def test_no_graph_is_longer_than_the_context():
    assert lengths("x-elite", RECIPES["w8a16"], 24, group=1, verify_length=32) == (1, 24)


def test_chips_that_need_different_recipes_are_exported_for_apart():
    request = HtpRequest(
        chips=(find_chip("x-elite"), find_chip("8-gen-1")),
        options=HtpOptions(soc=("x-elite", "8-gen-1")),
    )
    with pytest.raises(
        ConfigError, match=r"X Elite needs w4a16 .*, and Snapdragon 8 Gen 1 w8a16 .* apart"
    ):
        request.recipe(7_000_000_000)


def test_the_size_of_a_model_decides_unless_the_user_does():
    chips = (find_chip("x-elite"),)
    by_size = HtpRequest(chips=chips, options=HtpOptions(soc=("x-elite",)))
    chosen = HtpRequest(chips=chips, options=HtpOptions(soc=("x-elite",), precision="w4a16"))
    assert [by_size.recipe(size).name for size in (SMALL - 1, SMALL)] == ["w8a16", "w4a16"]
    assert chosen.recipe(SMALL - 1).name == "w4a16"
