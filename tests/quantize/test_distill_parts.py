"""The torch side of distillation, part by part, on tiny random models."""

import json

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_checkpoint
from tiny_models import tiny_model
from tiny_teacher import question, teacher_of

from omnidraft_npu.errors import CheckpointError, ConfigError
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.distillation.examples import Batch, ExampleMaker, batches
from omnidraft_npu.quantize.distillation.folder import write_drafter
from omnidraft_npu.quantize.distillation.llama import Llama
from omnidraft_npu.quantize.distillation.loss import batch_logits, held_out_acceptance, law_loss
from omnidraft_npu.quantize.distillation.starting import (
    drafter_config,
    largest_neurons,
    piece_embeddings,
    start_from_target,
)
from omnidraft_npu.quantize.distillation.teacher_head import NUM_TOP
from omnidraft_npu.quantize.distillation.teacher_text import (
    read_responses,
    shard_path,
    shard_tokens,
    shards_of,
    write_shard,
)
from omnidraft_npu.quantize.distillation.tokenizer import (
    count_tokens,
    encoder_of,
    read_files,
    train_tokenizer,
    vocabulary_of,
    write_files,
)
from omnidraft_npu.quantize.distillation.training import rate_factor

CPU = torch.device("cpu")
PROMPTS = ("the small drafter", "numbers 0 1 2", "def add(a, b):\n", "a bridge", "the large target")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, vocab_size=300, tie_word_embeddings=True)
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def responses(target):
    encoder = encoder_of(target.tokenizer())
    questions = [question(text, encoder.encode(text.encode())[0]) for text in PROMPTS]
    return teacher_of(target).answer(questions, 12, num_rows=5)


@pytest.fixture(scope="module")
def files(target, responses):
    counts = count_tokens(ids for r in responses for ids in (r.prompt_ids, r.token_ids))
    return train_tokenizer(counts, vocabulary_of(target.tokenizer()), target.tokenizer(), 280)


@pytest.fixture(scope="module")
def examples(target, responses, files):
    maker = ExampleMaker(encoder_of(files), vocabulary_of(target.tokenizer()), NUM_TOP)
    return [maker.make(r, 64) for r in responses]


@pytest.fixture
def drafter(target):
    torch.manual_seed(0)
    return Llama(
        drafter_config(
            target.config, num_layers=2, intermediate_size=48, vocab_size=280, context_length=64
        )
    )


def test_the_llama_is_that_of_transformers(target, rng):
    reference = tiny_model("llama", seed=0, vocab_size=300, tie_word_embeddings=True)
    model = Llama(target.config)
    model.load_state_dict(
        {f"{n}.weight": torch.from_numpy(target.tensor(n)) for n in target.config.tensor_shapes()}
    )
    ids = torch.from_numpy(rng.integers(0, 300, (2, 9)))
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(model(ids)), reference(ids).logits, atol=1e-4, rtol=1e-4
        )


def test_shards_give_back_what_was_written(tmp_path, responses):
    write_shard(tmp_path, 3, responses)
    found = list(read_responses(shards_of(tmp_path)))
    assert [r.prompt for r in found] == list(PROMPTS)
    for one, other in zip(found, responses, strict=True):
        for name in ("prompt_ids", "token_ids", "top_ids", "log_probs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert shard_tokens(shard_path(tmp_path, 3)) == sum(len(r.token_ids) for r in responses)


def test_a_damaged_shard_is_named(tmp_path):
    shard_path(tmp_path, 0).write_bytes(b"not a shard")
    with pytest.raises(CheckpointError, match=r"00000\.safetensors is not a safetensors file"):
        list(read_responses(shards_of(tmp_path)))


def test_the_tokenizer_spells_every_byte_and_keeps_the_ends(tmp_path, files):
    encoder = encoder_of(files)
    data = bytes(range(256))
    pieces, _ = encoder.encode(data)
    assert b"".join(encoder.vocabulary.token_bytes(i) for i in pieces) == data
    assert [encoder.vocabulary.special_contents[i] for i in files.eos_token_ids] == ["<eos>"]
    write_files(tmp_path / "tokenizer", files)
    assert read_files(tmp_path / "tokenizer") == files


def test_a_vocabulary_without_room_for_the_bytes_is_refused(target):
    with pytest.raises(ConfigError, match="vocab_size is 100, must be at least"):
        train_tokenizer({}, vocabulary_of(target.tokenizer()), target.tokenizer(), 100)


def test_examples_spell_the_answer(target, files, responses, examples):
    tokens, pieces = vocabulary_of(target.tokenizer()), vocabulary_of(files)
    for r, e in zip(responses, examples, strict=True):
        answer = e.pieces[e.num_prompt :]
        text = b"".join(tokens.token_bytes(i) for i in r.token_ids)
        assert b"".join(pieces.token_bytes(i) for i in answer) == text
        assert (answer[-1] in files.eos_token_ids) == (r.token_ids[-1] == 2)
        assert len(e.laws.ids) == len(answer) == len(e.tokens)


def test_long_examples_are_cut(target, files, responses):
    maker = ExampleMaker(encoder_of(files), vocabulary_of(target.tokenizer()), NUM_TOP)
    example = maker.make(responses[0], 20)
    assert len(example.pieces) == 20
    assert len(example.laws.ids) == 20 - example.num_prompt
    assert maker.make(responses[0], example.num_prompt) is None


def test_an_epoch_holds_every_example_once_in_batches_of_the_asked_size(examples):
    many = examples * 10
    groups = list(batches(many, 200, np.random.default_rng(0)))
    assert sum(map(len, groups)) == len(many)
    assert all(max(len(e.pieces) for e in g) * len(g) <= 200 for g in groups)


def test_padding_does_not_change_what_is_learned(drafter, examples):
    with torch.no_grad():
        together = batch_logits(drafter, Batch.of(examples), CPU)
        alone = torch.cat([batch_logits(drafter, Batch.of([e]), CPU) for e in examples])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_the_loss_is_least_at_the_law_itself():
    probs = torch.tensor([[0.5, 0.3, 0.0]])
    ids = torch.tensor([[4, 2, 0]])
    law = torch.tensor([[0.1, 0.05, 0.3, 0.05, 0.5]])
    best = law_loss(law.log(), ids, probs)
    expected = -(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2))
    assert float(best) == pytest.approx(expected, abs=1e-5)
    for other in (law.flip(1), torch.full((1, 5), 0.2)):
        assert law_loss(other.log(), ids, probs) > best


def test_acceptance_counts_tokens_whose_every_piece_is_right(examples):
    class Oracle:
        """Says the next piece, or always piece 0."""

        def __init__(self, is_right):
            self.is_right = is_right

        def __call__(self, ids):
            following = torch.roll(ids, -1, 1)
            return torch.nn.functional.one_hot(following * self.is_right, 280).float()

        def logits(self, states):
            return states

    right = held_out_acceptance(Oracle(1), [examples], CPU)
    assert right["words"] > 0.9
    assert held_out_acceptance(Oracle(0), [examples], CPU) == {"words": 0.0}


def test_the_rate_rises_first_and_falls_along_a_cosine():
    warm = [rate_factor(step, 0.0) for step in range(40)]
    assert warm == sorted(warm)
    assert warm[0] < 0.1
    assert warm[-1] == 1.0
    falling = [rate_factor(1000, share) for share in np.linspace(0, 1, 11)]
    assert falling == sorted(falling, reverse=True)
    assert rate_factor(1000, 0.5) == pytest.approx(0.51)
    assert rate_factor(1000, 1.0) == pytest.approx(0.02)


def test_a_start_from_the_target_takes_over_what_is_equal(target, files, drafter):
    tokens = vocabulary_of(target.tokenizer())
    start_from_target(
        drafter, target, (0, 2), vocabulary_of(files), encoder_of(target.tokenizer()), tokens
    )
    np.testing.assert_array_equal(
        drafter.layers[1].q_proj.weight.detach(), target.tensor("layers.2.q_proj")
    )
    assert drafter.layers[0].down_proj.weight.shape == (64, 48)


def test_a_piece_starts_as_the_mean_of_its_spelling(target, files):
    tokens, pieces = vocabulary_of(target.tokenizer()), vocabulary_of(files)
    embedding = target.tensor("embed_tokens")
    encoder = encoder_of(target.tokenizer())
    rows = piece_embeddings(embedding, pieces, encoder, tokens, num_rows=290)
    assert rows.shape == (290, 64)
    for piece in (10, pieces.size - 1):
        spelled, _ = encoder.encode(pieces.token_bytes(piece))
        np.testing.assert_allclose(rows[piece], embedding[spelled].mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(rows[files.eos_token_ids[0]], embedding[2])


def test_the_largest_neurons_are_kept():
    layer = {name: np.ones((4, 3), np.float32) for name in ("gate_proj", "up_proj")}
    layer["down_proj"] = np.array([[1, 3, 2, 4]] * 3, np.float32)
    np.testing.assert_array_equal(largest_neurons(layer, 2), [1, 3])


def test_a_written_drafter_is_read_back_within_its_rounding(tmp_path, drafter, files):
    write_drafter(tmp_path, drafter, files)
    found = open_checkpoint(tmp_path)
    assert found.config.has_tied_head
    assert found.tokenizer().eos_token_ids == files.eos_token_ids
    for name in found.config.tensor_shapes():
        values = drafter.get_parameter(f"{name}.weight").detach().numpy()
        step = np.abs(values).max(axis=-1, keepdims=True) / 127
        # Half a step, and what a scale of 16 bits adds.
        assert (np.abs(found.tensor(name) - values) <= 0.6 * step + 1e-6).all(), name


def test_a_scale_of_the_wrong_shape_is_refused(tmp_path, drafter, files):
    from safetensors.numpy import load_file, save_file

    write_drafter(tmp_path, drafter, files)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight"
    tensors[f"{name}_scale"] = tensors[f"{name}_scale"][:5]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="stored as I8, which is not supported"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["rows", "sizes", "types"])
def test_a_shard_whose_rows_do_not_fit_its_arrays_is_one_line(tmp_path, damage):
    from safetensors.numpy import save_file

    tensors = {
        "prompt_ids": np.zeros(2, np.int32),
        "token_ids": np.zeros(3, np.int32 if damage != "types" else np.int64),
        "top_ids": np.zeros((3, 4), np.int32),
        "log_probs": np.zeros((3, 4), np.float16),
        "sizes": np.array([(2, 3 if damage != "sizes" else 7)], np.int32),
    }
    row = {"task": "t", "prompt": "p", "source": "", "greedy": damage != "rows" or "yes"}
    save_file(tensors, shard_path(tmp_path, 0), {"rows": json.dumps([row])})
    with pytest.raises(CheckpointError, match=r"00000\.safetensors.*--resume") as caught:
        list(read_responses(shards_of(tmp_path)))
    assert "\n" not in str(caught.value)
