"""The context of an exported model: what it is made for, and what is advised when it is full."""

import json

import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint
from transformers_variants import rope

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.quantize.model_request import model_request
from omnidraft_npu.quantize.model_stage import prepare_model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A llama of 256 positions that linear scaling stretches to 1,024, in two bundles."""
    root = tmp_path_factory.mktemp("context")
    parameters = rope("linear", factor=4.0)
    write_checkpoint(root / "long", num_hidden_layers=1, rope_parameters=parameters)
    for name, length in (("all", "99999"), ("some", "300")):
        models = ["--drafter", str(root / "long"), "--target", str(root / "long")]
        options = ["-o", str(root / name), "--precision", "fp32", "--context-length", length]
        made = CliRunner().invoke(cli, ["export", *models, *options, "--lora-rank", "0"])
        assert made.exit_code == 0, made.output
    return root


def run(bundle, prompt):
    arguments = ["run", "-b", str(bundle), "--no-draft", "--max-new-tokens", "8", "--json"]
    return CliRunner().invoke(cli, [*arguments, "--raw", prompt])


def test_linear_scaling_holds_as_many_tokens_as_transformers_runs(root):
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    prompt = "numbers 0 1 2 3 4 5 6 7 8 9 and marks " * 30
    ids = Tokenizer.from_file(str(root / "long" / "tokenizer.json")).encode(prompt).ids
    assert 500 < len(ids) < 1000
    model = AutoModelForCausalLM.from_pretrained(root / "long").eval()
    with torch.no_grad():
        expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)

    result = run(root / "all", prompt)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["token_ids"] == expected[0, len(ids) :].tolist()


def test_a_longer_export_is_advised_only_where_there_is_one(root):
    long = run(root / "all", "numbers 0 1 2 3 4 " * 200)
    assert long.exit_code == 1
    assert "the context holds 1024: shorten it, or use a model made for a longer" in long.stderr
    some = run(root / "some", "numbers 0 1 2 3 4 " * 200)
    assert "the context holds 300: shorten it, or export with a larger --con" in some.stderr


def test_the_manifest_says_how_long_the_model_could_be(root):
    entries = [open_bundle(root / name).manifest.drafter for name in ("all", "some")]
    assert [e.context_length for e in entries] == [1024, 300]
    assert [e.max_context_length for e in entries] == [1024, 1024]


@pytest.mark.parametrize("length", [2000, 4096, 300])
def test_a_context_that_is_cut_is_warned_of_where_it_was_asked_for(root, caplog, length):
    """4,096 is the default, which most tiny models do not have."""
    prepare_model(model_request(str(root / "long"), precision="fp32", context_length=length))
    expected = ["long is made for 1024 tokens: --context-length 2000 gives it 1024"]
    assert [r.getMessage() for r in caplog.records] == (expected if length == 2000 else [])


def test_a_context_that_no_bundle_may_have_is_refused_at_once(root):
    with pytest.raises(ConfigError, match="context_length is 9999999, must be at most 2097152"):
        model_request(str(root / "long"), precision="fp32", context_length=9999999)
