"""A model of an architecture that the builder does not know, as a lossless target."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from decoder_graphs import NUM_LOGITS, SHARED, VOCAB, write_decoder

from omnidraft_npu.cli import cli
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.errors import CheckpointError, ConfigError, ExportError
from omnidraft_npu.proposal import Proposal
from omnidraft_npu.quantize import optimum_export
from omnidraft_npu.quantize.optimum_export import export_with_optimum
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel
from omnidraft_npu.speculative import generate

needs_optimum = pytest.mark.skipif(
    importlib.util.find_spec("optimum") is None,
    reason="needs the optimum extra, which lives in an environment of its own",
)

CONTEXT, NUM_IDS, ROWS = 96, 280, 300
DRAFTER = replace(SHARED, context_length=CONTEXT)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A random gpt2 with a byte-level BPE tokenizer trained on the spot."""
    folder = tmp_path_factory.mktemp("gpt2")
    return write_gpt2(folder)


def write_gpt2(folder: Path, **settings) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_IDS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. "
    tokenizer.train_from_iterator([text] * 9, trainer)
    assert tokenizer.get_vocab_size() == NUM_IDS
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end
    ).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(
        vocab_size=ROWS,  # padded, as many checkpoints are
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=0,
        **size | settings,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(gpt2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return export_with_optimum(gpt2, folder), folder / "model.onnx"


class ModelProposer:
    """A drafter with the target's vocabulary: its greedy tokens, folded into the range it has."""

    def __init__(self, lm: OnnxCausalLM) -> None:
        self.lm = lm

    def begin(self, context):
        self.lm.reset()
        self.lm.prefill([i % VOCAB for i in context[:-1]])
        self.last = context[-1]

    def propose(self, max_draft_tokens, draw=None):
        start, token_ids = self.lm.length, []
        last = self.last
        for _ in range(max_draft_tokens):
            last = int(np.argmax(self.lm.score([last % VOCAB])[0]))
            token_ids.append(last)
        self.lm.rewind(start)
        return Proposal(token_ids=tuple(token_ids))

    def observe(self, token_ids):
        self.lm.prefill([i % VOCAB for i in (self.last, *token_ids[:-1])])
        self.last = token_ids[-1]


def decode(proposer, target, prompt, k):
    config = DecodeConfig(max_new_tokens=30, max_draft_tokens=k)
    target.reset()
    return [i for r in generate(proposer, target, prompt, config) for i in r.verdict.token_ids]


@pytest.mark.optimum
@needs_optimum
class TestWithOptimum:
    def test_the_facts_are_the_models_and_only_the_graph_is_left(self, exported):
        facts, graph = exported
        assert facts.architecture == "gpt2"
        assert (facts.num_logits, facts.context_length) == (ROWS, CONTEXT)
        assert facts.tokenizer.eos_token_ids == (0,)
        assert [path.name for path in graph.parent.iterdir()] == ["model.onnx"]

    @pytest.mark.parametrize("k", [1, 3, 8])
    def test_speculative_greedy_equals_the_target_alone(self, exported, gpt2, tmp_path, k):
        """A drafter with the shared cache, a target with the growing one; and transformers."""
        import torch
        from transformers import GPT2LMHeadModel

        facts, graph = exported
        sizes = {"context_length": CONTEXT, "vocab_size": NUM_IDS, "num_logits": facts.num_logits}
        target = OnnxCausalLM(OnnxModel.open(graph, threads=1, **sizes))
        drafter_graph = write_decoder(tmp_path / "drafter.onnx", DRAFTER)
        sizes = {"context_length": CONTEXT, "vocab_size": VOCAB, "num_logits": NUM_LOGITS}
        drafter = ModelProposer(OnnxCausalLM(OnnxModel.open(drafter_graph, threads=1, **sizes)))
        itself = ModelProposer(OnnxCausalLM(target.model))
        model = GPT2LMHeadModel.from_pretrained(gpt2)
        for prompt in ([5], [17, 279, 33], list(range(40, 60))):
            alone = decode(None, target, prompt, k)
            assert decode(drafter, target, prompt, k) == alone
            assert decode(itself, target, prompt, k) == alone
            with torch.no_grad():
                best = model(torch.tensor([prompt + alone])).logits[0, :, :NUM_IDS].argmax(-1)
            assert best[len(prompt) - 1 : -1].tolist() == alone

    def test_the_difference_from_torch_is_told_with_its_tolerance(self, gpt2, tmp_path, caplog):
        with caplog.at_level("INFO", logger="omnidraft_npu"):
            export_with_optimum(gpt2, tmp_path)
        (message,) = [r.getMessage() for r in caplog.records if "tolerance" in r.getMessage()]
        difference, tolerance = map(float, re.findall(r"\d\.\d\de-\d\d", message))
        assert difference <= tolerance < 0.01

    def test_a_graph_that_differs_from_torch_is_refused(self, gpt2, tmp_path, monkeypatch):
        monkeypatch.setattr(optimum_export, "MAX_RELATIVE_DIFFERENCE", 0.0)
        with pytest.raises(ExportError, match=r"differs from torch by .* where 0\.00e\+00"):
            export_with_optimum(gpt2, tmp_path)

    def test_a_model_that_optimum_does_not_know_is_one_line(self, gpt2, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
        with pytest.raises(ExportError, match=r"cannot export .*\(model_type nonesuch\)") as caught:
            export_with_optimum(tmp_path, tmp_path / "out")
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("optimum") is not None, reason="the optimum extra is installed"
)
def test_without_the_extra_the_error_names_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"pip install '\.\[export,optimum\]'"):
        export_with_optimum(tmp_path, tmp_path / "out")
    # Before anything is made: it was found after the drafter and its training graph were.
    models = ["--drafter", str(tmp_path), "--target", str(tmp_path)]
    options = ["--exporter", "optimum", "-o", str(tmp_path / "bundle")]
    done = CliRunner().invoke(cli, ["export", *models, *options])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(optimum_export, "find_spec", lambda _: True)
    with pytest.raises(CheckpointError, match="no Hugging Face folder"):
        export_with_optimum(tmp_path / "model.gguf", tmp_path / "out")
