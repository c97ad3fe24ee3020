"""The target as a teacher: its answers are its own, whatever is written beside them."""

import numpy as np
import pytest
import torch
from real_models import real_model
from tiny_checkpoints import write_checkpoint
from tiny_models import tiny_model
from tiny_teacher import question, teacher_of

from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.distillation.target import open_target
from omnidraft_npu.quantize.distillation.teacher_head import NUM_TOP, TeacherHead
from omnidraft_npu.quantize.distillation.teacher_model import TeacherModel

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
ENDS = tuple(range(0, 300, 10))
"""So many that answers have different lengths."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, vocab_size=300, tie_word_embeddings=True)
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def questions():
    """Prompts of 1 to 22 tokens, every third one answered at a temperature."""
    rng = np.random.default_rng(0)
    return [
        question(str(i), rng.integers(3, 300, 1 + 3 * i), temperature=1.5 * (i % 3 == 2), seed=i)
        for i in range(8)
    ]


@pytest.fixture(scope="module")
def alone(target, questions):
    """Each answer written with nothing beside it, in float32: ties are out of the way."""
    teacher = teacher_of(target, ends=ENDS, dtype=torch.float32)
    return [teacher.answer([q], 12, num_rows=1)[0] for q in questions]


def test_the_models_states_are_those_of_transformers(target, rng):
    """Read at once, and written a token at a time by rows of different lengths."""
    reference = tiny_model("llama", seed=0, vocab_size=300, tie_word_embeddings=True)
    model = TeacherModel(target, CPU, torch.float32)
    ids = torch.from_numpy(rng.integers(0, 300, (3, 9)))
    with torch.no_grad():
        expected = reference.model(ids).last_hidden_state
        read = torch.stack([model.read(row) for row in ids])
        torch.testing.assert_close(read, expected, atol=1e-4, rtol=1e-4)

        caches, lengths = model.new_caches(3, 9), torch.tensor([5, 0, 3])
        for row in (0, 2):
            model.read(ids[row, : lengths[row]], caches, row)
        for step in range(4):
            new = ids[torch.arange(3), lengths]
            states = model.step(new, lengths, int(lengths.max()), caches)
            seen = expected[torch.arange(3), lengths]
            torch.testing.assert_close(states, seen, atol=1e-4, rtol=1e-4, msg=f"step {step}")
            lengths = lengths + 1


@pytest.mark.parametrize("num_rows", [2, 3, 64])
def test_answers_do_not_depend_on_those_written_beside_them(target, questions, alone, num_rows):
    """Rows are refilled as they end and shrink at last; draws are each question's own."""
    teacher = teacher_of(target, ends=ENDS, dtype=torch.float32)
    together = teacher.answer(questions, 12, num_rows=num_rows)
    assert len({len(r.token_ids) for r in together}) > 1
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-3)


def test_bfloat16_answers_differ_at_near_ties_only(target, questions):
    """Products of other shapes round otherwise: where two answers part, both tokens were near."""
    teacher = teacher_of(target, ends=ENDS)
    greedy = [q for q in questions if q.temperature == 0]
    parts_at_near_ties(teacher, greedy, 12)


@pytest.mark.slow
def test_answers_of_a_real_target_differ_at_near_ties_only():
    target = open_target(real_model("smollm2.gguf"))
    teacher = teacher_of(
        target.checkpoint, ends=target.files.eos_token_ids, num_tokens=target.vocabulary.size
    )
    prompts = ("What is gravity?", "Add 17 and 25.", "Write a poem about bees.", "Name a river.")
    questions = [
        question(p, target.tokenizer.encode(chat(target.tokenizer, p), add_special=True))
        for p in prompts
    ]
    parts_at_near_ties(teacher, questions, 24)


def chat(tokenizer, prompt):
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])


def parts_at_near_ties(teacher, questions, max_new_tokens):
    """Log-probabilities where an answer alone goes another way are within 0.05."""
    together = teacher.answer(questions, max_new_tokens, num_rows=3)
    for q, r in zip(questions, together, strict=True):
        (alone,) = teacher.answer([q], max_new_tokens, num_rows=1)
        tokens = zip(r.token_ids.tolist(), alone.token_ids.tolist(), strict=False)
        parted = next((i for i, (one, other) in enumerate(tokens) if one != other), None)
        if parted is not None:
            law = dict(zip(r.top_ids[parted].tolist(), r.log_probs[parted].tolist(), strict=True))
            assert law[r.token_ids[parted]] - law[alone.token_ids[parted]] < 0.05
        np.testing.assert_allclose(alone.log_probs[0], r.log_probs[0], atol=0.1)


def test_no_step_computes_much_that_nobody_reads(target, questions, alone, monkeypatch):
    """Rows are refilled as they end, and given up when nothing waits."""
    busy, step = [], TeacherModel.step

    def counted(self, ids, lengths, longest, caches):
        busy.append(len(ids))
        return step(self, ids, lengths, longest, caches)

    monkeypatch.setattr(TeacherModel, "step", counted)
    told = []
    teacher = teacher_of(target, ends=ENDS, dtype=torch.float32)
    teacher.answer(questions, 12, num_rows=2, tell=told.append)
    written = sum(len(r.token_ids) for r in alone)
    assert sum(busy) == written == told[-1]
    assert max(busy) == 2
    assert len(told) == len(busy)


def test_greedy_answers_take_the_likeliest_token_and_stop_at_an_end(alone):
    assert any(len(r.token_ids) < 12 for r in alone)
    for r in alone:
        assert not set(r.token_ids[:-1].tolist()) & set(ENDS)
        assert len(r.token_ids) == 12 or r.token_ids[-1] in ENDS
        if r.is_greedy:
            np.testing.assert_array_equal(r.token_ids, r.top_ids[:, 0])


def test_reading_a_text_gives_the_laws_of_answering_it(target, alone):
    teacher = teacher_of(target)
    for r in alone:
        read = teacher.read("text", [*r.prompt_ids.tolist(), *r.token_ids.tolist()])
        count = len(r.token_ids)
        np.testing.assert_array_equal(read.token_ids[-count:], r.token_ids)
        np.testing.assert_allclose(
            read.log_probs[-count:].astype(float), r.log_probs.astype(float), atol=0.1
        )


def test_warm_answers_follow_the_law_and_the_seed(target):
    """Their first tokens come as often as the law at that temperature says, within 5 sigma."""
    teacher = teacher_of(target, ends=())
    draws = [question("a", (70, 71), temperature=0.7, seed=seed) for seed in range(400)]
    first, again = (
        [r.token_ids[0] for r in teacher.answer(draws, 1, num_rows=50)] for _ in range(2)
    )
    assert first == again
    (response,) = teacher.answer(draws[:1], 1, num_rows=1)
    law = np.exp(response.log_probs[0].astype(float) / 0.7)
    law /= law.sum()
    counts = np.array([first.count(token) for token in response.top_ids[0]])
    assert counts.sum() == 400
    assert (np.abs(counts - 400 * law) <= 5 * np.sqrt(400 * law) + 1).all()


def test_the_head_gives_the_exact_likeliest_tokens(rng):
    """All logits are only rounded, those of the likeliest tokens are exact; padding stays out."""
    weight = torch.from_numpy(rng.standard_normal((1000, 64), np.float32))
    states = torch.from_numpy(rng.standard_normal((5, 64), np.float32))
    ids, log_probs = TeacherHead(weight, torch.bfloat16).law(states)
    exact = (states @ weight.T).log_softmax(-1)
    top = exact.topk(NUM_TOP)
    torch.testing.assert_close(ids, top.indices)
    torch.testing.assert_close(log_probs, top.values, atol=2e-3, rtol=0)


def test_the_head_serves_vocabularies_smaller_than_what_it_keeps(rng):
    weight = torch.from_numpy(rng.standard_normal((20, 8), np.float32))
    states = torch.from_numpy(rng.standard_normal((3, 8), np.float32))
    ids, log_probs = TeacherHead(weight, torch.float32).law(states)
    assert ids.sort(1).values.tolist() == [list(range(20))] * 3
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3))
