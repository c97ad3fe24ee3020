"""Context binaries for chips, ahead of time: no chip is needed, each is checked when made."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omnidraft_npu.chips.table import Chip
from omnidraft_npu.errors import BundleError, ConfigError, ExportError
from omnidraft_npu.qnn.binary import check_context_binary, installed_qnn_version

from .compile_child import FAILED

_CHILD = "omnidraft_npu.quantize.compile_child"


def check_compilable(chips: Sequence[Chip]) -> None:
    """Pass if binaries can be made here for every chip.

    Raises:
        ConfigError: the QNN here does not know one of them.
        DeviceError: there is no QNN here that can compile.
    """
    from omnidraft_npu.qnn.provider import find_htp

    for chip in chips:
        if chip.simulated is None:
            raise ConfigError(
                f"nothing can be compiled for {chip.name} here: this QNN does not know its "
                f"soc_model, {chip.soc_model}; leave out --soc {chip.key}"
            )
    find_htp(simulate=True)


def compile_graphs(
    graphs: Mapping[int, Path],
    folder: Path,
    chips: Sequence[Chip],
    *,
    share_weights: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, Path]:
    """Write ``length_<S>_ctx.onnx`` and the binary that each of them names.

    Args:
        graphs: Static graphs by length.
        folder: Where to; exists.
        chips: One, or several for one binary that holds the code of all.
        share_weights: Whether the lengths share one binary. Such a one, and one for several
            chips, loads on a device only.
        tell: Told the graphs done and their total.

    Returns:
        The graphs that hold binaries, by length.

    Raises:
        ExportError: QNN cannot compile a graph, or fell over it, or made something for
            another chip.
        OSError: the disk is full.
    """
    outputs = {length: folder / f"length_{length}_ctx.onnx" for length in graphs}
    lengths = list(graphs)
    batches = [lengths] if share_weights else [[length] for length in lengths]
    done = 0
    for batch in batches:
        tell(done, len(graphs))
        _compile([(graphs[n], outputs[n]) for n in batch], chips, share_weights=share_weights)
        for length in batch:
            _check(outputs[length], chips)
        done += len(batch)
    tell(done, len(graphs))
    return outputs


def _compile(
    graphs: Sequence[tuple[Path, Path]], chips: Sequence[Chip], *, share_weights: bool
) -> None:
    job = {
        "graphs": [[str(source), str(output)] for source, output in graphs],
        "soc_models": [chip.soc_model for chip in chips],
        "share_weights": share_weights,
    }
    code, said = _run_child([sys.executable, "-m", _CHILD, json.dumps(job)])
    if code == 0:
        return
    if _is_full(graphs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = lines[-1] if lines else "it said nothing"
    if code != FAILED:
        reason = f"{_ending(code)} after: {reason}"
    names = ", ".join(source.name for source, _ in graphs)
    raise ExportError(
        f"QNN cannot compile {names} for {' and '.join(chip.name for chip in chips)} ({reason}): "
        "try another --htp-precision or a shorter --htp-context-length"
    )


def _is_full(graphs: Sequence[tuple[Path, Path]]) -> bool:
    """Whether a binary, which holds the weights, has no room; QNN does not say why it failed."""
    source, output = graphs[0]
    needed = sum(path.stat().st_size for path in source.parent.iterdir() if path.is_file())
    return shutil.disk_usage(output.parent).free < needed


def _run_child(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr of a process that ends when this one does."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        assert child.stderr is not None
        try:
            said = child.stderr.read()
        except BaseException:
            child.kill()
            raise
    return child.returncode, said


def _ending(code: int) -> str:
    """How a process ended that was not meant to."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        memory = ", as when memory runs out," if name == "SIGKILL" else ""
        return f"it was ended by {name}{memory}"
    return f"it ended with code {code}"


def _check(output: Path, chips: Sequence[Chip]) -> None:
    try:
        for chip in chips:
            check_context_binary(output, chip, qnn_version=installed_qnn_version())
    except BundleError as error:
        raise ExportError(f"QNN did not make what it was asked for: {error}") from error
