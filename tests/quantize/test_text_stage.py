"""The text of a run: the same for any number of processes, and lost in small parts only."""

import itertools

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.prompts import TaskPrompt
from omnidraft_npu.quantize.distillation.processes import Processes
from omnidraft_npu.quantize.distillation.request import DistillRequest
from omnidraft_npu.quantize.distillation.target import open_target
from omnidraft_npu.quantize.distillation.teacher_text import read_responses, shards_of
from omnidraft_npu.quantize.distillation.text_stage import (
    TextStage,
    shard_range,
    text_folders,
    text_shards,
)

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = tuple(TaskPrompt(task="words", prompt=f"word {i}") for i in range(60))


class Recorded:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def stage(self, name, done, total):
        self.told.append((name, done, total))


class Alone(Processes):
    """One of several processes that waits for no other."""

    def first(self, value):
        return value

    def wait(self):
        pass


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", vocab_size=300)
    return open_target(folder)


def write(target, output, *, rank=0, count=1, **options):
    request = DistillRequest(
        target=target.checkpoint.path, output=output, max_new_tokens=6, prompts=PROMPTS, **options
    )
    recorded = Recorded()
    stage = TextStage(request, target, Alone(rank, count, torch.device("cpu")), recorded)
    stage.answer_prompts()
    return request, recorded.told


def test_shards_grow_and_leave_no_question_out():
    ranges = [shard_range(n) for n in range(8)]
    assert ranges[0] == (0, 16)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert [end - begin for begin, end in ranges] == [16, 32, 64, 128, 256, 256, 256, 256]


def test_two_processes_write_the_text_of_one(target, tmp_path):
    write(target, tmp_path / "one", text_tokens=10_000)
    for rank in (1, 0):
        write(target, tmp_path / "two", rank=rank, count=2, text_tokens=10_000)
    one, two = (shards_of(text_folders(tmp_path / name)[0]) for name in ("one", "two"))
    assert len(one) == 3
    assert [path.name for path in one] == [path.name for path in two]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, two, strict=True))


def test_a_shard_more_than_was_asked_for_is_not_learned_from(target, tmp_path):
    """Several processes end together, when the last of them has written its shard."""
    request, _ = write(target, tmp_path, text_tokens=10_000)
    few = DistillRequest(
        target=request.target, output=tmp_path, prompts=PROMPTS, max_new_tokens=6, text_tokens=20
    )
    assert [path.name for path in text_shards(few)] == ["00000.safetensors"]
    assert len(text_shards(request)) == 3


def test_every_prompt_is_answered_once_and_in_order(target, tmp_path):
    request, _ = write(target, tmp_path, text_tokens=10_000, batch_size=5)
    responses = list(read_responses(text_shards(request)))
    assert [r.prompt for r in responses] == [p.prompt for p in PROMPTS]


def test_tokens_are_told_while_a_shard_is_written(target, tmp_path):
    _, told = write(target, tmp_path, text_tokens=50)
    done = [d for _, d, _ in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert 0 < done[1] < 50
    assert told[-1] == ("text", 50, 50)
    assert len(told) > 3


def test_an_interruption_loses_the_shard_under_way_only(target, tmp_path, monkeypatch):
    whole, _ = write(target, tmp_path / "whole", text_tokens=10_000)
    from omnidraft_npu.quantize.distillation.teacher import Teacher

    answer, calls = Teacher.answer, []

    def interrupted(self, questions, *arguments, **options):
        calls.append(len(questions))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer(self, questions, *arguments, **options)

    monkeypatch.setattr(Teacher, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(target, tmp_path / "cut", text_tokens=10_000)
    cut, _ = write(target, tmp_path / "cut", text_tokens=10_000)
    assert calls == [16, 32, 32, 12]
    for a, b in zip(text_shards(cut), text_shards(whole), strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_running_out_of_prompts_is_said(target, tmp_path, caplog):
    write(target, tmp_path, text_tokens=10_000)
    assert "the 60 prompts gave" in caplog.text
    tokens = sum(len(r.token_ids) for r in read_responses(shards_of(text_folders(tmp_path)[0])))
    assert f"gave {tokens} tokens of the 10000" in caplog.text


def test_corpus_chunks_are_read_whole(target, tmp_path):
    recorded = Recorded()
    request = DistillRequest(target=target.checkpoint.path, output=tmp_path, max_new_tokens=6)
    stage = TextStage(request, target, Alone(0, 1, torch.device("cpu")), recorded)
    text = "the small drafter proposes. " * 60
    stage.read_corpus([text])
    ids = target.tokenizer.encode(text, add_special=False)
    read = list(read_responses(shards_of(text_folders(tmp_path)[1])))
    assert len(read) > 1
    np.testing.assert_array_equal(np.concatenate([r.token_ids for r in read]), ids[1:])
    assert recorded.told[-1] == ("corpus", len(read), len(read))
