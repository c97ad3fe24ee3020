"""`bench --project-chip`: the acceptance measured here, the speeds published for a chip."""

import json
import re

import pytest
from click.testing import CliRunner
from npu_bundle import CONTEXT as NPU_CONTEXT
from npu_bundle import write_npu_bundle
from tiny_bundle import CONTEXT as CPU_CONTEXT
from tiny_bundle import write_bundle

from omnidraft_npu import cost_model
from omnidraft_npu.cli import cli


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bench"), eos=())


def bench(bundle, tmp_path, *arguments):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a b a b a b", "task": "letters"}) + "\n")
    fixed = ["bench", "-b", str(bundle), "--prompts", str(path), "--target", "same"]
    lengths = ["--max-new-tokens", "40", "--draft-tokens", "2", "--repeats", "2"]
    return CliRunner().invoke(cli, [*fixed, *lengths, *arguments])


def test_the_projection_uses_what_was_measured_and_is_labelled(bundle, tmp_path):
    arguments = ["--project-chip", "x-elite", "--project-target-size", "8"]
    arguments += ["--project-drafter-size", "0.1", "--proposer", "model"]
    result = bench(bundle, tmp_path, *arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    found = document["projection"]
    assert found["is_projection"] is True
    # The drafter is the target itself: all it drafts is accepted.
    assert document["summary"]["all"]["conditional_acceptance"] == 1
    assert found["acceptance_by_position"] == [1, 1]
    assert [row["verify_length"] for row in found["lengths"]] == [8, 16, 24, 32]
    assert found["lengths"][-1]["best_without_overhead"]["draft_tokens"] == 31
    shown = bench(bundle, tmp_path, *arguments).stdout
    assert "A projection for x-elite, not a measurement" in shown
    assert "Snapdragon X Elite CRD (geniex_qairt, w4a16, context 512" in shown
    assert "source: Published in the performance files of Qualcomm AI Hub Models 0.65" in shown
    assert "so what the drafter would take is a guess\n" in shown
    assert re.search(
        r"32 tokens buys at most \d+ % over one of 8: export with --verify-length", shown
    )


def test_a_longer_verify_graph_that_buys_nothing_is_said_so(bundle, tmp_path):
    shown = bench(bundle, tmp_path, "--project-chip", "x-elite", "--target", "other").stdout
    assert "A verify graph of over 8 tokens buys nothing here" in shown


def test_the_context_is_that_of_the_npu_s_graphs_where_there_are_any(bundle, tmp_path, monkeypatch):
    asked = []

    def project(*arguments, context_length, **options):
        asked.append(context_length)
        return original(*arguments, context_length=context_length, **options)

    original = cost_model.project
    monkeypatch.setattr(cost_model, "project", project)
    for root in (bundle, write_npu_bundle(tmp_path / "npu")):
        result = bench(root, tmp_path, "--project-chip", "x-elite", "--json")
        assert result.exit_code == 0, result.output
    assert asked == [CPU_CONTEXT, NPU_CONTEXT]


def test_without_sizes_the_models_own_are_taken(bundle, tmp_path):
    result = bench(bundle, tmp_path, "--project-chip", "8 Elite", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["projection"]
    assert 0 < found["target_b"] < 1e-3
    assert found["chip"] == "8-elite"
    shown = bench(bundle, tmp_path, "--project-chip", "8 Elite").stdout
    assert "so what the target and the drafter would take is a guess; --project-target-" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--project-chip", "x-elit"], "near it are x-elite"),
        (["--project-chip", "8 gen 3"], "no speeds are published"),
        (["--project-chip", "855"], "too old"),
        (["--project-target-size", "8"], "--project-chip"),
        (["--project-chip", "x-elite", "--project-target-size", "0"], "is 0.0"),
        (["--project-chip", "x-elite", "--project-target-size", "inf"], "is inf"),
    ],
)
def test_what_cannot_be_projected_is_refused_before_anything_is_measured(
    bundle, tmp_path, monkeypatch, arguments, words
):
    from omnidraft_npu.runtime import bench as module

    monkeypatch.setattr(module, "measure", lambda *_, **__: pytest.fail("measured"))
    result = bench(bundle, tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
