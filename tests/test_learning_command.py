"""`omnidraft-npu run` as it learns: what it keeps, says and leaves alone."""

import json
import os
import stat

import numpy as np
import pytest
from click.testing import CliRunner

from omnidraft_npu.cli import cli
from omnidraft_npu.runtime import learner_opening
from omnidraft_npu.runtime.learner import Learner
from omnidraft_npu.runtime.lora_trainer import TrainingStep
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.state_folder import learning, only_learner, replay_path


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


def run(bundle, *arguments, prompt="the small drafter"):
    options = ["-b", str(bundle), "--max-new-tokens", "24", "--raw", "--threads", "1"]
    return CliRunner().invoke(cli, ["run", *options, prompt, *arguments])


def add_adapter(bundle):
    """An adapter of large random values, in use from now on."""
    pair = open_pair(bundle, threads=1)
    rng = np.random.default_rng(3)
    shapes = pair.drafter.graph.lora_inputs
    tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    store = pair.adapter.store
    store.use(store.add(tensors, parent=store.current).version)


def examples(bundle):
    return sorted(replay_path(bundle, "target").glob("0*.safetensors"))


def test_an_answer_is_kept_for_learning(bundle):
    plain = run(bundle, "--no-learn")
    assert plain.exit_code == 0, plain.output
    assert not (bundle / "state").exists()
    learned = run(bundle)
    assert learned.stdout == plain.stdout
    assert len(examples(bundle)) == 1


def test_the_eighth_answer_is_learned_from_at_once_where_that_is_asked_for(bundle):
    said = [run(bundle, "--learn-now", prompt=f"number {n} and") for n in range(11)]
    assert all(one.exit_code == 0 for one in said)
    lessons = [i for i, one in enumerate(said) if "learned from 8 answers" in one.stderr]
    assert lessons == [8]  # One of these nine was held back.
    assert "nothing to learn yet: 7 of the 8 answers" in said[7].stderr
    assert "held-back acceptance" in said[8].stderr
    assert said[8].stdout == run(bundle, "--no-learn", prompt="number 8 and").stdout


def test_learning_now_and_not_at_all_exclude_each_other(bundle):
    said = run(bundle, "--learn-now", "--no-learn")
    assert said.exit_code == 2
    assert "--no-learn and --learn-now exclude each other" in said.stderr


@pytest.mark.parametrize("mode", ["auto", "cache", "paper"])
def test_a_seeded_run_gives_the_same_text_whatever_earlier_runs_left(bundle, mode):
    """Kept answers, an adapter, learned spellings and measured times all change what is drawn."""
    sampled = ["--temperature", "1.5", "--seed", "7", "--draft-mode", mode]

    def text(*arguments):
        said = run(bundle, *sampled, *arguments)
        assert said.exit_code == 0, said.output
        return said.stdout

    first = text()
    for n in range(9):
        assert run(bundle, *sampled[:2], prompt=f"number {n} and").exit_code == 0
    add_adapter(bundle)
    assert text() == first
    assert text("--no-learn") == first
    assert text("--draft-length", "auto") == first
    forgotten = CliRunner().invoke(cli, ["adapters", "forget", str(bundle), "--yes"])
    assert forgotten.exit_code == 0
    assert text() == first


def test_an_automatic_draft_length_that_a_seed_fixes_is_reported(bundle):
    said = run(bundle, "--temperature", "1", "--seed", "7", "--draft-length", "auto")
    assert said.stderr.count("--draft-length auto depends on measured times") == 1
    for others in (["--seed", "7"], ["--temperature", "1", "--seed", "7"]):
        assert "measured times" not in run(bundle, *others).stderr


def test_json_stays_one_document(bundle):
    for n in range(10):
        document = json.loads(run(bundle, "--json", prompt=f"number {n} and").stdout)
        assert document["token_ids"]


def test_a_lesson_that_ctrl_c_breaks_off_loses_nothing(bundle, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Learner, "step", interrupt)
    said = [run(bundle, "--learn-now", prompt=f"number {n} and") for n in range(9)][-1]
    assert said.exit_code == 0
    assert "put off" in said.stderr
    assert len(examples(bundle)) == 9


def test_a_training_graph_of_an_older_export_is_said_and_the_answer_stands(bundle, monkeypatch):
    def without_overlap(path, **options):
        step = TrainingStep(path, **options)
        step._inputs = step._inputs - {"overlap_weight"}
        return step

    monkeypatch.setattr(learner_opening, "TrainingStep", without_overlap)
    said = [run(bundle, "--learn-now", prompt=f"number {n} and") for n in range(9)]
    assert [one.exit_code for one in said] == [0] * 9
    assert "export the bundle again" in said[8].stderr
    assert said[8].stdout == run(bundle, "--no-learn", prompt="number 8 and").stdout
    assert len(examples(bundle)) == 9


def test_answers_are_kept_while_another_process_learns(bundle):
    with only_learner(bundle, "target"):
        assert run(bundle).exit_code == 0
    assert len(examples(bundle)) == 1


def test_a_state_that_another_process_changes_is_reported_and_decoding_goes_on(bundle, caplog):
    with learning(bundle, "target"):
        assert run(bundle).exit_code == 0
    assert caplog.text.count("another process is learning") == 1
    assert not examples(bundle)


@pytest.mark.skipif(os.name == "nt", reason="needs permissions of POSIX")
def test_a_state_that_cannot_be_written_is_said_and_decoding_goes_on(bundle):
    """Root may write anywhere, so a plain file stands where the folder should."""
    (bundle / "state").write_text("in the way")
    (bundle / "state").chmod(stat.S_IREAD)
    said = run(bundle)
    assert said.exit_code == 0, said.output
    assert said.stderr.count("cannot write to") == 1


def test_a_drafter_that_is_not_used_is_not_taught(bundle):
    assert run(bundle, "--no-draft").exit_code == 0
    assert run(bundle, "--proposer", "lookup").exit_code == 0
    assert not (bundle / "state").exists()
