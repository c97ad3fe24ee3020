"""Which chip this machine has, as far as its operating system says."""

import re
import sys
from pathlib import Path

from ..chips.table import Chip, chip_named

_BOARD = Path("/sys/devices/soc0/machine")
_PROCESSOR = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def find_this_chip() -> Chip | None:
    """The chip of this machine, which may be too old; None where it is none of the table."""
    return chip_in(_description())


def chip_in(description: str) -> Chip | None:
    """The first chip that a description such as a processor's name mentions."""
    parts = [part.strip() for part in description.split(" - ")]
    words = re.findall(r"[A-Za-z]+[0-9][A-Za-z0-9]{3,}(?:-[A-Za-z0-9]+)?", description)
    for name in (*words, *(re.sub(r"\(\w+\)", "", part) for part in parts)):
        if (chip := chip_named(name)) is not None:
            return chip
    return None


def _description() -> str:
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _PROCESSOR) as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
        except OSError:
            return ""
    try:
        return _BOARD.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
