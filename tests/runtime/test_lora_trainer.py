"""Updates of an adapter: they lower the loss, repeat exactly, and survive bad numbers."""

import numpy as np
import onnx
import pytest
from decoder_graphs import GENAI, write_decoder
from onnx import numpy_helper
from training_graphs import tiny_training

from omnidraft_npu.distillation import PieceLaws
from omnidraft_npu.errors import BundleError, ConfigError
from omnidraft_npu.replay import Example
from omnidraft_npu.runtime.adamw import AdamWConfig
from omnidraft_npu.runtime.lora_trainer import LoraTrainer, TrainingStep

LENGTH, TOP = 16, 4
FAST = AdamWConfig(learning_rate=0.02)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    root = tmp_path_factory.mktemp("step")
    options = {"lora_modules": ("q_proj", "down_proj"), "num_top": TOP}
    path = tiny_training(root, lora_rank=2, batch=3, length=LENGTH, **options).path
    return TrainingStep(path, threads=1)


def example(seed, num_context=4, num_response=9):
    rng = np.random.default_rng(seed)
    pieces = rng.integers(3, 99, num_context + num_response).astype(np.int32)
    ids = np.stack([rng.permutation(99)[:TOP] for _ in range(num_response)])
    ids[:, 0] = pieces[-num_response:]
    probs = np.tile(np.float32([0.9, 0.05, 0, 0]), (num_response, 1))
    is_one = np.ones(num_response, np.bool_)
    return Example(
        pieces=pieces,
        laws=PieceLaws(ids=ids.astype(np.int32), probs=probs),
        tokens=np.arange(num_response, dtype=np.int32),
        is_drafted=is_one,
        is_direct=is_one.copy(),
    )


EXAMPLES = [example(seed) for seed in range(3)]


def test_updates_on_the_same_examples_lower_their_loss(step):
    trainer = LoraTrainer(step, FAST)
    losses = [trainer.update(EXAMPLES).loss for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_new_adapter_changes_nothing(step):
    trainer = LoraTrainer(step, FAST)
    zeros = {n: t * np.float32(n.startswith("head.")) for n, t in trainer.tensors.items()}
    batch = step.batch_of(EXAMPLES)
    loss, _ = step.run(batch, trainer.tensors)
    assert step.run(batch, zeros)[0] == pytest.approx(loss, rel=1e-6)


def test_the_same_updates_give_the_same_adapter(step):
    found = []
    for _ in range(2):
        trainer = LoraTrainer(step, FAST)
        for _ in range(3):
            trainer.update(EXAMPLES)
        found.append(trainer.tensors)
    for name, tensor in found[0].items():
        np.testing.assert_array_equal(tensor, found[1][name])


def test_training_goes_on_from_an_adapter(step):
    trainer = LoraTrainer(step, FAST)
    first = trainer.update(EXAMPLES)
    again = LoraTrainer(step, FAST, start=trainer.tensors)
    assert again.update(EXAMPLES).loss < first.loss


def test_a_law_stands_before_the_piece_that_it_is_about(step):
    batch = step.batch_of([example(0, num_context=2, num_response=5)])
    expected = np.zeros(LENGTH)
    expected[1:6] = 1
    np.testing.assert_array_equal(batch["forward_weight"][0], expected)
    np.testing.assert_array_equal(batch["law_ids"][0, 1:6, 0], batch["pieces"][0, 2:7])
    assert not batch["forward_weight"][1:].any()


def test_weights_belong_to_the_last_pieces(step):
    one = example(0, num_context=2, num_response=5)
    weights = [np.float32([0.1, 0.2, 0.3, 0.4, 0.5]), np.zeros(0, np.float32)]
    lone = example(0, num_context=0, num_response=1)
    batch = step.batch_of([one, lone], "near", weights=weights)
    np.testing.assert_allclose(batch["forward_weight"][0, 1:6], weights[0])
    assert not batch["forward_weight"][1].any()


@pytest.mark.parametrize("num_response", [15, 16, 17, 40])
def test_of_an_example_that_is_too_long_the_end_is_taken(step, num_response):
    one = example(1, num_context=3, num_response=num_response)
    batch = step.batch_of([one])
    np.testing.assert_array_equal(batch["pieces"][0], one.pieces[-LENGTH:])
    num_laws = min(num_response, LENGTH - 1)
    assert batch["forward_weight"][0].sum() == num_laws
    where = slice(LENGTH - 1 - num_laws, LENGTH - 1)
    np.testing.assert_array_equal(batch["law_ids"][0, where, 0], one.pieces[-num_laws:])


def test_an_example_of_one_piece_teaches_nothing(step):
    assert not step.batch_of([example(0, num_context=0, num_response=1)])["forward_weight"].any()


def test_the_paper_loss_learns_whole_tokens_in_reverse_and_parts_as_they_are(step):
    one = example(0, num_context=2, num_response=6)
    one.is_direct[1:4] = False
    one.is_drafted[3] = False
    batch = step.batch_of([one], "paper")
    np.testing.assert_array_equal(batch["reverse_weight"][0, 1:7], [1, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(batch["forward_weight"][0, 1:7], [0, 0.2, 0.2, 0, 0, 0])
    np.testing.assert_array_equal(batch["law_ids"][0, 2:4, 0], batch["pieces"][0, 3:5])
    np.testing.assert_array_equal(batch["law_probs"][0, 2:4], [[1, 0, 0, 0]] * 2)
    np.testing.assert_array_equal(one.laws.probs[1], example(0).laws.probs[1])


def test_the_overlap_loss_is_of_every_piece(step):
    batch = step.batch_of([example(0, num_context=2, num_response=5)], "overlap")
    np.testing.assert_array_equal(np.flatnonzero(batch["overlap_weight"][0]), range(1, 6))
    assert not batch["reverse_weight"].any()
    assert not batch["forward_weight"].any()


def test_a_graph_without_the_overlap_loss_learns_with_the_others(tmp_path):
    """As those are that were exported before it was there."""
    path = tiny_training(tmp_path, lora_rank=2, batch=3, length=LENGTH, num_top=TOP).path
    model = onnx.load(path, load_external_data=False)
    inputs = [value for value in model.graph.input if value.name != "overlap_weight"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    nothing = np.zeros((3, LENGTH), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(nothing, "overlap_weight"))
    path.write_bytes(model.SerializeToString())
    old = TrainingStep(path, threads=1)
    trainer = LoraTrainer(old, FAST, loss="near")
    losses = [trainer.update(EXAMPLES).loss for _ in range(12)]
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigError, match=r"lora_step\.onnx .*`overlap`.*export the bundle again"):
        LoraTrainer(old, FAST, loss="overlap").update(EXAMPLES)


@pytest.mark.parametrize("loss", ["reverse", "paper", "overlap"])
def test_the_other_losses_are_lowered_too(step, loss):
    for one in EXAMPLES:
        one.is_direct[::3] = False
    trainer = LoraTrainer(step, FAST, loss=loss)
    losses = [trainer.update(EXAMPLES).loss for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]


def test_an_update_that_is_called_off_changes_nothing_and_can_be_done_anew(step):
    trainer, other = LoraTrainer(step, FAST), LoraTrainer(step, FAST)
    step.cancel()
    before = trainer.tensors
    with pytest.raises(InterruptedError):
        trainer.update(EXAMPLES)
    for name, tensor in before.items():
        np.testing.assert_array_equal(trainer.tensors[name], tensor)
    assert trainer.update(EXAMPLES).loss == other.update(EXAMPLES).loss


def test_training_goes_on_from_a_state_as_if_it_had_never_stopped(step):
    trainer = LoraTrainer(step, FAST)
    trainer.update(EXAMPLES)
    state = {name: np.array(tensor) for name, tensor in trainer.state().items()}
    resumed = LoraTrainer(step, FAST)
    resumed.restore(state)
    for one in (trainer, resumed):
        one.update(EXAMPLES)
    assert resumed.num_steps == 2
    for name, tensor in trainer.tensors.items():
        np.testing.assert_array_equal(resumed.tensors[name], tensor)
    with pytest.raises(ValueError, match="other tensors"):
        resumed.restore({name: t for name, t in state.items() if not name.endswith("q_proj.B")})


def test_a_loss_that_is_no_number_is_said_and_skipped(step, caplog):
    trainer = LoraTrainer(step, FAST)
    bad = example(0)
    bad.laws.probs[0, 0] = np.nan
    before = trainer.tensors
    assert trainer.update([bad]).norm is None
    assert "skipped" in caplog.text
    for name, tensor in before.items():
        np.testing.assert_array_equal(trainer.tensors[name], tensor)


def test_an_adapter_of_another_rank_is_refused(step):
    tensors = {name: t[..., :1] for name, t in LoraTrainer(step, FAST).tensors.items()}
    with pytest.raises(BundleError, match="forget"):
        LoraTrainer(step, FAST, start=tensors)


def test_a_graph_of_another_kind_is_refused(step, tmp_path):
    with pytest.raises(BundleError, match="no training graph"):
        TrainingStep(write_decoder(tmp_path / "model.onnx", GENAI))
