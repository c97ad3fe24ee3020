"""The machine type of a shared library or program, read from its header."""

import struct
import sysconfig
from pathlib import Path

_ELF = {0x3E: "x86_64", 0xB7: "arm64", 0x28: "arm", 0x03: "x86", 0xA4: "hexagon"}
_PE = {0x8664: "x86_64", 0xAA64: "arm64", 0xA641: "arm64ec", 0x14C: "x86", 0x1C4: "arm"}
_PROCESS = {"amd64": "x86_64", "aarch64": "arm64", "armv7l": "arm", "win32": "x86"}


def machine_of(path: Path) -> str | None:
    """`x86_64`, `arm64` and so on; None for a file that is no ELF or PE file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if head[:4] == b"\x7fELF" and len(head) >= 20:
            order = ">" if head[5] == 2 else "<"
            (machine,) = struct.unpack_from(f"{order}H", head, 18)
            return _ELF.get(machine, f"ELF machine {machine:#x}")
        if head[:2] == b"MZ" and len(head) == 64:
            (offset,) = struct.unpack_from("<I", head, 60)
            file.seek(offset)
            mark = file.read(6)
            if mark[:4] == b"PE\0\0" and len(mark) == 6:
                (machine,) = struct.unpack_from("<H", mark, 4)
                return _PE.get(machine, f"PE machine {machine:#x}")
    return None


def is_cut_short(path: Path) -> bool:
    """Whether a 64-bit ELF file ends before its table of sections does; loading one crashes.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02" or len(head) < 64:
            return False
        order = ">" if head[5] == 2 else "<"
        (start,) = struct.unpack_from(f"{order}Q", head, 40)
        size, count = struct.unpack_from(f"{order}2H", head, 58)
        return bool(file.seek(0, 2) < start + size * count)


def process_machine() -> str:
    """What this process can load: the machine type that its Python was built for."""
    name = sysconfig.get_platform().rpartition("-")[2].lower()
    return _PROCESS.get(name, name)


def is_loadable(machine: str | None, process: str) -> bool:
    """Whether a process of one machine type can load a library of another."""
    return machine == process or (machine, process) == ("arm64ec", "x86_64")
