"""The chip table: every name that people use, and nothing that cannot be compiled for."""

import pytest

from omnidraft_npu.chips.table import all_chips, find_chip, sources
from omnidraft_npu.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "soc_model"),
    [
        ("x-elite", 60),
        ("Snapdragon X Elite", 60),
        ("X_ELITE", 60),
        ("sc8380xp", 60),
        ("X1E-80-100", 60),
        ("60", 60),
        ("x2-elite", 88),
        ("Snapdragon 8 Elite for Galaxy", 69),
        ("sm8750-ac", 69),
        ("SM8750P", 69),
        ("SM8850-P", 87),
        ("X2E-88-100", 88),
        ("X2E-96-100", 88),
        ("X1E-78-100", 60),
        ("X1P-66-100", 60),
        ("SM8850-AD", 87),
        ("QCS8750", 69),
        ("8 elite gen 5", 87),
        ("8 Gen 2", 43),
        ("888", 30),
        ("30", 30),
        ("8+ Gen 1", 42),
        ("Dragonwing IQ-9075", 77),
        ("SA8775P", 52),
        ("rb3 gen 2", 93),
        ("Snapdragon X Elite CRD", 60),
        ("Snapdragon X Plus 8-Core CRD", 60),
        ("Snapdragon 8 Elite QRD", 69),
        ("Samsung Galaxy S25 (Family)", 69),
        ("Samsung Galaxy S26", 87),
        ("QCS8550 (Proxy)", 43),
        ("SA8775P ADP", 52),
        ("RB3 Gen 2 (Proxy)", 93),
        ("Dragonwing IQ-9075 EVK", 77),
        ("Arduino VENTUNO Q", 82),
        ("sm8650", 57),
        (" 88 ", 88),
    ],
)
def test_any_spelling_of_a_name_finds_the_chip(name, soc_model):
    assert find_chip(name).soc_model == soc_model


@pytest.mark.parametrize("name", ["X1P64100", "X1P42100"])
def test_both_x_plus_parts_are_the_x_plus(name):
    """Neighbouring tools refused these parts though the X Plus was supported."""
    chip = find_chip(name)
    assert (chip.key, chip.soc_model, chip.arch) == ("x-plus", 60, 73)


@pytest.mark.parametrize(
    ("name", "near"), [("sm8755", "8-elite"), ("x-elit", "x-elite"), ("8 Elite Gen 7", "8-elite")]
)
def test_an_unknown_chip_lists_near_ones(name, near):
    with pytest.raises(ConfigError, match=f"(?s){name}.*near it are.*{near}.*devices"):
        find_chip(name)


@pytest.mark.parametrize("name", ["-1", "6.0", "6-0", "0", "1000"])
def test_only_the_number_itself_is_a_soc_model(name):
    with pytest.raises(ConfigError, match=f"no chip '{name}' is known"):
        find_chip(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Samsung Galaxy S24 (Family)", r"8-elite \(Samsung Galaxy S25\)"),
        ("sc8280xp", r"x-elite \(sc8380xp\)"),
    ],
)
def test_near_names_that_their_key_does_not_tell_are_shown(name, near):
    """Nothing says which chip these have, so none is guessed."""
    with pytest.raises(ConfigError, match=near):
        find_chip(name)


@pytest.mark.parametrize("name", ["", "zzzzzzzz", "sm8750-zz", "🐟"])
def test_a_name_like_no_other_is_one_line_too(name):
    with pytest.raises(ConfigError, match="is known") as raised:
        find_chip(name)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(("name", "arch"), [("sm8250-ab", 66), ("855", 66), ("sdm845", 65)])
def test_a_chip_older_than_the_htp_backend_is_refused_with_why(name, arch):
    with pytest.raises(ConfigError, match=f"too old: its NPU is Hexagon v{arch}.*needs v68"):
        find_chip(name)


def test_no_two_chips_have_one_name_and_every_source_is_named():
    names = [name for chip in all_chips() for name in (chip.key, *chip.aliases)]
    assert len(names) == len(set(names))
    assert {chip.source for chip in all_chips()} == set(sources())


def test_where_the_simulator_disagrees_on_the_architecture_a_note_says_so():
    differing = [c for c in all_chips() if c.simulated and c.simulated.arch != c.arch]
    assert [chip.key for chip in differing] == ["8-plus-gen-1"]
    assert all("simulator" in note for chip in differing for note in chip.notes)


def test_every_known_disagreement_is_kept():
    notes = {chip.key: " ".join(chip.notes) for chip in all_chips()}
    assert "olive-recipes pass 87" in notes["x2-elite"]
    assert "66" in notes["8-gen-2"]
    assert "fp16 although v68" in notes["sa8295p"]
    for key in ("778g", "q-6690"):
        assert "not fp16" in notes[key]
        assert find_chip(key).weight_sharing
        assert not find_chip(key).fp16
