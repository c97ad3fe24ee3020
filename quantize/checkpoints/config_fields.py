"""Typed access to a configuration document that names the field in every complaint."""

from collections.abc import Iterator, Mapping
from typing import Any

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

TRY_OPTIMUM = "try --exporter optimum"

_LARGEST = 2**31 - 1
_FLOAT32 = (2.0**-126, 2.0**127)
"""Magnitudes that a float32 holds in full precision."""


class ConfigFields:
    """Fields of one JSON document; a field that is null counts as absent."""

    def __init__(
        self, document: Mapping[str, Any], source: str, *, other_way: str = TRY_OPTIMUM
    ) -> None:
        """Args: the document, its name, and what to do about a value that is not supported."""
        self._document = document
        self._other_way = other_way
        self.source = source
        """What to call the document in an error."""

    def __iter__(self) -> Iterator[str]:
        """Names of all fields."""
        return iter(self._document)

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, `default` where there is none."""
        value = self._document.get(name)
        return default if value is None else value

    def text(self, name: str) -> str:
        """A string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self._invalid(name, value, "text")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`, below 2**31."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._invalid(name, value, f"a whole number of at least {least}")
        if value > _LARGEST:
            raise self._invalid(name, value, f"a whole number of at most {_LARGEST}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above zero of a magnitude that float32 has."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _FLOAT32[0] <= value <= _FLOAT32[1]:
            raise self._invalid(name, value, "a number above zero")
        return float(value)

    def flag(self, name: str) -> bool:
        """A truth value, false where there is none."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self._invalid(name, value, "true or false")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A nested object, empty where there is none."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self._invalid(name, value, "an object")
        return value

    def unsupported(
        self, name: str, value: Any, meaning: str, *, other_way: str | None = None
    ) -> CheckpointError:
        """The error for a value that is valid but means `meaning`, which is not supported.

        Args:
            name: the field.
            value: what it holds.
            meaning: what that asks for, a noun in the singular.
            other_way: what to do; where it is None, what the document's own way out is.
        """
        return CheckpointError(
            f"{self.source}: {name} is {shown_text(repr(value))}: {meaning} is not supported; "
            f"{other_way or self._other_way}"
        )

    def _invalid(self, name: str, value: Any, wanted: str) -> CheckpointError:
        if value is None:
            return CheckpointError(
                f"{self.source}: {name} is missing, it should be {wanted}; get the file again"
            )
        return CheckpointError(
            f"{self.source}: {name} is {shown_text(repr(value))}, it should be {wanted}; "
            "get the file again"
        )
