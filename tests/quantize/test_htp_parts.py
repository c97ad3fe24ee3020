"""A model in parts: which layers go where, and that the parts together are the whole."""

import dataclasses
import itertools

import numpy as np
import pytest
from reference_models import random_ids
from simulated_htp import open_simulated, relative_error
from static_runner import StaticRunner

from omnidraft_npu.errors import ExportError
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions, build_htp_decoder
from omnidraft_npu.quantize.htp.parts import split_layers

OPTIONS = HtpGraphOptions(lengths=(1, 8), context_length=24, lora_rank=2, has_hidden_states=True)


@pytest.fixture
def build(tmp_path):
    def run(model, *layers, **runner) -> list[StaticRunner]:
        return [
            StaticRunner(
                build_htp_decoder(
                    model.config,
                    model.tensors.__getitem__,
                    tmp_path / f"{part}",
                    dataclasses.replace(OPTIONS, layers=part),
                ),
                sliding_window=model.config.sliding_window,
                **runner,
            )
            for part in layers
        ]

    return run


def run_in_turn(parts, ids):
    """The last part's outputs; what one part gives beside its cache is the next one's input."""
    feeds = {}
    for part in parts:
        part.run(ids, **feeds)
        feeds = {name: padded(rows) for name, rows in part.outputs.items()}
    return parts[-1].outputs


def padded(rows):
    length = min(length for length in OPTIONS.lengths if length >= len(rows))
    return np.pad(rows, ((0, length - len(rows)), (0, 0)))[None]


@pytest.mark.parametrize("variant", ["llama", "llama3-scaled", "gemma3_text"])
def test_parts_in_turn_equal_the_whole(models, build, rng, variant):
    """A tied head reads the embedding again; a part has the tables and masks of its layers."""
    model = models(variant)
    n = model.config.num_layers
    parts = build(model, range(1), range(1, n - 1), range(n - 1, n))
    (whole,) = build(model, None)

    for ids in (random_ids(rng, 8), random_ids(rng, 1), random_ids(rng, 5), random_ids(rng, 8)):
        outputs = run_in_turn(parts, ids)
        whole.run(ids)
        assert outputs.keys() == {"logits", "hidden_states"}
        for name, rows in outputs.items():
            np.testing.assert_allclose(rows, whole.outputs[name], rtol=1e-5, atol=1e-6)


def test_a_part_holds_its_own_layers_only(models, build, tmp_path):
    model = models("llama", vocab_size=2000)
    parts = build(model, range(1), range(1, 2), range(2, 3))

    tables = 4 * 2000 * 64
    sizes = [(tmp_path / str(range(i, i + 1)) / "weights.data").stat().st_size for i in range(3)]
    assert max(sizes) < 1.5 * tables and sizes[1] < 0.5 * tables
    for i, part in enumerate(parts):
        names = {value.name for value in part.sessions[8].get_inputs()}
        assert ("input_ids" in names) == (i == 0)
        assert {name.split(".")[1] for name in names if "past" in name} == {str(i)}
        assert {name.split(".")[2] for name in names if "lora" in name} == {str(i)}


def test_parts_run_on_qnn_in_turn(models, build, rng):
    model = models("gemma3_text")
    ids = random_ids(rng, 8)
    parts = build(model, range(2), range(2, 4), open_session=open_simulated)

    assert relative_error(run_in_turn(parts, ids)["logits"], model.logits(ids)) < 1e-2


@pytest.mark.parametrize("layers", [range(4), range(-1, 2), range(0, 3, 2), range(2, 2)])
def test_layers_that_the_model_does_not_have_are_refused(models, build, layers):
    with pytest.raises(ValueError, match="no run of the 3 layers"):
        build(models("llama"), layers)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (140, [(0, 10)]),
        (139, [(0, 5), (5, 10)]),
        (70, [(0, 5), (5, 10)]),
        (69, [(0, 3), (3, 8), (8, 10)]),
        (30, [(0, 1), (1, 4), (4, 7), (7, 9), (9, 10)]),
    ],
)
def test_parts_are_few_and_even(room, expected):
    """Ten layers of 10, an embedding of 20 before them and a head of 20 after."""
    parts = split_layers(10, layer_bytes=10, first_bytes=20, last_bytes=20, room=room)
    assert [(part.start, part.stop) for part in parts] == expected


def test_no_other_split_into_as_many_parts_has_a_smaller_largest(rng):
    for _ in range(40):
        n, layer, first, last = (int(x) for x in rng.integers(1, 9, 4))
        room = int(rng.integers(layer + first + last, 40))
        parts = split_layers(n, layer_bytes=layer, first_bytes=first, last_bytes=last, room=room)
        sizes = [layer] * n
        sizes[0] += first
        sizes[-1] += last
        assert list(itertools.chain(*parts)) == list(range(n))

        def largest(cuts, sizes=sizes, n=n):
            edges = [0, *cuts, n]
            return max(sum(sizes[a:b]) for a, b in itertools.pairwise(edges))

        fits = {
            k: min(largest(cuts) for cuts in itertools.combinations(range(1, n), k - 1))
            for k in range(1, len(parts) + 1)
        }
        assert fits[len(parts)] == largest([part.start for part in parts[1:]])
        assert all(size > room for k, size in fits.items() if k < len(parts))


def test_a_layer_that_fits_nowhere_is_one_line():
    with pytest.raises(ExportError, match="300 bytes, a context holds 200"):
        split_layers(4, layer_bytes=100, first_bytes=200, last_bytes=0, room=200)
