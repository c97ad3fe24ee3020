"""Sessions on a provider: the one place that knows onnxruntime's options."""

from pathlib import Path

import onnxruntime as ort

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import BundleError
from omnidraft_npu.machine import usable_threads
from omnidraft_npu.system_errors import limit_reached

CPU_PROVIDER = "CPUExecutionProvider"

_FATAL_ONLY = 4
"""Errors come as exceptions."""


def open_cpu_session(
    path: Path,
    *,
    threads: int | None = None,
    takes_turns: bool = True,
    keeps_memory: bool = True,
) -> ort.InferenceSession:
    """A session whose nodes all run on the CPU provider.

    Args:
        path: The graph; its external data lies beside it.
        threads: Threads of one operator, at most one a processor; None for one a physical core.
        takes_turns: Whether another session decodes in turn with this one.
        keeps_memory: Whether what a run took is kept for the next one. Without, a run that is
            large and rare, such as an update of an adapter, gives it back.

    Raises:
        ConfigError: `threads` is below 1.
        ResourceError: memory or threads run out.
        BundleError: the file is missing or not a graph that onnxruntime can run.
    """
    threads = usable_threads(threads)
    if not path.is_file():
        raise BundleError(f"{path} is missing: export the model again")
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # A plan of all values of a run puts them side by side in one block; an arena never shrinks.
    options.enable_mem_pattern = options.enable_cpu_mem_arena = keeps_memory
    # Workers that wait for the next operator spin, as is onnxruntime's default: a target alone
    # decodes about a quarter faster so. Drafter and target have workers of their own, and
    # spinning ones hold the cores that the other session needs: with both cores of a machine in
    # demand a round took 6.5 times as long, so sessions that take turns let theirs sleep
    # (benchmarks/README.md, benchmarks/session_options.py).
    if takes_turns:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(str(path), options, providers=[CPU_PROVIDER])
    except Exception as error:
        raise limit_reached(error) or BundleError(
            f"{path} cannot be opened ({reason_of(error)}): export the model again"
        ) from error


def run_bound(session: ort.InferenceSession, binding: ort.IOBinding) -> None:
    """One run with bound inputs and outputs.

    Raises:
        ResourceError: memory runs out.
        BundleError: the graph does not compute what its inputs and outputs promise.
    """
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # onnxruntime raises what C++ threw
        raise limit_reached(error) or BundleError(
            f"a graph of the bundle cannot be run ({reason_of(error)}): export the model again"
        ) from error


def reason_of(error: Exception) -> str:
    """What onnxruntime says in its first line."""
    return shown_text(next(iter(str(error).splitlines()), "no reason given"), 300)


def is_size(dim: object) -> bool:
    """Whether a dimension of a graph is fixed, and one that a buffer can have."""
    return isinstance(dim, int) and 1 <= dim < 2**31


def provider_of(session: ort.InferenceSession) -> str:
    """The provider that runs every node of a session opened here.

    Such a session was offered one provider, so no node can have fallen back to another.
    """
    (provider,) = session.get_providers()
    return str(provider)
