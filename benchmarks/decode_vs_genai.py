"""Plain greedy decoding here and by onnxruntime-genai, the same weights, taking turns.

    python benchmarks/decode_vs_genai.py MODEL --genai-python PATH [--precision int4] [--threads 2]

MODEL is a GGUF file or a Hugging Face folder. PATH is the Python of an environment with
onnxruntime-genai, torch and transformers: its builder makes the other graph. Every way to
decode runs in a process of its own, all in turn; a figure is the median of the runs' medians,
and a ratio above 1 says that this project's is faster.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SPIN = "session.intra_op.allow_spinning"
WAYS = {
    # name: (worker, session option)
    "here": ("here", ""),
    "here, exact passes": ("exact", ""),
    "genai": ("genai", ""),
    "genai, no spinning": ("genai", SPIN),
}
PROMPT_TOKENS, NEW_TOKENS = 128, 64


def prompt(vocab_size):
    return [100 + i * 7919 % (vocab_size - 200) for i in range(PROMPT_TOKENS)]


def write_hugging_face(checkpoint, folder):
    """The checkpoint's float32 tensors, as the other builder reads them."""
    from safetensors.numpy import save_file

    from omnidraft_npu.quantize.checkpoints.tensor_names import hugging_face_name

    config, tensors = checkpoint.config, {}
    for name in config.tensor_shapes():
        value = checkpoint.tensor(name)
        if config.has_sandwich_norms and "norm" in name:
            value = value - 1
        is_head = name == "lm_head"
        inner = "" if is_head else hugging_face_name(
            name, has_sandwich_norms=config.has_sandwich_norms
        )  # fmt: skip
        tensors["lm_head.weight" if is_head else f"model.{inner}"] = np.ascontiguousarray(value)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files = checkpoint.tokenizer()
    documents = {
        "config.json": json.dumps(checkpoint.source_files.config | {"torch_dtype": "float32"}),
        "tokenizer.json": files.tokenizer_json,
        "tokenizer_config.json": json.dumps(files.tokenizer_config),
    }
    for name, text in documents.items():
        (folder / name).write_text(text, encoding="utf-8")


def run_quietly(command, environment):
    """Run a command; its output is shown only where it fails, which ends this program."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: its output is above")


def build(model, work, precision, genai_python):
    """Both graphs, made once below `work`."""
    from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
    from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder

    checkpoint = open_checkpoint(model)
    options = CpuGraphOptions(precision=precision, context_length=1024)
    here, source, genai = (work / f"{name}-{precision}" for name in ("here", "source", "genai"))
    build_cpu_decoder(checkpoint.config, checkpoint.tensor, here, options)
    if not genai.exists():
        partial = work / f"genai-{precision}.partial"
        for folder in (source, partial):  # of a run that failed or was killed
            shutil.rmtree(folder, ignore_errors=True)
        write_hugging_face(checkpoint, source)
        command = [genai_python, "-m", "onnxruntime_genai.models.builder", "-i", str(source)]
        command += ["-o", str(partial), "-p", precision, "-e", "cpu", "-c", str(work / "cache")]
        run_quietly(command, os.environ | {"HF_HUB_OFFLINE": "1"})
        partial.rename(genai)
        shutil.rmtree(source)
    return {"here": here, "exact": here, "genai": genai}, checkpoint.config.num_logits


def decode_here(folder, threads, _, vocab_size, *, is_exact):
    from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel

    sizes = {"context_length": 1024, "vocab_size": vocab_size, "num_logits": vocab_size}
    settings = {"cache": "shared", "threads": threads, "takes_turns": False}
    model = OnnxModel.open(folder / "model.onnx", **settings, **sizes)
    lm, ids = OnnxCausalLM(model, is_exact=is_exact), prompt(vocab_size)

    def run():
        started = time.perf_counter()
        lm.reset()
        lm.prefill(ids[:-1])
        token, times = ids[-1], [time.perf_counter() - started]
        for _ in range(NEW_TOKENS):
            started = time.perf_counter()
            token = int(lm.score([token])[-1].argmax())
            times.append(time.perf_counter() - started)
        return times

    return run


def decode_by_genai(folder, threads, option, vocab_size):
    import onnxruntime_genai as genai

    options = {"intra_op_num_threads": threads} | ({option: "0"} if option else {})
    config = genai.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model, ids = genai.Model(config), np.array(prompt(vocab_size), np.int32)

    def run():
        started = time.perf_counter()
        params = genai.GeneratorParams(model)
        length = PROMPT_TOKENS + NEW_TOKENS + 1
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(ids)
        times = [time.perf_counter() - started]
        for _ in range(NEW_TOKENS):
            started = time.perf_counter()
            generator.generate_next_token()
            times.append(time.perf_counter() - started)
        return times

    return run


def work(name, folder, threads, option, vocab_size):
    """Answer each line on stdin with the seconds of one run: the prompt's, then each token's."""
    if name == "genai":
        run = decode_by_genai(folder, threads, option, vocab_size)
    else:
        run = decode_here(folder, threads, option, vocab_size, is_exact=name == "exact")
    run()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


def start(way, folders, args, vocab_size):
    name, option = WAYS[way]
    python = args.genai_python if name == "genai" else sys.executable
    command = [python, __file__, "--worker", name, str(folders[name]), "--option", option]
    command += ["--threads", str(args.threads), "--vocab-size", str(vocab_size)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while (line := worker.stdout.readline().strip()) != "ready":
        if not line:
            raise SystemExit(f"{way}: the worker ended with {worker.wait()}")
    return worker


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--genai-python", default=sys.executable)
    parser.add_argument("--precision", choices=["int4", "int8"], default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("build/decode_vs_genai"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--option", default="", help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.model, args.threads, args.option, args.vocab_size)
    folders, vocab_size = build(args.model, args.work, args.precision, args.genai_python)
    workers = {way: start(way, folders, args, vocab_size) for way in WAYS}
    times = {way: [] for way in WAYS}
    for _ in range(args.runs):
        for way, worker in workers.items():
            print(file=worker.stdin, flush=True)
            if not (line := worker.stdout.readline()):
                raise SystemExit(f"{way}: the worker ended with {worker.wait()}, see above")
            times[way].append(json.loads(line))
    token = {w: statistics.median(statistics.median(t[1:]) for t in times[w]) for w in WAYS}
    prefill = {w: statistics.median(t[0] for t in times[w]) for w in WAYS}
    print(f"{args.precision}, CPUExecutionProvider, {args.threads} threads, {args.runs} runs,")
    print(f"{PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} decoded; ratios over genai's own time")
    for way in WAYS:
        decode, first = token["genai"] / token[way], prefill["genai"] / prefill[way]
        print(f"{way:20} decode {decode:5.2f}x ({token[way] * 1e3:6.2f} ms)  prefill {first:5.2f}x")
    return None


if __name__ == "__main__":
    main()
