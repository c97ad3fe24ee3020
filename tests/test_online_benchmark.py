"""`benchmarks/online.py`: recorded once, learned from in many ways."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from learning_bundle import RANK, write_learning_bundle

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_learning_bundle(tmp_path_factory.mktemp("online"))


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import online
    import recorded_answers
    import teacher_forced

    return online, recorded_answers, teacher_forced


@pytest.fixture
def files(tmp_path):
    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    tasks = {"counting": "number {} and", "words": "the small drafter {}"}
    train = [
        {"prompt": text.format(n), "task": task} for task, text in tasks.items() for n in range(6)
    ]
    test = [{"prompt": text.format(77), "task": task} for task, text in tasks.items()]
    return write("train.jsonl", train), write("test.jsonl", test)


def arguments(bundle, files, output, *more):
    fixed = ["--train", files[0], "--test", files[1], "-o", str(output), "--every", "6"]
    limits = ["--max-new-tokens", "20", "--raw", "--threads", "1"]
    return ["online.py", str(bundle), "--target", "target", *fixed, *limits, *more]


def test_settings_are_compared_and_a_second_run_computes_nothing_anew(
    modules, bundle, files, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    online, recorded_answers, _ = modules
    output = tmp_path / "out"
    more = ["--setting", "near", "--setting", "paper", "--setting", "shift"]
    monkeypatch.setattr(sys, "argv", arguments(bundle, files, output, *more))
    online.main()
    document = json.loads((output / "online.json").read_text())
    assert document["environment"]["measure"] == "teacher-forced acceptance"
    assert [one["setting"] for one in document["settings"]] == ["near", "paper", "shift"]
    for one in document["settings"]:
        assert [point["prompts"] for point in one["curve"]] == [0, 6, 12]
        assert set(one["curve"][0]["tasks"]) == {"counting", "words", "all"}
        assert sum(lesson["num_examples"] for lesson in one["lessons"]) == 8
        full = one["curve"][0]["tasks"]["all"]
        assert full["direct"]["greedy"] <= full["cache"]["greedy"] <= full["full"]["greedy"]
    assert (output / "online.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not (bundle / "state").exists()

    monkeypatch.setattr(online, "learn", None)
    monkeypatch.setattr(recorded_answers, "open_session", None)
    online.main()
    assert json.loads((output / "online.json").read_text())["settings"] == document["settings"]


@pytest.mark.slow
def test_a_change_of_target_begins_with_what_was_learned_for_the_first(
    modules, bundle, files, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    online, *_ = modules
    monkeypatch.setattr("omnidraft_npu.runtime.learner.judged", lambda *_: "kept")
    starts = {}
    learn = online.learn

    def learned(pair, setting, *arguments, start, **options):
        starts[pair.target.entry.name, setting.follows] = start
        found = learn(pair, setting, *arguments, start=start, **options)
        starts[pair.target.entry.name, "end"] = dict(pair.adapter.adapter.tensors)
        return found

    monkeypatch.setattr(online, "learn", learned)
    more = ["--target", "same", "--setting", "near", "--setting", "change"]
    monkeypatch.setattr(sys, "argv", arguments(bundle, files, tmp_path, *more))
    online.main()
    found = json.loads((tmp_path / "online.json").read_text())["settings"]
    names = [(one["target"], one["setting"]) for one in found]
    assert names == [("target", "near"), ("same", "near"), ("same", "change")]
    assert not starts["same", False]
    start, end = starts["same", True], starts["target", "end"]
    assert start.keys() == end.keys()
    for name, tensor in end.items():
        np.testing.assert_array_equal(start[name], tensor)
    assert any(tensor.any() for name, tensor in start.items() if name.endswith(".B"))
    # What was learned for the first target is in use before anything is learned for this one.
    assert found[2]["curve"][0]["version"] == 1
    assert found[2]["curve"][0]["tasks"] != found[1]["curve"][0]["tasks"]


def test_a_recording_goes_on_where_it_ended(modules, bundle, tmp_path, monkeypatch):
    _, recorded_answers, _ = modules
    from omnidraft_npu.config import DecodeConfig
    from omnidraft_npu.prompts import TaskPrompt

    prompts = [TaskPrompt(prompt=f"number {n}", task="t") for n in range(3)]
    config = DecodeConfig(max_new_tokens=8)

    def record(some):
        return recorded_answers.record(
            tmp_path, bundle, "target", some, config, raw=True, threads=1
        )

    first = record(prompts[:2])
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    everything = record(prompts)
    assert len(everything) == 3
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    for before, after in zip(first, everything, strict=False):
        assert after.answer.prompt_ids == before.answer.prompt_ids
        np.testing.assert_array_equal(after.answer.laws.probs, before.answer.laws.probs)
        assert len(after.answer.laws.token_ids) == len(after.answer.laws.top_ids)


def test_a_lower_rank_stays_low_while_it_learns(modules, bundle):
    online, *_ = modules
    from omnidraft_npu.runtime.adamw import AdamWConfig
    from omnidraft_npu.runtime.lora_trainer import LoraTrainer, TrainingStep

    step = TrainingStep(bundle / "drafter" / "cpu" / "lora_step.onnx", threads=1)
    start = online.narrow_start({n: s for n, s in step.shapes.items() if "lora" in n}, RANK - 2)
    trainer = LoraTrainer(step, AdamWConfig(learning_rate=0.01), start=start)
    for _ in range(3):
        trainer.update([_example(step)])
    for name, tensor in trainer.lora.items():
        by_rank = tensor.T if name.endswith(".A") else tensor
        assert by_rank[: RANK - 2].any()
        assert not by_rank[RANK - 2 :].any()


def _example(step):
    from omnidraft_npu.distillation import PieceLaws
    from omnidraft_npu.replay import Example

    pieces = np.arange(5, 25, dtype=np.int32)
    ids = np.tile(np.arange(30, 30 + step.num_top, dtype=np.int32), (10, 1))
    flags = np.ones(10, np.bool_)
    return Example(
        pieces=pieces,
        laws=PieceLaws(ids=ids, probs=np.full(ids.shape, 1 / step.num_top, np.float32)),
        tokens=np.arange(10, dtype=np.int32),
        is_drafted=flags,
        is_direct=flags,
    )


def test_tokens_a_round_are_counted_run_by_run(modules):
    *_, teacher_forced = modules
    flags = np.array([1, 1, 0, 1, 0, 0, 1], np.bool_)
    # One draft: [1 1] [0] [1 0] [0] [1]; two: [1 1 0] [1 0] [0] [1].
    assert teacher_forced.tokens_per_round([flags], 1) == 7 / 5
    assert teacher_forced.tokens_per_round([flags], 2) == 7 / 4
    assert teacher_forced.tokens_per_round([], 2) == 0


def test_tasks_come_in_turn_or_one_after_the_other(modules):
    online, recorded_answers, _ = modules
    rows = [recorded_answers.Recorded(task=task, answer=None) for task in "aaabb"]
    assert [one.task for one in online.in_order(rows, is_shift=False)] == list("ababa")
    assert [one.task for one in online.in_order(rows, is_shift=True)] == list("aaabb")
