"""Which graphs a chip gets."""

import dataclasses

import pytest

from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.quantize.htp_request import HtpOptions, HtpRequest
from omnidraft_npu.quantize.recipes import RECIPES


def request(chip, recipe, verify_length=8):
    options = HtpOptions(soc=(chip,), verify_length=verify_length)
    return HtpRequest(chips=(find_chip(chip),), recipe=RECIPES[recipe], options=options)


@pytest.mark.parametrize(
    ("chip", "recipe", "group", "lengths"),
    [
        ("x-elite", "w8a16", 3, (1, 8, 128)),
        ("sm8450", "w8a16", 3, (8, 128)),
        ("sm8450", "w8a16", 8, (1, 8, 128)),
        ("sm8450", "fp16", 3, (1, 8, 128)),
    ],
)
def test_a_chip_that_fails_on_few_rows_gets_no_graph_of_one_token(chip, recipe, group, lengths):
    """On v69, quantised attention of one token with three queries a key head came out wrong."""
    assert request(chip, recipe).lengths(1024, group) == lengths


def test_attention_in_floats_gives_v69_the_graph_of_one_token():
    asked = request("sm8450", "w8a16")
    recipe = dataclasses.replace(asked.recipe, has_float_attention=True)
    assert dataclasses.replace(asked, recipe=recipe).lengths(1024, 3) == (1, 8, 128)


def test_no_graph_is_longer_than_the_context():
    assert request("x-elite", "w8a16", verify_length=32).lengths(24, 1) == (1, 24)
