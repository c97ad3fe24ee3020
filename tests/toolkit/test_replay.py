"""Training examples on disk: bounded, erasable, whole or not there."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from omnidraft_npu.distillation import PieceLaws
from omnidraft_npu.replay import Example, ReplayBuffer

TOP = 4


def example(seed=0, num_context=5, num_response=7):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(TOP), num_response).astype(np.float32)
    return Example(
        pieces=rng.integers(0, 99, num_context + num_response).astype(np.int32),
        laws=PieceLaws(ids=rng.integers(0, 99, (num_response, TOP)).astype(np.int32), probs=probs),
        tokens=np.arange(num_response, dtype=np.int32),
        is_drafted=rng.random(num_response) < 0.9,
        is_direct=rng.random(num_response) < 0.5,
    )


@pytest.fixture
def buffer(tmp_path):
    return ReplayBuffer(folder=tmp_path / "replay" / "target", pair="a-b")


def test_examples_come_back_in_the_order_they_were_kept(buffer):
    kept = [example(seed) for seed in range(12)]
    for one in kept:
        buffer.append(one)
    read = list(ReplayBuffer(folder=buffer.folder, pair="a-b").examples())
    for one, other in zip(kept, read, strict=True):
        np.testing.assert_array_equal(one.pieces, other.pieces)
        np.testing.assert_array_equal(one.laws.ids, other.laws.ids)
        np.testing.assert_allclose(one.laws.probs, other.laws.probs, atol=1e-3)
        for name in ("tokens", "is_drafted", "is_direct"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_examples_that_came_after_one_can_be_read_alone(buffer):
    for seed in range(5):
        buffer.append(example(seed))
    numbers = [number for number, _ in buffer.numbered()]
    assert numbers == sorted(numbers)
    later = list(buffer.numbered(after=numbers[2]))
    assert [number for number, _ in later] == numbers[3:]
    np.testing.assert_array_equal(later[0][1].pieces, example(3).pieces)


@pytest.mark.parametrize(
    ("max_examples", "max_responses", "num_read"),
    [(0, 9, 0), (2, 9, 2), (9, 9, 5), (9, 3, 3), (9, 2.5, 3), (9, 0, 1)],
)
def test_the_latest_are_read_up_to_a_number_and_a_length(
    buffer, max_examples, max_responses, num_read
):
    """304 answers of 900 tokens took seconds to recall: only their number was bounded."""
    kept = [example(seed) for seed in range(5)]
    for one in kept:
        buffer.append(one)
    max_tokens = int(max_responses * kept[0].num_response)
    latest = buffer.latest(max_examples=max_examples, max_tokens=max_tokens)
    assert len(latest) == num_read
    for one, other in zip(latest, kept[5 - num_read :], strict=True):
        np.testing.assert_array_equal(one.pieces, other.pieces)


def test_damaged_examples_are_passed_over_in_one_line(buffer, caplog):
    for seed in range(5):
        buffer.append(example(seed))
    for path in sorted(buffer.folder.iterdir())[1:4]:
        path.write_bytes(b"damaged")
    assert len(list(buffer.examples())) == 2
    (record,) = caplog.records
    assert "passed over (and 2 more)" in record.getMessage()


def test_the_oldest_go_where_the_bytes_would_not_suffice(tmp_path):
    probe = ReplayBuffer(folder=tmp_path / "probe", pair="a-b")
    probe.append(example())
    buffer = ReplayBuffer(folder=tmp_path / "replay", pair="a-b", max_bytes=3 * probe.num_bytes + 1)
    kept = [example(seed) for seed in range(6)]
    for one in kept:
        buffer.append(one)
    assert buffer.num_bytes <= buffer.max_bytes
    read = list(buffer.examples())
    assert len(read) == 3
    np.testing.assert_array_equal(read[0].pieces, kept[3].pieces)


def test_an_example_larger_than_the_budget_is_kept_alone(tmp_path):
    buffer = ReplayBuffer(folder=tmp_path, pair="a-b", max_bytes=1)
    buffer.append(example(1))
    buffer.append(example(2))
    (read,) = buffer.examples()
    np.testing.assert_array_equal(read.pieces, example(2).pieces)


def test_forgetting_leaves_nothing(buffer):
    buffer.append(example())
    (buffer.folder / ".00000002.safetensors.x1.tmp").write_bytes(b"half of it")
    assert buffer.forget() == 1
    assert len(buffer) == 0
    assert not list(buffer.folder.iterdir())


def test_examples_of_another_pair_are_passed_over_and_kept(buffer):
    buffer.append(example())
    other = ReplayBuffer(folder=buffer.folder, pair="a-c")
    assert list(other.examples()) == []
    assert len(buffer) == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_example_is_said_and_passed_over(buffer, caplog, damage):
    for seed in range(3):
        buffer.append(example(seed))
    path = sorted(buffer.folder.iterdir())[1]
    data = path.read_bytes()
    path.write_bytes(
        {"truncate": data[:-9], "flip": b"\xff" * 16 + data[16:], "empty": b""}[damage]
    )
    assert len(list(buffer.examples())) == 2
    (record,) = caplog.records
    assert path.name in record.getMessage()


def test_probabilities_that_are_no_numbers_are_passed_over(buffer, caplog):
    bad = example()
    bad.laws.probs[0, 0] = np.nan
    buffer.append(bad)
    assert list(buffer.examples()) == []
    assert caplog.records


def test_a_full_disk_leaves_the_others(buffer, monkeypatch):
    buffer.append(example())

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        buffer.append(example(1))
    assert len(list(buffer.examples())) == len(list(buffer.folder.iterdir())) == 1


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_replay import example
from omnidraft_npu.replay import ReplayBuffer
buffer = ReplayBuffer(folder=Path(sys.argv[2]), pair="a-b")
for seed in range(100000):
    buffer.append(example(seed))
    print(seed, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_no_example_that_was_acknowledged_is_lost_to_a_kill(tmp_path):
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(tmp_path)]
    acknowledged = 0
    for wait in (0.0, 0.003, 0.011):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            writer.stdout.readline()
            time.sleep(wait)
            writer.kill()
            acknowledged += 1 + len(writer.stdout.read().splitlines())
        read = list(ReplayBuffer(folder=tmp_path, pair="a-b").examples())
        assert acknowledged <= len(read) <= acknowledged + 3


def test_two_processes_that_take_the_same_number_keep_both_examples(buffer, monkeypatch):
    """The number is the last one plus one, as both see it before either has written."""
    buffer.append(example(0))
    seen = buffer._files()
    monkeypatch.setattr(ReplayBuffer, "_files", lambda self: list(seen))
    buffer.append(example(1))
    ReplayBuffer(folder=buffer.folder, pair="a-b").append(example(2))
    monkeypatch.undo()
    first = {int(one.pieces[0]) for one in buffer.examples()}
    assert first == {int(example(seed).pieces[0]) for seed in range(3)}


def test_files_that_another_process_evicts_meanwhile_are_no_error(buffer, caplog, monkeypatch):
    for seed in range(3):
        buffer.append(example(seed))
    files = buffer._files()
    files[0].unlink()
    monkeypatch.setattr(ReplayBuffer, "_files", lambda self: list(files))
    assert len(list(buffer.examples())) == 2
    assert buffer.num_bytes == files[1].stat().st_size + files[2].stat().st_size
    buffer.append(example(3))
    assert not caplog.records


def test_a_full_disk_while_writing_is_an_os_error(buffer, monkeypatch):
    """The safetensors library raises an error of its own for it, which nobody expects."""
    buffer.append(example())

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        buffer.append(example(1))
    assert len(list(buffer.examples())) == len(list(buffer.folder.iterdir())) == 1


def test_a_bit_that_flips_anywhere_is_said_and_the_example_passed_over(buffer, caplog, rng):
    """Of a piece's number it makes another number, which no graph may have a row for."""
    buffer.append(example())
    (path,) = buffer.folder.iterdir()
    data = path.read_bytes()
    for at in rng.choice(len(data), 60, replace=False):
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        caplog.clear()
        found = list(buffer.examples())
        # Of another pair, or said: the name of the pair may be what was hit.
        assert not found
        assert caplog.records or b'"pair":"a-b"' not in damaged


def test_an_example_cut_anywhere_is_said_and_passed_over(buffer, caplog, rng):
    buffer.append(example())
    (path,) = buffer.folder.iterdir()
    data = path.read_bytes()
    for length in (0, 7, 8, *rng.integers(0, len(data), 20)):
        path.write_bytes(data[:length])
        caplog.clear()
        assert not list(buffer.examples())
        assert caplog.records


def test_an_example_with_pieces_that_the_drafter_lacks_is_passed_over(buffer, caplog):
    """They were an IndexError where answers are recalled, and ended the run."""
    buffer.append(example(2))
    largest = max(int(example(2).pieces.max()), int(example(2).laws.ids.max()))
    for num_pieces, count in ((largest + 1, 1), (largest, 0)):
        known = dataclasses.replace(buffer, num_pieces=num_pieces)
        assert len(list(known.examples())) == count
    assert "do not fit together" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_among_the_examples_holds_nothing_up(buffer, caplog):
    buffer.append(example(2))
    os.mkfifo(buffer.folder / "00000009.safetensors")
    assert list(buffer.numbers(after=0)) == [1]
    assert len(list(buffer.examples())) == 1
    assert "not a regular file" in caplog.text
