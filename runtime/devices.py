"""Which graphs of a model are opened, and on what: the NPU, a simulator of one, or the CPU."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from omnidraft_npu.bundle import Bundle
from omnidraft_npu.chips.table import Chip, find_chip
from omnidraft_npu.config import Device, DeviceConfig
from omnidraft_npu.errors import BundleError, DeviceError
from omnidraft_npu.files import sha256_of
from omnidraft_npu.manifest import HtpEntry, ModelEntry
from omnidraft_npu.memory import require_memory
from omnidraft_npu.qnn.binary import (
    check_context_binary,
    installed_qnn_version,
    read_context_binary,
)
from omnidraft_npu.qnn.provider import HtpDevice, find_htp, open_qnn_session

from .causal_lm import MORE_ROOM, NO_MORE_ROOM, OnnxModel
from .model import Model
from .static_lm import StaticModel

logger = logging.getLogger(__name__)

_SIMULATED_CHIP = "x-elite"
"""What the simulator takes where neither the user nor the bundle names a chip."""

_ADDRESSES_OF_WEIGHTS = 1.75
"""Bytes of addresses that opening a CPU graph takes, by byte of its files (measured: 1.84)."""
_ADDRESSES_OF_TOKENIZER, _ADDRESSES_OF_THREADS = 10, 64 * 2**20
"""The same by byte of a tokenizer's file, and for threads and what else a conversation needs."""


@dataclass(frozen=True, kw_only=True)
class OpenedGraphs:
    """A model's graphs on a device."""

    graph: Model
    precision: str
    why_cpu: str | None = None
    """Why they are those of the CPU where `auto` had to choose them."""
    roomier: Callable[[], "OpenedGraphs"] | None = None
    """Opens the graph of the CPU where `auto` chose the NPU and the CPU's holds more tokens."""


def open_model_graphs(
    bundle: Bundle,
    entry: ModelEntry,
    device: Device,
    *,
    devices: DeviceConfig,
    threads: int | None = None,
    takes_turns: bool = True,
) -> OpenedGraphs:
    """Open a model on a device.

    Args:
        bundle: The bundle.
        entry: The model in it.
        device: Where it shall run; `auto` falls back to the CPU.
        devices: Says whether a simulator counts, and which chip.
        threads: Threads of one operator on the CPU.
        takes_turns: See `open_cpu_session`.

    Raises:
        DeviceError: `npu` was asked for and cannot be had.
        BundleError: the bundle has no graphs for the device, or not for this chip or QNN.
    """

    def open_on_cpu(why: str | None) -> OpenedGraphs:
        graph = entry.graphs.get("cpu")
        if graph is None:
            raise BundleError(
                f"{bundle.root}: {entry.name} has no CPU graph"
                f"{f', and {why}' if why else ''}: export it again"
            )
        _require_memory(bundle, entry, graph.path)
        opened = OnnxModel.open(
            bundle.path(graph.path),
            context_length=entry.context_length,
            vocab_size=entry.vocab_size,
            num_logits=entry.num_logits,
            cache=graph.cache,
            threads=threads,
            takes_turns=takes_turns,
            more_room=NO_MORE_ROOM if entry.is_as_long_as_can_be else MORE_ROOM,
        )
        _require_memory(bundle, entry, graph.path, opened)
        return OpenedGraphs(graph=opened, precision=graph.precision, why_cpu=why)

    if device == "cpu":
        return open_on_cpu(None)
    try:
        found = _open_on_htp(bundle, entry, devices)
    except (DeviceError, BundleError) as error:
        if device == "npu":
            raise
        is_no_news = isinstance(error, DeviceError) and _is_no_news(entry, devices)
        return open_on_cpu(None if is_no_news else str(error))
    room = found.graph.context_length
    if device == "npu" or "cpu" not in entry.graphs or entry.context_length <= room:
        return found
    why = f"the prompt is too long for the NPU's graphs, which hold {room} tokens"
    return replace(found, roomier=lambda: open_on_cpu(why))


def _require_memory(
    bundle: Bundle, entry: ModelEntry, path: str, opened: OnnxModel | None = None
) -> None:
    """Pass where a graph can be opened or, once it is, a conversation begun; else native code dies.

    Raises:
        ResourceError: there is too little memory.
    """
    files = bundle.manifest.files
    if opened is None:
        folder = path.rpartition("/")[0] + "/"
        weights = sum(file.size for name, file in files.items() if name.startswith(folder))
        sizes, smaller = (weights, int(_ADDRESSES_OF_WEIGHTS * weights)), "--precision int4"
    else:
        tokenizer = files.get(f"{entry.folder}/tokenizer.json")
        reserved = _ADDRESSES_OF_TOKENIZER * (0 if tokenizer is None else tokenizer.size)
        for one in opened.signature.cache_tensors:
            reserved += entry.context_length * one.num_heads * one.head_dim * one.dtype.itemsize
        sizes, smaller = (0, reserved + _ADDRESSES_OF_THREADS), "a smaller --context-length"
    require_memory(
        *sizes, f"opening {entry.name}", f"export a smaller model, or this one with {smaller}"
    )


def _open_on_htp(bundle: Bundle, entry: ModelEntry, config: DeviceConfig) -> OpenedGraphs:
    device = find_htp(simulate=config.simulate)
    htp = entry.htp
    if htp is None:
        raise BundleError(
            f"the bundle has no graphs of {entry.name} for the NPU: export it again with --soc"
        )
    chip = _choose_chip(htp, device, config.soc)
    if device.kind == "simulator" and chip.simulated is None:
        raise DeviceError(
            f"the simulator does not know {chip.name}: choose another chip with --soc"
        )
    pieces = _graph_paths(bundle, entry, htp, device, chip)
    if device.kind == "npu":
        _check_first_load(bundle, htp, chip)
    if htp.is_accurate is False:
        logger.warning(
            "the NPU's graphs of %s lose more than their recipe may; `omnidraft-npu inspect %s` "
            "shows what: export with another --htp-precision or --calibration",
            entry.name,
            bundle.root,
        )
    try:
        model = StaticModel.open(
            pieces,
            lambda path: open_qnn_session(path, soc_model=chip.soc_model, simulate=config.simulate),
            provider=device.describe(chip.soc_model),
            vocab_size=entry.vocab_size,
            sliding_window=htp.sliding_window,
        )
    except DeviceError as error:
        if chip.fp16 or _binaries(htp.pieces()[0].compiled, chip):
            raise
        raise BundleError(
            f"the NPU's graphs of {entry.name} are not made for {chip.name}, of which no source "
            f"claims that it computes in fp16, and QNN refuses them: export the bundle with "
            f"--soc {chip.key}"
        ) from error
    if model.context_length != htp.context_length:
        raise BundleError(
            f"{bundle.root}: the graphs of {entry.name} hold {model.context_length} tokens, the "
            f"manifest says {htp.context_length}: export the bundle again"
        )
    return OpenedGraphs(graph=model, precision=htp.precision)


def _graph_paths(
    bundle: Bundle, entry: ModelEntry, htp: HtpEntry, device: HtpDevice, chip: Chip
) -> list[dict[int, Path]]:
    """Graphs by length of each part, with context binaries where those for the chip can load."""
    pieces = []
    for piece in htp.pieces():
        paths = {int(length): bundle.path(path) for length, path in piece.graphs.items()}
        if device.kind == "npu" or htp.loads_on_simulator:
            made = _binaries(piece.compiled, chip)
            compiled = {int(length): bundle.path(path) for length, path in made.items()}
            _check_binaries(compiled, chip)
            if device.kind == "npu" and not compiled:
                logger.warning(
                    "the bundle has no binaries of %s for %s: QNN compiles its graphs now, which "
                    "takes a while; export it with --soc %s",
                    entry.name,
                    chip.name,
                    chip.key,
                )
            paths |= compiled
        pieces.append(paths)
    return pieces


def _check_first_load(bundle: Bundle, htp: HtpEntry, chip: Chip) -> None:
    """Load what is compiled for a chip elsewhere, if this machine never did: QNN may crash on it.

    Raises:
        DeviceError: it does.
    """
    from omnidraft_npu.qnn.first_load import check_first_load

    names = [name for piece in htp.pieces() for name in _binaries(piece.compiled, chip).values()]
    if not names:
        return
    graphs = [bundle.path(name) for name in names]
    files = {bundle.path(name): entry.sha256 for name, entry in bundle.manifest.files.items()}
    binaries = {read_context_binary(path).binary for path in graphs}
    digests = [files.get(path) or sha256_of(path) for path in binaries]
    check_first_load(graphs, digests, soc_model=chip.soc_model)


def _is_no_news(entry: ModelEntry, config: DeviceConfig) -> bool:
    """Whether the CPU is where a model was meant to run: no NPU can be here."""
    from omnidraft_npu.qnn.diagnosis import this_host

    return entry.htp is None and not config.simulate and not this_host().may_have_npu


def _choose_chip(htp: HtpEntry, device: HtpDevice, name: str | None) -> Chip:
    """The chip that was named, else this machine's, else the only one of the bundle."""
    compiled = htp.pieces()[0].compiled
    if name is not None:
        return find_chip(name)
    if device.kind == "npu":
        from omnidraft_npu.qnn.this_chip import find_this_chip

        if (this := find_this_chip()) is not None:
            if this.is_too_old:
                raise DeviceError(f"{this.why_too_old}: use the CPU")
            return this
    if len(compiled) == 1:
        return find_chip(next(iter(compiled)))
    if device.kind == "simulator":
        return find_chip(_SIMULATED_CHIP)
    raise DeviceError(
        "this machine does not say which chip it has: name it with --soc; the bundle is made for "
        f"{', '.join(compiled) or 'no chip in particular'}"
    )


def _binaries(compiled: Mapping[str, dict[str, str]], chip: Chip) -> dict[str, str]:
    """Those of the chip, or of one that QNN takes for the same."""
    same = (key for key in compiled if find_chip(key).soc_model == chip.soc_model)
    return compiled.get(chip.key) or compiled.get(next(same, ""), {})


def _check_binaries(compiled: Mapping[int, Path], chip: Chip) -> None:
    version = installed_qnn_version()
    for path in compiled.values():
        check_context_binary(path, chip, qnn_version=version)
