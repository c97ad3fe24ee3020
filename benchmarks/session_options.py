"""How onnxruntime's thread options fare when a drafter and a target take turns.

    python benchmarks/session_options.py [--threads 2] [--rounds 60]

Two int4 stacks of a small drafter's and target's size run in rounds: four times one row, then
once five. Every choice runs in a process of its own, all choices several times in turn; each
figure is the median of a round over that of the first choice.
"""

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

CHOICES = {
    "no spinning": {"session.intra_op.allow_spinning": "0"},
    "spinning": {},
    "spinning 50 us": {"session.intra_op.spin_duration_us": "50"},
    "spinning, stopped after a run": {"session.force_spinning_stop": "1"},
    "one pool for both sessions": {},
}
DRAFTER, TARGET = (30, 576, 3072), (18, 1024, 4096)
"""Layers, hidden size, inner size."""


def stack(layers: int, hidden: int, inner: int) -> bytes:
    """A graph of alternating wide and narrow int4 projections."""
    from onnx import TensorProto, helper, numpy_helper

    rng, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    for i in range(2 * layers):
        k, n = (hidden, inner) if i % 2 == 0 else (inner, hidden)
        packed = rng.integers(0, 256, (n, k // 32, 16)).astype(np.uint8)
        scales = np.full(n * k // 32, 1e-3, np.float32)
        names = [x, f"packed{i}", f"scales{i}"]
        weights += map(numpy_helper.from_array, (packed, scales), names[1:])
        settings = {"K": k, "N": n, "bits": 4, "block_size": 32, "accuracy_level": 4}
        nodes += [
            helper.make_node("MatMulNBits", names, [f"p{i}"], domain="com.microsoft", **settings),
            helper.make_node("Tanh", [f"p{i}"], [f"x{i}"]),
        ]
        x = f"x{i}"
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "rows", hidden])
        for name in ("x", x)
    ]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


def measure(choice: str, threads: int, rounds: int) -> float:
    """Median seconds of a round."""
    import onnxruntime as ort

    is_shared = choice.startswith("one pool")
    if is_shared:
        ort.set_global_thread_pool_sizes(threads, 1)
    sessions = []
    for size in (DRAFTER, TARGET):
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.use_per_session_threads = not is_shared
        for key, value in CHOICES[choice].items():
            options.add_session_config_entry(key, value)
        sessions.append(
            ort.InferenceSession(stack(*size), options, providers=["CPUExecutionProvider"])
        )
    inputs = [
        np.ones((1, rows, size[1]), np.float32)
        for rows, size in zip((1, 5), (DRAFTER, TARGET), strict=True)
    ]
    seconds = []
    for _ in range(rounds + 5):
        start = time.perf_counter()
        for _ in range(4):
            sessions[0].run(None, {"x": inputs[0]})
        sessions[1].run(None, {"x": inputs[1]})
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[5:])


def main() -> None:
    """Measure every choice and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--choice", choices=CHOICES, help="measure this one, print its seconds")
    arguments = parser.parse_args()
    if arguments.choice:
        print(measure(arguments.choice, arguments.threads, arguments.rounds))
        return
    settings = ["--threads", str(arguments.threads), "--rounds", str(arguments.rounds)]
    results: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    for _ in range(3):
        for choice, seconds in results.items():
            command = [sys.executable, __file__, *settings, "--choice", choice]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seconds.append(float(done.stdout))
    base = statistics.median(results["no spinning"])
    print(f"{arguments.threads} threads, no spinning: {base * 1e3:.1f} ms a round")
    for choice, seconds in results.items():
        ratios = ", ".join(f"{s / base:.2f}" for s in seconds)
        print(f"{choice:32} {statistics.median(seconds) / base:.2f} times ({ratios})")


if __name__ == "__main__":
    main()
