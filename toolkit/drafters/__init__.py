"""Drafters that ship with the package: Hugging Face folders that `distill` made."""

from pathlib import Path

DEFAULT_DRAFTER = "omnidraft-tiny"
"""Drafts for any target; its text was written by SmolLM2-135M-Instruct."""


def packaged_drafter(name: str) -> Path | None:
    """The folder of a drafter that ships with the package; None for any other name."""
    folder = Path(__file__).parent / name
    is_one = name == DEFAULT_DRAFTER and (folder / "config.json").is_file()
    return folder if is_one else None
