"""What the HTP recipes cost in accuracy on a real model, on the CPU provider.

Parts that are done are kept in the work folder, so that the script can be run again for
another recipe, rounding or cache. Figures: docs/quantisation.md.
"""

import argparse
import dataclasses
import json
import resource
import time
from pathlib import Path

import numpy as np

from omnidraft_npu.files import write_json
from omnidraft_npu.quantize.calibration.comparison import ModelComparison
from omnidraft_npu.quantize.calibration.htp_quantization import find_encodings, write_graphs
from omnidraft_npu.quantize.calibration.ranges import collect_ranges
from omnidraft_npu.quantize.calibration.texts import calibration_text
from omnidraft_npu.quantize.calibration.weights import IntegerWeights, quantize_weights
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions, build_htp_decoder
from omnidraft_npu.quantize.recipes import RECIPES
from omnidraft_npu.text.tokenizer import Tokenizer

WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the parts")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to judge by")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens of it")
    parser.add_argument("--recipe", choices=RECIPES, default="w8a16")
    parser.add_argument("--rounding", choices=("nearest", "search", "feedback"), default="feedback")
    parser.add_argument("--kv-bits", type=int, choices=(8, 16), default=16)
    arguments = parser.parse_args()

    started = time.perf_counter()

    def done(what: str) -> None:
        print(f"{what}: {time.perf_counter() - started:.0f} s", flush=True)

    checkpoint = open_checkpoint(arguments.checkpoint)
    config, files = checkpoint.config, checkpoint.tokenizer()
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    text = calibration_text(None, tokenizer, context_length=WINDOW, window=WINDOW)
    options = HtpGraphOptions(lengths=(128,), context_length=WINDOW)

    source = {128: options.path(arguments.work / "float", 128)}
    if not source[128].is_file():
        build_htp_decoder(config, checkpoint.tensor, arguments.work / "float", options)
        done("float graph")
    saved = arguments.work / "ranges.json"
    if not saved.is_file():
        ranges, _ = collect_ranges(source[128], text.windows, sliding_window=config.sliding_window)
        write_json(saved, ranges)
        done("ranges")
    ranges = {name: tuple(pair) for name, pair in json.loads(saved.read_text()).items()}
    recipe = RECIPES[arguments.recipe]
    if recipe.has_integer_activations:
        recipe = dataclasses.replace(recipe, kv_bits=arguments.kv_bits)
    name = f"{recipe.name}-{arguments.rounding}"
    weights = IntegerWeights(arguments.work / name / "weights")
    if weights.get("lm_head") is None:
        quantize_weights(
            config, checkpoint.tensor, text.windows, recipe, weights, rounding=arguments.rounding
        )
        done("weights")
    graphs = {128: options.path(arguments.work / name / f"kv{recipe.kv_bits}", 128)}
    write_graphs(source, graphs, find_encodings(source[128], ranges, recipe), weights, recipe)
    done("quantised graph")
    ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"), add_special=False)
    judged = np.array(ids[: arguments.windows * WINDOW]).reshape(arguments.windows, WINDOW)
    comparison = ModelComparison(judged, sliding_window=config.sliding_window)
    comparison.add(source[128], graphs[128], range(config.num_layers))
    result = comparison.result()
    done("comparison")
    print(json.dumps({"recipe": name, "kv_bits": recipe.kv_bits, **result.to_report()}))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB")


if __name__ == "__main__":
    main()
