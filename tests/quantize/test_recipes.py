"""Which recipe a chip gets, and what it is refused."""

import pytest

from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.quantize.recipes import RECIPES, SMALL, recipe_for


@pytest.mark.parametrize(
    ("chip", "num_weights", "name"),
    [
        ("x-elite", 1_235_814_400, "w4a16"),
        ("x-elite", SMALL, "w4a16"),
        ("x-elite", SMALL - 1, "w8a16"),
        ("8-elite", 6_738_415_616, "w4a16"),
        ("8-elite", 134_515_008, "w8a16"),
        ("8-gen-1", 6_738_415_616, "w8a16"),
        ("888", 6_738_415_616, "w8a16"),
    ],
)
def test_a_large_model_gets_4_bits_where_the_chip_can(chip, num_weights, name):
    """A target of 135 million weights once got them by its role, and missed their own bounds."""
    assert recipe_for(find_chip(chip), num_weights).name == name


@pytest.mark.parametrize("chip", ["888", "qcs6490", "sa8295p"])
def test_v68_has_one_scale_a_weight_and_a_cache_of_8_bits(chip):
    recipe = recipe_for(find_chip(chip), 0)
    assert (recipe.weights.granularity, recipe.weights.bits, recipe.kv_bits) == ("tensor", 8, 8)
    assert recipe.head.granularity == "tensor"


@pytest.mark.parametrize(
    ("chip", "has_rotary_operator", "has_float_attention"),
    [("888", False, False), ("8-gen-1", True, True), ("x-elite", True, False)],
)
def test_what_a_chip_computes_wrongly_is_written_another_way(
    chip, has_rotary_operator, has_float_attention
):
    recipe = recipe_for(find_chip(chip), 0)
    assert recipe.has_rotary_operator is has_rotary_operator
    assert recipe.has_float_attention is has_float_attention


def test_the_user_chooses_recipe_and_cache():
    recipe = recipe_for(find_chip("x-elite"), 0, name="w8a16", kv_bits=16)
    assert (recipe.name, recipe.kv_bits) == ("w8a16", 16)


@pytest.mark.parametrize(
    ("chip", "options", "message"),
    [
        ("x-elite", {"name": "w2a16"}, "no recipe 'w2a16': choose from fp16, w8a16"),
        ("888", {"name": "w4a16"}, "w4a16 needs Hexagon v73 or later and Snapdragon 888 has v68"),
        ("888", {"name": "fp16"}, "fp16 computes in fp16, which no source claims"),
        ("q-6690", {"name": "w4a16-nbits"}, "w4a16-nbits computes in fp16, which no source"),
        ("888", {"kv_bits": 16}, "takes a cache of 8 bits only: use --kv-bits 8"),
        ("8-gen-1", {"kv_bits": 16}, "v69.? takes a cache of 8 bits only: use --kv-bits 8"),
        ("x-elite", {"name": "fp16", "kv_bits": 8}, "fp16 keeps its cache in floating point"),
    ],
)
def test_what_a_chip_cannot_do_is_refused(chip, options, message):
    with pytest.raises(ConfigError, match=message):
        recipe_for(find_chip(chip), 0, **options)


@pytest.mark.parametrize(
    ("chip", "is_float"), [("x-elite", True), ("888", False), ("sa8295p", True)]
)
def test_the_residual_stream_is_fp16_where_the_chip_computes_in_it(chip, is_float):
    assert recipe_for(find_chip(chip), 0).has_float_residual is is_float


def test_every_recipe_says_what_it_may_lose():
    assert all(0 < recipe.max_loss < 0.1 for recipe in RECIPES.values())


@pytest.mark.parametrize("name", ["w4a16", "w4a16-nbits"])
def test_keys_and_values_keep_8_bits_beside_4(name):
    recipe = RECIPES[name]
    assert [
        recipe.format_of(part).bits for part in ("q_proj", "k_proj", "v_proj", "down_proj")
    ] == [
        4,
        8,
        8,
        4,
    ]
    assert RECIPES["fp16"].format_of("k_proj") is None
