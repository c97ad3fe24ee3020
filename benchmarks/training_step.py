"""What one update of a drafter takes: wall and processor seconds, and memory.

    python benchmarks/training_step.py [--shape omnidraft-tiny|llama-68m] [--batch 8] [--length 256]

Every position has a law of 32 pieces. The Llama-68M shape has random weights.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft_npu.drafters import DEFAULT_DRAFTER, packaged_drafter
from omnidraft_npu.lora import DEFAULT_RANK
from omnidraft_npu.memory import peak_rss_bytes
from omnidraft_npu.quantize.architecture import DecoderConfig, RopeConfig
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.quantize.training.graph import TrainingGraphOptions, build_training_graph
from omnidraft_npu.quantize.training.parity import example_feeds
from omnidraft_npu.runtime.lora_trainer import TrainingStep

LLAMA_68M = DecoderConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=768,
    intermediate_size=3072,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    num_logits=32000,
    context_length=2048,
    norm_eps=1e-6,
    rope=RopeConfig(base=10000.0),
    layer_types=("full", "full"),
    attention_scale=64**-0.5,
)


def drafter(shape: str) -> tuple[DecoderConfig, Callable[[str], Any]]:
    if shape == DEFAULT_DRAFTER:
        folder = packaged_drafter(DEFAULT_DRAFTER)
        assert folder is not None
        checkpoint = open_checkpoint(folder)
        return checkpoint.config, checkpoint.tensor
    rng, shapes = np.random.default_rng(0), LLAMA_68M.tensor_shapes()

    def tensor(name: str) -> Any:
        scale = 1.0 if "norm" in name else 0.03
        return rng.normal(scale=scale, size=shapes[name]).astype(np.float32)

    return LLAMA_68M, tensor


def measure(path: Path, feeds: dict[str, Any], updates: int) -> list[dict[str, float]]:
    before = peak_rss_bytes() or 0
    step = TrainingStep(path)
    learned = {name: feeds.pop(name) for name in step.shapes}
    rows = []
    for _ in range(updates):
        wall, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        step.run(feeds, learned)
        now = resource.getrusage(resource.RUSAGE_SELF)
        rows.append(
            {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
                "extra_peak_mb": ((peak_rss_bytes() or 0) - before) / 1e6,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[DEFAULT_DRAFTER, "llama-68m"], default=DEFAULT_DRAFTER)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--updates", type=int, default=3)
    arguments = parser.parse_args()
    config, tensors = drafter(arguments.shape)
    options = TrainingGraphOptions(
        lora_rank=DEFAULT_RANK, batch=arguments.batch, length=arguments.length
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = CpuGraphOptions(
            context_length=2048, lora_rank=DEFAULT_RANK, has_hidden_states=True
        )
        build_cpu_decoder(config, tensors, folder, context)
        path = build_training_graph(config, folder, options)
        rows = measure(path, example_feeds(config, options), arguments.updates)
        size = path.stat().st_size
    print(json.dumps({**vars(arguments), "graph_bytes": size, "updates_run": rows}, indent=2))


if __name__ == "__main__":
    main()
