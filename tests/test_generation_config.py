"""A model's `generation_config.json`, from the checkpoint to the text that `run` prints."""

import json

import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint
from tiny_gguf import write_gguf
from tiny_models import tiny_model

from omnidraft_npu.cli import cli
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.model_request import model_request
from omnidraft_npu.quantize.model_stage import check_generation, prepare_model

REQUEST = {"precision": "fp32", "context_length": 64}
PROMPT = "the small drafter proposes"
SETTINGS = {
    "penalty": {"repetition_penalty": 1.3},
    "sampling": {"do_sample": True, "temperature": 0.5, "top_p": 0.8, "no_repeat_ngram_size": 3},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("generation")


@pytest.fixture(scope="module")
def exported(root):
    """A bundle of two targets, each with other settings."""
    drafter = write_checkpoint(root / "drafter", num_hidden_layers=1)
    for name, settings in SETTINGS.items():
        path = write_checkpoint(root / name, num_hidden_layers=2) / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": 2} | settings))
    targets = [argument for name in SETTINGS for argument in ("--target", str(root / name))]
    options = ["-o", str(root / "bundle"), "--precision", "fp32", "--lora-rank", "0"]
    made = CliRunner().invoke(cli, ["export", "--drafter", str(drafter), *targets, *options])
    assert made.exit_code == 0, made.output
    return made


def run(root, target, *options):
    arguments = ["run", "-b", str(root / "bundle"), "--target", target, PROMPT, "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--max-new-tokens", "32", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def of_transformers(root, target, **options):
    """Greedy ids of `generate`, which reads the settings itself."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    ids = Tokenizer.from_file(str(root / target / "tokenizer.json")).encode(PROMPT).ids
    model = AutoModelForCausalLM.from_pretrained(root / target).eval()
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, **options)
    return out[0, len(ids) :].tolist()


def test_a_greedy_text_follows_the_repetition_penalty_as_in_transformers(root, exported):
    with_it = of_transformers(root, "penalty")
    without = of_transformers(root, "penalty", repetition_penalty=1.0)
    assert with_it != without

    document, stderr = run(root, "penalty")
    assert document["token_ids"] == with_it
    assert "penalty is decoded with its own repetition-penalty 1.3;" in stderr
    document, stderr = run(root, "penalty", "--repetition-penalty", "1")
    assert document["token_ids"] == without
    assert "its own" not in stderr


def test_a_model_that_samples_is_sampled_unless_options_say_otherwise(root, exported):
    document, stderr = run(root, "sampling", "--seed", "1")
    assert "its own temperature 0.5, top-k 50, top-p 0.8;" in stderr
    assert stderr.count("its own") == 1
    same = ["--temperature", "0.5", "--top-k", "50", "--top-p", "0.8", "--seed", "1"]
    assert run(root, "sampling", *same)[0]["token_ids"] == document["token_ids"]
    greedy, stderr = run(root, "sampling", "--temperature", "0")
    assert "its own" not in stderr
    assert greedy["token_ids"] == of_transformers(root, "sampling", no_repeat_ngram_size=0)


def test_settings_that_are_not_followed_are_named_at_export(root, exported, caplog):
    for name in SETTINGS:
        check_generation(prepare_model(model_request(str(root / name), **REQUEST)))
    assert [record.getMessage() for record in caplog.records] == [
        "sampling/generation_config.json: no_repeat_ngram_size: not followed, so texts can differ "
        "from those of transformers"
    ]


def test_a_setting_that_cannot_be_is_refused_before_any_work(root, exported):
    path = write_checkpoint(root / "wrong") / "generation_config.json"
    path.write_text('{"top_p": "high"}')
    arguments = ["export", "--drafter", str(root / "drafter"), "--target", str(root / "wrong")]
    result = CliRunner().invoke(cli, [*arguments, "-o", str(root / "none")])
    assert result.exit_code == 1
    assert "wrong/generation_config.json: top_p is 'high', must be a number" in result.stderr
    assert not (root / "none").exists() and not (root / "none.partial").exists()


def test_the_sampling_that_a_gguf_recommends_becomes_a_generation_config(tmp_path):
    metadata = {"general.sampling.top_k": 40}
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), metadata=metadata)
    assert open_checkpoint(path).source_files.generation_config == {"top_k": 40}
