"""Every chip known, with where each fact comes from and where sources disagree."""

import difflib
import functools
import json
import re
from dataclasses import dataclass
from importlib import resources

from ..errors import ConfigError

OLDEST_ARCH = 68
"""Hexagon version from which QNN has an HTP that runs our graphs."""

_VARIANT = re.compile(r"([a-z]{2,3}\d{4})(?:[a-z]|a[a-d])")
"""A part number with the letter of a variant or a speed bin, such as SM8750P or SM8750-AC."""
_PC_SKU = re.compile(r"(x\d[ep])\d{5}")
"""The number of a model of a chip for PCs, such as X2E-88-100, and what names its family."""
_PC_FAMILIES = {"x1e": "xelite", "x1p": "xplus", "x2e": "x2elite"}
_BRANDS = ("qualcomm", "snapdragon", "dragonwing", "samsung", "arduino")
_BRACKETS = re.compile(r"\([^()]*\)\s*$")
"""As in `QCS8550 (Proxy)` and `Samsung Galaxy S25 (Family)`."""
_BOARD = re.compile(r"\s(?:adp|crd|evk|hdk|idp|mtp|qrd)\s*$", re.IGNORECASE)
"""A kind of board after the name of its chip, as in `Snapdragon X Elite CRD`."""
_NUM_NEAR = 5


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What the simulator's context binaries say of a soc_model."""

    name: str
    arch: int
    vtcm_mb: int


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, or several that QNN takes for one."""

    key: str
    """Short name, as in a bundle's folders: `x-elite`."""
    name: str
    aliases: tuple[str, ...]
    """Part numbers and other names, in lower case without spaces and hyphens."""
    soc_model: int
    """QNN's number for the chip."""
    arch: int
    """Hexagon version: 73 for v73."""
    fp16: bool | None
    """Whether the NPU computes in fp16; None where no source claims it."""
    weight_sharing: bool | None
    """Whether graphs of different lengths can share weights; None where no source claims it."""
    vtcm_mb: int | None
    """Memory on the NPU; None where the source does not say."""
    source: str
    """Key of `sources`."""
    simulated: Simulated | None
    """None where the simulator refuses the soc_model: nothing can be compiled for it here."""
    figures: tuple[str, ...]
    """Devices with this chip in the published figures."""
    notes: tuple[str, ...]
    """Disagreements between sources, and what else to know."""

    @property
    def context_limit_bytes(self) -> int:
        """The most that one context may allocate on the NPU.

        Source:
            `memory_alloc_limit` in context binaries of QNN 2.51.0, read for eleven chips.
        """
        return (2048 if self.arch < 73 else 3584) * 2**20

    @property
    def is_too_old(self) -> bool:
        """Whether its NPU is none that QNN's HTP backend knows."""
        return self.arch < OLDEST_ARCH

    @property
    def why_too_old(self) -> str:
        """What its NPU lacks, where it is too old."""
        return (
            f"{self.name} is too old: its NPU is Hexagon v{self.arch} and the HTP backend of QNN "
            f"needs v{OLDEST_ARCH}"
        )


def all_chips() -> tuple[Chip, ...]:
    """Every chip of the table, the best known first; those too old for the NPU too."""
    return _load()[0]


def sources() -> dict[str, str]:
    """What the sources of the table are."""
    return dict(_load()[1])


def find_chip(name: str) -> Chip:
    """The chip of that name, part number or soc_model, or of a device with published figures.

    Case, spaces, hyphens and brand names do not matter, nor do brackets and the kind of a board
    at the end. A letter after a part number means its family, and so does the number of a model
    of a chip for PCs; where chips have one soc_model the first of them is meant.

    Raises:
        ConfigError: no such chip (near ones are listed), or one whose NPU is too old.
    """
    chip = chip_named(name)
    if chip is None:
        raise ConfigError(
            f"no chip {name!r} is known{_near(_plain(name))}: "
            "`omnidraft-npu devices --verbose` lists every name that can be given"
        )
    if chip.is_too_old:
        raise ConfigError(f"{chip.why_too_old}, so models run on its CPU; leave it out")
    return chip


def chip_named(name: str) -> Chip | None:
    """The same, also where its NPU is too old; None where there is no such chip."""
    chips, wanted = _by_name(), _plain(name)
    if wanted not in chips:
        if found := _VARIANT.fullmatch(wanted):
            wanted = found[1]
        elif found := _PC_SKU.fullmatch(wanted):
            wanted = _PC_FAMILIES.get(found[1], wanted)
    if wanted in chips:
        return chips[wanted][0]
    same = (chip for chip in all_chips() if str(chip.soc_model) == name.strip())
    return next(same, None)


def _plain(name: str) -> str:
    name = _BOARD.sub("", _BRACKETS.sub("", name))
    plain = re.sub(r"[^a-z0-9+]", "", name.lower())
    for brand in _BRANDS:
        plain = plain.removeprefix(brand)
    return plain.removesuffix("forgalaxy")


def _near(wanted: str) -> str:
    """Chips with a similar name, for an error; the name too where the key does not tell it."""
    names = _by_name()
    close = difflib.get_close_matches(wanted, names, n=2 * _NUM_NEAR, cutoff=0.6)
    close += [name for name in names if wanted and name.startswith(wanted[:4])]
    near: dict[str, str] = {}
    for chip, name in (names[plain] for plain in close):
        if not chip.is_too_old:
            is_told = name in (chip.key, chip.name)
            near.setdefault(chip.key, chip.key if is_told else f"{chip.key} ({name})")
    return f"; near it are {', '.join([*near.values()][:_NUM_NEAR])}" if near else ""


@functools.cache
def _by_name() -> dict[str, tuple[Chip, str]]:
    """The chip of every plain name, with the name as the table has it."""
    names: dict[str, tuple[Chip, str]] = {}
    for chip in all_chips():
        for name in (chip.key, chip.name, *chip.aliases, *chip.figures):
            names.setdefault(_plain(name), (chip, name))
    return names


@functools.cache
def _load() -> tuple[tuple[Chip, ...], dict[str, str]]:
    path = resources.files(__package__) / "chips.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    chips = []
    for row in document["chips"]:
        tuples = {name: tuple(row[name]) for name in ("aliases", "figures", "notes")}
        simulated = Simulated(**row["simulated"]) if row["simulated"] else None
        chips.append(Chip(**{**row, **tuples, "simulated": simulated}))
    return tuple(chips), document["sources"]
