"""What an export for an NPU takes, against what was measured, and told before any work."""

import dataclasses

import pytest

from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.errors import ConfigError, ExportError
from omnidraft_npu.quantize.architecture import DecoderConfig, RopeConfig
from omnidraft_npu.quantize.preflight import check_disk, check_memory, estimate
from omnidraft_npu.quantize.recipes import RECIPES

X_ELITE, OLD = find_chip("x-elite"), find_chip("888")


def decoder(num_layers, hidden, intermediate, heads, kv_heads, vocab):
    return DecoderConfig(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        num_logits=vocab,
        context_length=4096,
        norm_eps=1e-5,
        rope=RopeConfig(base=10_000.0),
        layer_types=("full",) * num_layers,
        attention_scale=1.0,
    )


SMOLLM2 = decoder(30, 576, 1536, 9, 3, 49_152)
LLAMA_2_7B = decoder(32, 4096, 11_008, 32, 32, 32_000)


def estimated(
    config, recipe, context_length=1024, num_binaries=1, chips=(X_ELITE,), max_ram=None, **changes
):
    chosen = RECIPES[recipe]
    return estimate(
        "it",
        config,
        dataclasses.replace(chosen, **{"kv_bits": chosen.kv_bits and 16} | changes),
        context_length=context_length,
        chips=chips,
        num_binaries=num_binaries,
        max_ram_bytes=max_ram,
    )


def of_layers(config, n):
    return dataclasses.replace(config, num_layers=n, layer_types=("full",) * n)


@pytest.mark.parametrize(
    ("recipe", "binary", "ram"),
    [("fp16", 327e6, 3.8e9), ("w8a16", 196e6, 1.08e9), ("w4a16", 147e6, 0.95e9)],
)
def test_estimates_fit_what_was_measured_for_smollm2_135m(recipe, binary, ram):
    found = estimated(SMOLLM2, recipe)
    assert found.weight_bytes == pytest.approx(binary, rel=0.03)
    assert found.compile_ram_bytes == pytest.approx(ram, rel=0.15)


def test_estimates_fit_what_was_measured_for_a_layer_of_7b():
    """115 MB and 1.4 GB for each, as MatMulNBits with 4 bits everywhere."""
    one, two = (estimated(of_layers(LLAMA_2_7B, n), "w4a16-nbits", finer=()) for n in (1, 2))
    assert two.weight_bytes - one.weight_bytes == pytest.approx(115e6, rel=0.01)
    assert two.compile_ram_bytes - one.compile_ram_bytes == pytest.approx(1.4e9, rel=0.01)


def test_the_cache_grows_with_its_bits_and_its_length():
    def kv(recipe, context_length):
        return estimated(LLAMA_2_7B, recipe, context_length).kv_bytes

    assert kv("w8a16", 1024) == 2 * 32 * 4096 * 2 * 1024
    assert kv("fp16", 1024) == 2 * kv("w8a16", 1024)
    assert kv("w8a16", 2048) == 2 * kv("w8a16", 1024)


def test_a_cache_that_does_not_fit_says_how_long_it_may_be():
    with pytest.raises(ConfigError, match=r"400,000 tokens.*--htp-context-length \d+ or") as raised:
        estimated(SMOLLM2, "w8a16", 400_000)
    most = int(str(raised.value).split("--htp-context-length ")[1].split()[0])
    estimated(SMOLLM2, "w8a16", most)
    with pytest.raises(ConfigError):
        estimated(SMOLLM2, "w8a16", most + 64)


def test_a_model_of_several_contexts_has_room_for_cache_in_each():
    """7B with 4,096 tokens of 8 bits was refused on a chip whose four contexts hold it well."""
    found = estimated(LLAMA_2_7B, "w8a16", 4096, chips=(OLD,), kv_bits=8)
    assert len(found.parts) > 3
    with pytest.raises(ConfigError, match="--htp-context-length"):
        estimated(LLAMA_2_7B, "w4a16-nbits", 4096)
    estimated(LLAMA_2_7B, "w4a16-nbits", 2048)


def test_an_older_chip_has_less_room():
    estimated(SMOLLM2, "w8a16", 60_000)
    with pytest.raises(ConfigError, match="contexts of Snapdragon 888 that"):
        estimated(SMOLLM2, "w8a16", 60_000, chips=(X_ELITE, OLD))


def test_a_model_that_fits_one_context_is_left_whole():
    assert estimated(SMOLLM2, "fp16").parts == (range(30),)


def test_a_7b_model_is_split_into_parts_that_fit_and_take_less_memory_to_compile():
    found = estimated(LLAMA_2_7B, "w4a16")
    assert found.weight_bytes > X_ELITE.context_limit_bytes
    assert [(part.start, part.stop) for part in found.parts] == [(0, 16), (16, 32)]
    # A layer is 129 MB and its cache 17 MB; the embedding is 262 MB more.
    assert found.compile_ram_bytes == pytest.approx(5.5 * (16 * 129e6 + 262e6), rel=0.1)
    assert len(estimated(LLAMA_2_7B, "fp16").parts) == 5


def test_keys_and_values_of_more_bits_are_counted():
    """They have 8 bits in w4a16: 14 MB a 7B layer that the estimate once left out."""
    finer, plain = (estimated(LLAMA_2_7B, "w4a16", **o) for o in ({}, {"finer": ()}))
    more = 32 * 2 * 4096**2 * (1 - 0.568)
    assert finer.weight_bytes - plain.weight_bytes == pytest.approx(more, rel=0.01)


def test_a_model_goes_into_parts_that_compile_in_the_memory_it_may_take():
    found = estimated(LLAMA_2_7B, "w4a16", max_ram=8_000_000_000)
    assert found.ram_bytes <= 8e9
    assert sum(map(len, found.parts)) == 32
    assert len(found.parts) > 2
    check_memory("it", found, 8_000_000_000)
    least = estimated(LLAMA_2_7B, "w4a16", max_ram=1_000_000_000)
    assert len(least.parts) < 33
    with pytest.raises(ExportError, match=r"1\.0 GB are available"):
        check_memory("it", least, 1_000_000_000)


def test_of_a_model_in_parts_one_is_on_disk_in_floats():
    found = estimated(LLAMA_2_7B, "w4a16")
    half = 4 * (16 * 202.4e6 + 131e6)
    assert found.disk_bytes == pytest.approx(half + 6.74e9 + 2 * found.weight_bytes, rel=0.01)


def test_a_layer_that_no_context_holds_is_refused():
    huge = decoder(1, 4096, 300_000, 32, 32, 32_000)
    with pytest.raises(ExportError, match=r"a single layer.* use --htp-precision w8a16, a shorter"):
        estimated(huge, "fp16", chips=(OLD,))


def test_too_little_memory_is_told_with_both_figures_and_where_nothing_is_known_nothing():
    found = estimated(SMOLLM2, "fp16")
    with pytest.raises(ExportError, match=r"takes about 4\.1 GB of memory, 1\.0 GB are.*--max-ram"):
        check_memory("smollm2", found, 10**9)
    check_memory("smollm2", found, 10**10)
    check_memory("smollm2", found, None)


def test_recipes_of_fewer_bits_are_advised_where_the_chip_has_one():
    """Advised for v68 and v69 too, where w8a16 is the smallest."""
    gen1 = find_chip("8-gen-1")
    for chips, recipe, advised, not_advised in (
        ((X_ELITE,), "fp16", ["w8a16", "w4a16"], []),
        ((X_ELITE,), "w8a16", ["w4a16"], ["w8a16"]),
        ((X_ELITE,), "w4a16", [], ["w8a16", "w4a16"]),
        ((gen1,), "fp16", ["w8a16"], ["w4a16"]),
        ((gen1,), "w8a16", [], ["w8a16", "w4a16"]),
        ((X_ELITE, gen1), "w8a16", [], ["w4a16"]),
    ):
        found = estimated(SMOLLM2, recipe, chips=chips)
        with pytest.raises(ExportError) as told:
            check_memory("it", found, 10**6)
        assert all(f"--htp-precision {name}, " in str(told.value) for name in advised)
        assert not any(f"--htp-precision {name}, " in str(told.value) for name in not_advised)


def test_too_little_disk_is_told_with_both_figures():
    with pytest.raises(ExportError, match=r"about 2\.0 GB while.*has 1\.0 GB free"):
        check_disk(2 * 10**9, 10**9, "folder")
    check_disk(10**9, 10**9, "folder")
    one, six = (estimated(SMOLLM2, "fp16", num_binaries=n) for n in (1, 6))
    assert six.disk_bytes - one.disk_bytes == 5 * one.weight_bytes
