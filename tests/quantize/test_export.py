"""Export as a user runs it: tiny checkpoints in, a bundle out, or one line and nothing."""

import json
import os
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.quantize.model_request import model_request


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A drafter and a target with different vocabularies."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(root / "drafter", vocab_size=280)
    write_checkpoint(
        root / "target", "gemma3_text", vocab_size=310, num_logits=320, seed=1, seed_text="verify"
    )
    return root


def export(checkpoints, output, *extra, drafter="drafter", target="target"):
    arguments = ["--drafter", str(checkpoints / drafter), "--target", str(checkpoints / target)]
    return CliRunner().invoke(
        cli, ["export", *arguments, "-o", str(output), "--precision", "fp32", *extra]
    )


def only_error(result, code=1):
    """The single line of an error; nothing on stdout and no trace."""
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    return errors[0]


def test_an_export_makes_a_bundle_that_opens(checkpoints, tmp_path):
    result = export(checkpoints, tmp_path / "bundle", "--json", "--context-length", "128")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert {model["name"] for model in document["models"]} == {"drafter", "target"}
    bundle = open_bundle(tmp_path / "bundle", verify=True)
    target = bundle.target(None)
    assert (target.vocab_size, target.num_logits, target.context_length) == (310, 320, 128)
    assert target.eos_token_ids == (2,)
    assert bundle.manifest.drafter.architecture == "llama"
    assert not list(tmp_path.glob("*.partial"))
    genai = json.loads((tmp_path / "bundle/targets/target/cpu/genai_config.json").read_text())
    assert (genai["model"]["vocab_size"], genai["model"]["context_length"]) == (320, 128)
    text = (tmp_path / "bundle" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert str(checkpoints) not in text


def test_the_report_has_a_size_for_every_model_where_two_have_one_name(checkpoints, tmp_path):
    result = export(checkpoints, tmp_path / "my bundle", "--json", target="drafter")
    models = json.loads(result.stdout)["models"]
    assert [model["name"] for model in models] == ["drafter", "drafter"]
    shown = export(checkpoints, tmp_path / "my bundle", "--force")
    assert f"run -b '{tmp_path / 'my bundle'}'" in shown.stderr


def test_inspect_shows_what_export_made(checkpoints, tmp_path):
    export(checkpoints, tmp_path / "bundle")
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "bundle")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "gemma3_text" in shown.stdout
    as_json = CliRunner().invoke(cli, ["inspect", str(tmp_path / "bundle"), "--json"])
    assert json.loads(as_json.stdout)["drafter"]["name"] == "drafter"


def test_an_existing_bundle_is_kept_without_force_and_its_state_survives_force(
    checkpoints, tmp_path
):
    output = tmp_path / "bundle"
    export(checkpoints, output)
    before = (output / "manifest.json").stat().st_mtime_ns
    assert "--force" in only_error(export(checkpoints, output))
    assert (output / "manifest.json").stat().st_mtime_ns == before
    (output / "state").mkdir()
    (output / "state" / "learned").write_text("precious")
    cache = output / "state" / "ngrams" / "gone.safetensors"
    cache.parent.mkdir()
    cache.write_bytes(b"of a target that is no longer there")
    again = export(checkpoints, output, "--force")
    assert again.exit_code == 0
    assert "kept what the replaced bundle had learned: 0 adapters, 0 examples" in again.stderr
    listed = CliRunner().invoke(cli, ["adapters", "list", str(output)])
    assert "an earlier export learned for gone" in listed.stdout
    assert (output / "manifest.json").stat().st_mtime_ns != before
    assert (output / "state" / "learned").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_force_does_not_delete_a_folder_that_is_no_bundle(checkpoints, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "not a bundle" in only_error(export(checkpoints, tmp_path, "--force"))
    assert (tmp_path / "thesis.txt").exists()


def test_an_interrupted_export_resumes_with_its_finished_stages(checkpoints, tmp_path, monkeypatch):
    from omnidraft_npu.quantize import export as module

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "export_spelling", interrupt)
    result = export(checkpoints, tmp_path / "bundle")
    assert result.exit_code == 130
    assert not (tmp_path / "bundle").exists()
    assert (tmp_path / "bundle.partial" / "drafter" / "cpu" / "model.onnx").exists()
    monkeypatch.undo()

    def never(*arguments):
        raise AssertionError("a finished stage ran again")

    monkeypatch.setattr(module, "export_model", never)
    assert export(checkpoints, tmp_path / "bundle").exit_code == 0
    open_bundle(tmp_path / "bundle", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_rank_that_no_matrix_has_is_refused_and_an_interrupted_export_stays(
    checkpoints, tmp_path, monkeypatch
):
    from omnidraft_npu.quantize import export as module

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "export_spelling", interrupt)
    export(checkpoints, tmp_path / "bundle")
    line = only_error(export(checkpoints, tmp_path / "bundle", "--lora-rank", "100000"), code=2)
    assert "lora_rank is 100,000, and no matrix of drafter has a rank above 64: use" in line
    assert (tmp_path / "bundle.partial" / "drafter" / "cpu" / "model.onnx").exists()


def test_a_changed_checkpoint_is_not_taken_for_the_old_one(checkpoints, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints / "drafter", copy)
    request = model_request(str(copy), precision="fp32", context_length=64)
    before = request.identity()
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert request.identity() != before
    assert json.loads(json.dumps(before)) == before


def damaged(checkpoints, tmp_path, change):
    copy = tmp_path / "damaged"
    shutil.copytree(checkpoints / "target", copy)
    change(copy)
    return copy


def edit_config(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def poison_weights(folder):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "config.json").unlink(), ["config.json"]),
        (edit_config(model_type="mamba"), ["mamba", "llama", "optimum"]),
        (edit_config(hidden_size=72, head_dim=32), ["embed_tokens", "72"]),
        (cut_weights, ["model.safetensors"]),
        (lambda f: (f / "model.safetensors").unlink(), ["safetensors"]),
        (poison_weights, ["NaN"]),
        (lambda f: (f / "tokenizer.json").unlink(), ["tokenizer"]),
        (lambda f: (f / "tokenizer.json").write_text("{"), ["tokenizer.json"]),
        (edit_config(vocab_size=300), ["300"]),
    ],
)
def test_a_bad_checkpoint_is_one_line_and_leaves_nothing(checkpoints, tmp_path, change, words):
    target = damaged(checkpoints, tmp_path, change)
    output = tmp_path / "out" / "bundle"
    output.parent.mkdir()
    line = only_error(export(checkpoints, output, target=str(target)))
    for word in words:
        assert word in line
    assert list(output.parent.iterdir()) == []


def test_a_model_that_is_nowhere_says_how_to_get_it(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(
        cli, ["export", "--drafter", "smollm2-135m", "--target", "x", "-o", str(tmp_path / "b")]
    )
    assert "omnidraft-npu pull smollm2-135m" in only_error(result)


def test_an_output_that_cannot_be_written_is_one_line(checkpoints, tmp_path):
    (tmp_path / "file").write_text("")
    line = only_error(export(checkpoints, tmp_path / "file" / "bundle"))
    assert "cannot write" in line


def test_a_full_disk_is_one_line_and_finished_stages_stay(checkpoints, tmp_path, monkeypatch):
    from omnidraft_npu.quantize import export as module

    real = module.export_model

    def full(request, root, folder, tell):
        if folder != "drafter":
            (root / "half").write_text("half")
            raise OSError(28, "No space left on device")
        return real(request, root, folder, tell)

    monkeypatch.setattr(module, "export_model", full)
    line = only_error(export(checkpoints, tmp_path / "bundle"))
    assert "No space left on device" in line
    assert "run the same command again" in line
    assert not list((tmp_path / "bundle.partial").rglob("half"))


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("модель", "model"),
        ("my model (v2)", "my-model-v2"),
        (".hidden", "hidden"),
        ("a..b", "a..b"),
    ],
)
def test_a_model_is_named_after_its_folder_as_far_as_a_path_can_be(tmp_path, folder, name):
    (tmp_path / folder).mkdir()
    request = model_request(str(tmp_path / folder), precision="fp32", context_length=64)
    assert request.name == name


def test_a_bad_target_is_found_before_the_drafter_is_exported(checkpoints, tmp_path, monkeypatch):
    from omnidraft_npu.quantize import export as module

    def never(*arguments):
        raise AssertionError("a model was exported before all were looked at")

    monkeypatch.setattr(module, "export_model", never)
    target = damaged(checkpoints, tmp_path, edit_config(model_type="mamba"))
    assert "mamba" in only_error(export(checkpoints, tmp_path / "bundle", target=str(target)))


def test_a_second_export_to_the_same_place_is_refused_while_the_first_runs(checkpoints, tmp_path):
    from omnidraft_npu.locks import exclusive

    with exclusive(tmp_path / ".bundle.lock", lambda: None):
        line = only_error(export(checkpoints, tmp_path / "bundle"))
    assert "another process" in line
    assert export(checkpoints, tmp_path / "bundle").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_an_output_may_be_a_link_to_an_empty_folder(checkpoints, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert export(checkpoints, tmp_path / "link").exit_code == 0
    open_bundle(tmp_path / "link", verify=True)
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_mount_point_is_refused_before_any_work(checkpoints, tmp_path, monkeypatch):
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path.name == "mount")
    assert "mount point" in only_error(export(checkpoints, tmp_path / "mount"))


def test_the_current_folder_and_the_root_are_refused(checkpoints, tmp_path, monkeypatch):
    """They have no name to make another beside them: it was a trace."""
    monkeypatch.chdir(tmp_path)
    assert "that you are in" in only_error(export(checkpoints, "."))
    assert not list(tmp_path.iterdir())
    assert only_error(export(checkpoints, "/"))


def test_two_targets_of_one_name_are_refused(checkpoints, tmp_path):
    result = export(checkpoints, tmp_path / "bundle", "--target", str(checkpoints / "target"))
    assert "two targets" in only_error(result, code=2)
