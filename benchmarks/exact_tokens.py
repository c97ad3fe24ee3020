"""What an exact pass over a lone token costs, against one over two tokens and one not exact.

    python benchmarks/exact_tokens.py smollm2-135m [--precision int8,int4,fp32] [--threads 1,2]

The same model is exported with and without the input that adds rows to attention alone. All
three decode the same tokens in turn, one each, in sessions whose threads do not spin, since they
would hold the cores that the next one needs. A figure is the median over the tokens of a time
over that of the pass that is not exact, so that a busy machine slows both.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from omnidraft_npu.precision import Precision
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel
from omnidraft_npu.store.local import resolve_model

CONTEXT = 1024
PROMPT = 300


def conversations(
    path: str, precision: Precision, thread_counts: list[int], folder: Path
) -> dict[int, dict[str, OnnxCausalLM]]:
    """For each number of threads the three ways to score a token."""
    checkpoint = open_checkpoint(resolve_model(path))
    num_logits = checkpoint.config.num_logits
    graphs = {}
    for has_rows in (True, False):
        graph = build_cpu_decoder(
            checkpoint.config,
            checkpoint.tensor,
            folder / f"{precision}-{has_rows}",
            CpuGraphOptions(
                precision=precision, context_length=CONTEXT, has_attention_rows=has_rows
            ),
        )
        graphs[has_rows] = graph
    found = {}
    for threads in thread_counts:
        models = {
            has_rows: OnnxModel.open(
                graph,
                context_length=CONTEXT,
                vocab_size=num_logits,
                num_logits=num_logits,
                cache="shared",
                threads=threads,
            )
            for has_rows, graph in graphs.items()
        }
        rule = models[True].exact_rule
        found[threads] = {
            "not exact": OnnxCausalLM(models[False], is_exact=False),
            "rows in attention": OnnxCausalLM(models[True], rule=rule),
            "rows in the whole pass": OnnxCausalLM(
                models[False], rule=replace(rule, whole_pass=True)
            ),
        }
    return found


def measure(ways: dict[str, OnnxCausalLM], num_tokens: int) -> dict[str, float]:
    """Median of each way's time over the first one's; the exact ones must give the same bits."""
    vocab_size = next(iter(ways.values())).vocab_size
    ids = np.random.default_rng(0).integers(vocab_size, size=PROMPT + num_tokens).tolist()
    for lm in ways.values():
        lm.prefill(ids[:PROMPT])
    times: dict[str, list[float]] = {way: [] for way in ways}
    for token in ids[PROMPT:]:
        rows = []
        for way, lm in ways.items():
            started = time.perf_counter()
            rows.append(lm.score([token])[0])
            times[way].append(time.perf_counter() - started)
        np.testing.assert_array_equal(rows[1], rows[2])
    base, *_ = times.values()
    return {
        way: statistics.median(a / b for a, b in zip(values, base, strict=True))
        for way, values in times.items()
    } | {"ms": 1000 * statistics.median(base)}


def main() -> None:
    """Print one row for each precision and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="built-in name, GGUF file or Hugging Face folder")
    parser.add_argument("--precision", default="int8,int4,fp32")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    threads = [int(count) for count in options.threads.split(",")]
    print("| precision | threads | not exact, ms | rows in attention | rows in the whole pass |")
    print("|---|---|---|---|---|")
    for precision in options.precision.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for count, ways in conversations(
                options.model, precision, threads, Path(folder)
            ).items():
                row = measure(ways, options.tokens)
                print(
                    f"| {precision} | {count} | {row['ms']:.1f} | "
                    f"{row['rows in attention']:.2f} | {row['rows in the whole pass']:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
