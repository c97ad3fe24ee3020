"""`distill` as a user runs it: a tiny target in, a drafter out that `export` reads."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from tiny_checkpoints import SENTENCES, write_checkpoint

from omnidraft_npu.cli import cli
from omnidraft_npu.commands import distill as distill_command
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.distillation import requirements, training

SMALL = (
    *("--text-tokens", "150", "--max-new-tokens", "12", "--vocab-size", "280"),
    *("--layers", "0,-1", "--intermediate-size", "48"),
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", vocab_size=300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(SENTENCES) * 3)
    return path


@pytest.fixture(scope="module")
def finished(target, corpus, tmp_path_factory):
    """A run that has come to its end."""
    output = tmp_path_factory.mktemp("runs") / "run"
    result = distill(target, output, "--max-pieces", "6000", "--corpus", str(corpus))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return output


def distill(target, output, *extra):
    return CliRunner().invoke(
        cli, ["distill", "--target", str(target), "-o", str(output), *SMALL, *extra]
    )


def only_error(result, code):
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("Error: ")
    return lines[-1]


def weights(run):
    return (run / "drafter" / "model.safetensors").read_bytes()


def test_a_run_makes_a_drafter_and_says_what_to_do_next(finished):
    drafter = open_checkpoint(finished / "drafter")
    assert (drafter.config.num_layers, drafter.config.intermediate_size) == (2, 48)
    assert drafter.config.context_length == 2048
    settings = json.loads((finished / "settings.json").read_text())
    assert settings["vocab_size"] == 280
    assert list((finished / "corpus").glob("*.safetensors"))


def test_the_drafter_can_be_exported_and_run(finished, target, tmp_path):
    bundle = str(tmp_path / "bundle")
    models = ["--drafter", str(finished / "drafter"), "--target", str(target)]
    result = CliRunner().invoke(cli, ["export", *models, "-o", bundle, "--context-length", "128"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(cli, ["run", "-b", bundle, "--max-new-tokens", "4", "a bridge"])
    assert result.exit_code == 0, result.output


def test_progress_names_every_stage_the_loss_and_the_next_command(target, tmp_path):
    result = distill(target, tmp_path / "run", "--max-pieces", "4000")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "text: 150 of 150" in result.stderr
    assert "loss" in result.stderr
    assert "examples: 192 of 192 tokens" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith(str(tmp_path / "run" / "drafter"))
    assert "Next: omnidraft-npu export --drafter" in result.stderr


def test_equal_seeds_give_equal_drafters(finished, target, corpus, tmp_path):
    arguments = ("--max-pieces", "6000", "--corpus", str(corpus))
    assert distill(target, tmp_path / "same", *arguments).exit_code == 0
    assert weights(tmp_path / "same") == weights(finished)
    assert distill(target, tmp_path / "other", *arguments, "--seed", "1").exit_code == 0
    assert weights(tmp_path / "other") != weights(finished)


def test_an_interrupted_run_goes_on_where_it_was(target, tmp_path, monkeypatch):
    """Text, vocabulary and training are taken up; nothing is written anew."""
    from omnidraft_npu.quantize.distillation.teacher import Teacher

    whole, output = tmp_path / "whole", tmp_path / "run"
    assert distill(target, whole, "--max-pieces", "4000").exit_code == 0
    answer, calls = Teacher.answer, []

    def interrupted(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return answer(self, *arguments, **options)

    monkeypatch.setattr(Teacher, "answer", interrupted)
    result = distill(target, output, "--max-pieces", "4000")
    assert result.exit_code == 130
    assert "go on with --resume" in result.stderr
    assert distill(target, output, "--max-pieces", "4000", "--resume").exit_code == 0
    assert weights(output) == weights(whole)


def test_training_is_taken_up_in_the_middle(finished, target, corpus, tmp_path, monkeypatch):
    """A checkpoint every two minutes, here at every step: the drafter is that of a whole run."""
    arguments = ("--max-pieces", "6000", "--corpus", str(corpus))
    output, tell = tmp_path / "run", distill_command._Lines.training

    def interrupted(self, progress, *rest):
        tell(self, progress, *rest)
        if progress.step == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "_SAVE_S", 0.0)
    monkeypatch.setattr(distill_command._Lines, "training", interrupted)
    assert distill(target, output, *arguments).exit_code == 130
    assert not (output / "drafter").exists()
    monkeypatch.setattr(distill_command._Lines, "training", tell)
    assert distill(target, output, *arguments, "--resume").exit_code == 0
    steps = [
        torch.load(run / "checkpoint.pt", weights_only=True)["progress"]["step"]
        for run in (output, finished)
    ]
    assert steps[0] == steps[1] > 1
    assert weights(output) == weights(finished)


def test_more_pieces_train_on_from_the_checkpoint(finished, target, corpus, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    more = ("--corpus", str(corpus), "--max-pieces", "9000", "--resume")
    result = distill(target, output, *more)
    assert result.exit_code == 0, result.output
    before, after = (
        torch.load(run / "checkpoint.pt", weights_only=True)["progress"]
        for run in (finished, output)
    )
    assert before["step"] < after["step"]
    assert after["curve"][: len(before["curve"])] == before["curve"]


def test_an_earlier_run_is_not_overwritten(finished, target, tmp_path):
    before = weights(finished)
    assert "holds an earlier run: go on with --resume" in only_error(distill(target, finished), 2)
    error = only_error(distill(target, finished, "--resume", "--seed", "5"), 2)
    assert "has seed 0, not 5" in error
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in only_error(distill(target, tmp_path), 2)
    assert "holds no run" in only_error(distill(target, tmp_path / "new", "--resume"), 2)
    assert weights(finished) == before


def test_a_run_goes_on_with_its_own_prompts_only(target, tmp_path):
    """Bug: other prompts on --resume were not noticed, and shards of both stood side by side."""
    mine, output = tmp_path / "mine.jsonl", tmp_path / "run"
    rows = [json.dumps({"task": "words", "prompt": f"word {i}"}) for i in range(20)]
    mine.write_text("\n".join(rows))
    options = ("--max-pieces", "500", "--prompts", str(mine))
    assert distill(target, output, *options).exit_code == 0

    before = (output / "settings.json").read_bytes()
    for changed in (rows[1:], [*rows[:5], "", rows[0], *rows[6:]], list(reversed(rows))):
        mine.write_text("\n".join(changed))
        error = only_error(distill(target, output, *options, "--resume"), 2)
        assert "began with other prompts: give those it began with again" in error
    error = only_error(distill(target, output, *options[:2], "--resume"), 2)
    assert "began with other prompts: give its --prompts" in error
    assert (output / "settings.json").read_bytes() == before

    mine.write_text("\n".join([*rows, json.dumps({"prompt": "one more"})]))
    assert distill(target, output, *options, "--resume").exit_code == 0
    mine.write_text("\n".join(rows))
    assert "began with other prompts" in only_error(
        distill(target, output, *options, "--resume"), 2
    )


def test_a_run_goes_on_with_its_own_corpus_only(finished, target, corpus, tmp_path):
    output, other = tmp_path / "run", tmp_path / "other.txt"
    shutil.copytree(finished, output)
    other.write_text("another text. " * 9)
    for options in (
        (),
        ("--corpus", str(other)),
        ("--corpus", str(corpus), "--corpus", str(other)),
    ):
        error = only_error(distill(target, output, *options, "--resume"), 2)
        assert "began with another --corpus: give the same again" in error


def test_damaged_settings_are_one_line(finished, target, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    for content, found in (("{", "is not JSON"), ("[]", "is a list, must be an object")):
        (output / "settings.json").write_text(content)
        line = only_error(distill(target, output, "--resume"), 1)
        assert f"settings.json {found}" in line
        assert "it is damaged; name another folder with --output" in line


def test_without_torch_the_extra_is_named(target, tmp_path, monkeypatch):
    find = requirements.find_spec
    monkeypatch.setattr(
        requirements, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    error = only_error(distill(target, tmp_path / "run"), 2)
    assert (
        error == "Error: distill needs torch: in the clone of omnidraft-npu, pip install '.[train]'"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", "is empty"),
        (b"ab\0cd", "is a binary file"),
        (b"ab\xff", "is not UTF-8 text (byte 2 is 0xff)"),
        (None, "cannot read"),
    ],
)
def test_a_corpus_that_is_no_text_is_refused_before_anything_is_written(
    target, tmp_path, content, message
):
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    assert message in only_error(distill(target, tmp_path / "run", "--corpus", str(path)), 1)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_one_line(target, tmp_path):
    (tmp_path / "run").write_text("a file")
    assert f"cannot write {tmp_path / 'run'} (" in only_error(distill(target, tmp_path / "run"), 2)


def test_too_little_disk_is_said_before_the_run_starts(target, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda path: usage)
    assert "0.0 GiB free: free some space" in only_error(distill(target, tmp_path / "run"), 2)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_said_before_the_run_starts(target, tmp_path, monkeypatch):
    monkeypatch.setattr(requirements, "_memory_bytes", lambda: 2**20)
    assert "of memory but this machine has 0.0 GiB" in only_error(
        distill(target, tmp_path / "run"), 2
    )


def test_a_target_that_is_no_plain_decoder_is_refused(tmp_path, monkeypatch):
    """Bug: a tokenizer of 262,144 tokens was parsed first, and torch loaded: 14 seconds."""
    write_checkpoint(tmp_path / "gemma", "gemma3_text", vocab_size=300)
    monkeypatch.setitem(sys.modules, "omnidraft_npu.quantize.distillation.distill", None)
    (tmp_path / "gemma" / "tokenizer.json").write_text("never read")
    error = only_error(distill(tmp_path / "gemma", tmp_path / "run"), 2)
    assert "gemma is a gemma3_text that distill cannot run as a teacher" in error


@pytest.mark.parametrize("has_fallback", [False, True])
def test_a_target_without_byte_fallback_is_refused(target, tmp_path, has_fallback):
    """Its tokenizer marks spaces and has a token for some letters only."""
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    names = ["<pad>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a"]
    document["pre_tokenizer"], document["decoder"] = None, None
    document["normalizer"] = {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": "\u2581",
    }
    document["model"] |= {
        "vocab": {name: i for i, name in enumerate(names)},
        "merges": [],
        "byte_fallback": has_fallback,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    result = distill(folder, tmp_path / "run", "--max-pieces", "100")
    if has_fallback:
        assert result.exit_code == 0, result.output
    else:
        error = only_error(result, 1)
        assert "target has no byte fallback (tokens for 0 of 256 bytes)" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "0,x"), "layers is '0,x'"),
        (("--layers", "7"), "layers names 7, but the target has 3 layers"),
        (("--vocab-size", "20"), "vocab_size is 20, must be at least"),
        (("--text-tokens", "0"), "text_tokens is 0"),
        (("--max-pieces", "0"), "max_pieces is 0"),
        (("--batch-size", "0"), "batch_size is 0"),
        (("--max-new-tokens", "9999"), "no prompt and 9999 new tokens fit the target's "),
        (("--hours", "-1"), "hours is -1"),
        (("--learning-rate", "nan"), "learning_rate is nan"),
        (("--learning-rate", "-1"), "learning_rate is -1"),
        (("--seed", "-1"), "seed is -1"),
    ],
)
def test_options_that_cannot_be_are_one_line(target, tmp_path, options, message):
    assert message in only_error(distill(target, tmp_path / "run", *options), 2)
    written = {path.name for path in (tmp_path / "run").rglob("*")}
    # How large the vocabulary must be is known when there is text.
    assert not written or message.startswith("vocab_size")


@pytest.mark.slow
def test_two_processes_train_one_drafter(finished, target, tmp_path):
    """Under torchrun, with gloo: both share the work, the first alone tells; text as of one."""
    output = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", "29631", "-m", "omnidraft_npu", "distill"),
        *("--target", str(target), "-o", str(output), *SMALL, "--max-pieces", "6000"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert open_checkpoint(output / "drafter").config.num_layers == 2
    assert done.stderr.count("Next: omnidraft-npu export") == 1
    assert done.stderr.count("text: 150 of 150 tokens") == 1
    shards = [run / "text" / "00000.safetensors" for run in (output, finished)]
    assert shards[0].read_bytes() == shards[1].read_bytes()
