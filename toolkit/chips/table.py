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

_NEAR_SKU = re.compile(r"(sm\d{4})a[a-d]")
"""A part number with the suffix of a speed bin, such as SM8750-AC."""
_BRANDS = ("qualcomm", "snapdragon", "dragonwing")
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


def all_chips() -> tuple[Chip, ...]:
    """Every chip of the table, the best known first; those too old for the NPU too."""
    return _load()[0]


def sources() -> dict[str, str]:
    """What the sources of the table are."""
    return dict(_load()[1])


def find_chip(name: str) -> Chip:
    """The chip of that name, part number or soc_model.

    Case, spaces, hyphens and brand names do not matter. A speed bin's suffix may follow a
    part number; where chips have one soc_model the first of them is meant.

    Raises:
        ConfigError: no such chip (near ones are listed), or one whose NPU is too old.
    """
    wanted = _plain(name)
    chips = _by_name()
    chip = chips.get(wanted)
    if chip is None and (bin_of := _NEAR_SKU.fullmatch(wanted)):
        chip = chips.get(bin_of[1])
    if chip is None:
        raise ConfigError(
            f"no chip {name!r} is known{_near(wanted)}: "
            "`omnidraft-npu devices` lists every name that can be given"
        )
    if chip.is_too_old:
        raise ConfigError(
            f"{chip.name} is too old: its NPU is Hexagon v{chip.arch} and the HTP backend of QNN "
            f"needs v{OLDEST_ARCH}, so models run on its CPU; leave it out"
        )
    return chip


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9+]", "", name.lower())
    for brand in _BRANDS:
        plain = plain.removeprefix(brand)
    return plain.removesuffix("forgalaxy")


def _near(wanted: str) -> str:
    """Chips with a similar name, for an error."""
    chips = _by_name()
    close = difflib.get_close_matches(wanted, chips, n=2 * _NUM_NEAR, cutoff=0.6)
    close += [name for name in chips if wanted and name.startswith(wanted[:4])]
    keys = list(dict.fromkeys(chips[name].key for name in close if not chips[name].is_too_old))
    return f"; near it are {', '.join(keys[:_NUM_NEAR])}" if keys else ""


@functools.cache
def _by_name() -> dict[str, Chip]:
    names: dict[str, Chip] = {}
    for chip in all_chips():
        for name in (chip.key, chip.name, *chip.aliases):
            names.setdefault(_plain(name), chip)
    for chip in all_chips():
        names.setdefault(str(chip.soc_model), chip)
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
