"""From checkpoints to text on the simulated NPU: what `export --soc` makes is what `run` runs."""

import json
import shutil

import pytest
from click.testing import CliRunner
from shared_files import shared_path
from simulated_htp import X_ELITE, has_simulator
from tiny_checkpoints import SENTENCES, write_checkpoint

from omnidraft_npu.cli import cli
from omnidraft_npu.qnn.provider import QNN_PROVIDER

pytestmark = pytest.mark.skipif(not has_simulator(), reason="the simulator is for x86_64 Linux")
SIMULATED = f"{QNN_PROVIDER} (simulated HTP, soc {X_ELITE})"
CPU = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A w8a16 drafter and a target of another vocabulary, calibrated on a few sentences."""
    root = tmp_path_factory.mktemp("export")
    drafter = write_checkpoint(root / "drafter", vocab_size=280, num_hidden_layers=2)
    target = write_checkpoint(
        root / "target", "qwen2", vocab_size=300, seed=3, seed_text="verify", num_hidden_layers=1
    )
    rows = [json.dumps({"prompt": sentence[i:]}) for sentence in SENTENCES for i in range(3)]
    (root / "calibration.jsonl").write_text("\n".join(rows))
    models = ["--drafter", str(drafter), "--target", str(target), "-o", str(root / "bundle")]
    sizes = ["--precision", "fp32", "--context-length", "64", "--htp-context-length", "64"]
    htp = ["--soc", "x-elite", "--htp-precision", "w8a16"]
    htp += ["--calibration", str(root / "calibration.jsonl")]
    result = CliRunner().invoke(cli, ["export", *models, *sizes, *htp])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return root / "bundle"


def run(bundle, *options):
    limits = ["--max-new-tokens", "20", "--raw", "--json", "--simulate"]
    result = CliRunner().invoke(cli, ["run", "-b", str(bundle), *limits, *options, "the small"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return json.loads(result.stdout)


def test_a_quantised_drafter_on_the_npu_leaves_the_text_of_a_target_on_the_cpu_alone(bundle):
    plain = run(bundle, "--no-draft", "--target-device", "cpu")
    drafted = run(bundle, "--draft-device", "npu", "--target-device", "cpu", "--proposer", "model")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["draft_provider"] == SIMULATED
    assert drafted["stats"]["target_provider"] == CPU
    assert drafted["stats"]["proposed"] > 0


def test_a_quantised_pair_on_the_npu_writes_what_its_target_alone_writes_there(bundle):
    npu = ("--target-device", "npu", "--draft-device", "npu")
    plain = run(bundle, "--no-draft", *npu)
    drafted = run(bundle, *npu, "--proposer", "model")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["target_provider"] == SIMULATED


@pytest.mark.slow
def test_a_drafter_of_real_size_drafts_what_it_would_on_the_cpu(tmp_path):
    """The shape of a Llama of 68 million weights, random ones; drafter and target are equal."""
    shape = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    }
    tokenizer = shared_path("tokenizers/llama2/tokenizer.json")
    model = write_checkpoint(tmp_path / "model", vocab_size=300, num_logits=32000, **shape)
    shutil.copy(tokenizer, model)
    models = ["--drafter", str(model), "--target", str(model), "-o", str(tmp_path / "bundle")]
    options = ["--precision", "fp32", "--context-length", "128", "--htp-context-length", "128"]
    options += ["--soc", "x-elite", "--htp-precision", "fp16"]
    result = CliRunner().invoke(cli, ["export", *models, *options])
    assert result.exit_code == 0, result.output + repr(result.exception)
    on_cpu = ("--target-device", "cpu", "--proposer", "model", "--max-new-tokens", "8")
    drafted = run(tmp_path / "bundle", *on_cpu, "--draft-device", "npu")
    expected = run(tmp_path / "bundle", *on_cpu, "--draft-device", "cpu")
    assert drafted["token_ids"] == expected["token_ids"]
    assert drafted["stats"]["draft_provider"] == SIMULATED
    assert drafted["stats"]["acceptance_rate"] > 0.7
    assert expected["stats"]["acceptance_rate"] == 1
