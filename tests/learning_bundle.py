"""A bundle whose drafter can learn: a tiny llama with LoRA inputs and a training graph."""

from pathlib import Path

from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.cli import cli

CONTEXT, RANK = 128, 4


def write_learning_bundle(root: Path) -> Path:
    """A bundle at `root` / bundle with the targets `target` (default) and `same`."""
    drafter = write_checkpoint(root / "drafter", vocab_size=280)
    target = write_checkpoint(
        root / "target", "qwen2", vocab_size=310, num_logits=320, seed=1, seed_text="verify"
    )
    same = write_checkpoint(root / "same", vocab_size=280, seed=5)
    output = root / "bundle"
    models = ["--drafter", drafter, "--target", target, "--target", same]
    options = ["-o", output, "--precision", "fp32", "--context-length", CONTEXT]
    learning = ["--lora-rank", RANK, "--training-shape", "4x40"]
    arguments = map(str, (*models, *options, *learning))
    made = CliRunner().invoke(cli, ["export", *arguments])
    assert made.exit_code == 0, made.output
    return output
