"""`omnidraft-npu bench --learn`: before, the stream, and after."""

import hashlib
import json

import click
import pytest
from click.testing import CliRunner
from learning_bundle import write_learning_bundle
from tiny_bundle import write_bundle

from omnidraft_npu.cli import cli
from omnidraft_npu.runtime.learner import Learner
from omnidraft_npu.runtime.learner_config import LearnerConfig

LEARNED = [{"prompt": f"number {n} and", "task": "counting"} for n in range(18)]
HELD_OUT = [
    {"prompt": "number 77 and", "task": "counting"},
    {"prompt": "the small drafter", "task": "words"},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def bundle(learning_original):
    return learning_original


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    return write(folder / "test.jsonl", HELD_OUT), write(folder / "train.jsonl", LEARNED)


def bench(bundle, files, *arguments):
    fixed = ["--max-new-tokens", "24", "--raw", "--threads", "1", "--repeats", "1"]
    prompts = ["--prompts", str(files[0]), "--learn", str(files[1]), "--draft-length", "2,3"]
    return CliRunner().invoke(cli, ["bench", "-b", str(bundle), *fixed, *prompts, *arguments])


def hashes(bundle):
    return {
        str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(bundle.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def document(bundle, files):
    result = bench(bundle, files, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_before_is_a_bench_of_its_own_and_after_has_the_same_rows(document):
    assert document["schema_version"] == 1
    for found in (document["learning"]["before"], document["learning"]["after"]):
        assert [row["prompt"] for row in found["rows"]] == [
            row["prompt"] for row in document["rows"]
        ]
        assert set(found["summary"]) == set(document["summary"]) == {"counting", "words", "all"}
        assert all(row["is_equal"] for row in (*document["rows"], *found["rows"]))


def test_every_task_is_compared_at_one_draft_length(document):
    found = document["learning"]
    length = str(found["draft_tokens"])
    assert found["draft_tokens"] == document["summary"]["all"]["draft_tokens"]
    for task, row in found["tasks"].items():
        for name in ("conditional_acceptance", "mean_acceptance_length", "speedup"):
            for when in ("before", "after"):
                assert (
                    row[when][name] == found[when]["summary"][task]["by_draft_tokens"][length][name]
                )


def test_the_curve_adds_up_to_the_stream(document):
    found = document["learning"]
    assert found["num_prompts"] == found["num_streamed"] == len(LEARNED)
    assert [(w["first"], w["last"]) for w in found["windows"]] == [(1, 16), (17, 18)]
    assert [row["prompt"] for row in found["stream"]] == [row["prompt"] for row in LEARNED]
    assert [lesson["num_examples"] for lesson in found["lessons"]] == [8]
    assert found["lessons"][0]["after_prompts"] in (9, 10)


def test_by_default_the_bundle_is_left_as_it_was(bundle, files):
    before = hashes(bundle)
    assert bench(bundle, files).exit_code == 0
    assert hashes(bundle) == before


def test_what_is_learned_is_used_after(bundle, files, monkeypatch):
    """The drafter of the second measurement is the version that the stream ended with."""
    from omnidraft_npu.commands import bench as command

    versions = []
    measure = command._measure

    def measured(*arguments, **options):
        result = measure(*arguments, **options)
        versions.append(result.session.pair.adapter.adapter.version)
        return result

    monkeypatch.setattr(command, "_measure", measured)
    monkeypatch.setattr("omnidraft_npu.runtime.learner.judged", lambda *_: "kept")
    result = bench(bundle, files, "--json")
    assert result.exit_code == 0, result.output
    assert versions == [0, 1]
    assert json.loads(result.stdout)["learning"]["windows"][-1]["version"] == 1


def test_what_runs_where_is_said_once(bundle, files, monkeypatch):
    from omnidraft_npu.commands import bench as command

    monkeypatch.setattr(command, "tell_devices", lambda *_: click.echo("on the CPU", err=True))
    assert bench(bundle, files).stderr.count("on the CPU") == 1


def test_a_loss_that_the_training_graph_lacks_is_refused_before_anything_is_measured(
    bundle, files, monkeypatch
):
    from omnidraft_npu.commands import bench as command

    monkeypatch.setattr(command, "_measure", lambda *_, **__: pytest.fail("it was measured"))
    monkeypatch.setattr("omnidraft_npu.runtime.lora_trainer._OVERLAP", "not_there")
    result = bench(bundle, files, "--learn-loss", "overlap")
    assert result.exit_code == 2
    assert "exported before there was a loss `overlap`: export the bundle again" in result.stderr


def test_ctrl_c_ends_the_stream_and_measures_what_was_learned(bundle, files, monkeypatch):
    step, calls = Learner.step, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(Learner, "step", interrupted)
    result = bench(bundle, files, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["learning"]
    assert found["num_streamed"] == 4
    assert found["after"] is not None
    assert "ends after 4 of 18" in result.stderr


def test_keep_goes_on_in_the_bundle(files, tmp_path):
    bundle = write_learning_bundle(tmp_path)
    result = bench(bundle, files, "--keep", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["learning"]["is_kept"] is True
    assert len(list((bundle / "state" / "replay" / "target").glob("0*.safetensors"))) == 18


def test_people_get_tables_progress_and_a_picture(bundle, files, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "learning.png"
    result = bench(bundle, files, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    for word in ("before and after 18 prompts", "over the stream", "1-16", "17-18", "v0000"):
        assert word in " ".join(result.stdout.split())
    assert "16 of 18" in result.stderr
    assert "min left" in result.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_prompt_that_is_measured_with_is_not_learned_from(bundle, files, tmp_path):
    both = write(tmp_path / "both.jsonl", [*LEARNED, HELD_OUT[0]])
    result = bench(bundle, (files[0], both))
    assert result.exit_code == 1
    assert "number 77 and" in result.stderr


def test_a_drafter_that_cannot_learn_is_told_before_anything_is_measured(files, tmp_path):
    result = bench(write_bundle(tmp_path), files)
    assert result.exit_code == 2
    assert "cannot learn" in result.stderr
    assert "--lora-rank" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--proposer", "lookup"], ["--project-chip", "x-elite"]], ids=" ".join
)
def test_what_does_not_go_with_learning_is_refused(bundle, files, arguments):
    result = bench(bundle, files, *arguments)
    assert result.exit_code == 2
    assert "--learn" in result.stderr


@pytest.mark.parametrize("arguments", [["--keep"], ["--learn-loss", "trie"]], ids=" ".join)
def test_what_is_about_learning_needs_learn(bundle, arguments):
    result = CliRunner().invoke(cli, ["bench", "-b", str(bundle), *arguments])
    assert result.exit_code == 2
    assert f"{arguments[0]} is about what is learned" in result.stderr


def test_both_adapters_answer_each_prompt_in_turn(bundle, files, monkeypatch):
    """So that a machine that gets busier slows both; the speed-ups are over the same target."""
    from omnidraft_npu.runtime import bench as runtime

    answered, decode_prompt = [], runtime.decode_prompt

    def decoded(session, prompt, config):
        answered.append((session.pair.adapter.adapter.version, tuple(prompt)))
        return decode_prompt(session, prompt, config)

    monkeypatch.setattr("omnidraft_npu.runtime.learner.judged", lambda *_: "kept")
    monkeypatch.setattr(runtime, "decode_prompt", decoded)
    found = json.loads(bench(bundle, files, "--json").stdout)["learning"]
    both = answered[-2 * 2 * len(HELD_OUT) - 2 :]  # with a warm-up of each between two lengths
    of_a_length = 2 * len(HELD_OUT)
    for runs in (both[:of_a_length], both[-of_a_length:]):
        assert [version for version, _ in runs] == [1, 0] * len(HELD_OUT)
        assert [prompt for _, prompt in runs[::2]] == [prompt for _, prompt in runs[1::2]]
    for before, after in zip(found["before"]["rows"], found["after"]["rows"], strict=True):
        assert before["target_alone"] == after["target_alone"]


def test_another_loss_is_another_lesson(bundle, files, document):
    found = json.loads(bench(bundle, files, "--json", "--learn-loss", "paper").stdout)["learning"]
    assert (document["learning"]["loss"], found["loss"]) == (LearnerConfig().loss, "paper")
    assert found["lessons"][0]["num_examples"] == document["learning"]["lessons"][0]["num_examples"]
    assert found["lessons"][0]["loss"] != document["learning"]["lessons"][0]["loss"]


def test_texts_of_either_adapter_that_differ_are_told(capsys):
    from omnidraft_npu.commands.bench_output import tell_differences

    right, wrong = {"rows": [{"is_equal": True}]}, {"rows": [{"is_equal": False}]}
    tell_differences(right | {"learning": {"before": right, "after": wrong}})
    assert "1 of 3 texts differ" in capsys.readouterr().err
    tell_differences(right | {"learning": {"before": None, "after": None}})
    assert capsys.readouterr().err == ""
