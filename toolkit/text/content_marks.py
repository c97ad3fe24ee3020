"""Which characters of a rendered template are content, so that none of them is a control token.

A rendered template is one text: that ``<|im_end|>`` in it was typed by the user is lost. Hence
the template is rendered a second time, with the content marked where it spells a control token or
could complete one, and the marks show where that content went. They must not change what the
template does with it, which is checked: without the marks both texts have to be equal.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..documents import shown_value
from ..errors import PromptError

_OPEN, _CLOSE = "qJv0zXk", "kXz0vJq"
_FIRST_PRIVATE = 0x100000
_LAST_PRIVATE = 0x10FFFD

Values = Mapping[str, Any]
Render = Callable[[Values], str]


@dataclass(frozen=True, kw_only=True)
class MarkedText:
    """A rendered template."""

    text: str
    content: frozenset[int]
    """Places of characters that come from content; no control token may cover one."""


def render_marked(render: Render, values: Values, control_tokens: Sequence[str]) -> MarkedText:
    """What `render` makes of `values`, with the places of content that matter.

    Args:
        render: Gives the text for values of the same shape.
        values: Messages, tools and all else that is content, as JSON would hold it.
        control_tokens: The texts that mean something to the model.

    Raises:
        PromptError: from `render`; or the template changes content which spells a control
            token in a way that does not show where it went.
    """
    text = render(values)
    finder = _Finder(control_tokens)
    strings = list(_strings(values))
    if not any(finder.places(string) for string in strings):
        return MarkedText(text=text, content=frozenset())
    replaced = _Replaced(finder, [text, *strings])
    with contextlib.suppress(PromptError):  # a template may refuse what it does not know
        found = render(_mapped(values, replaced.marked))
        if (marked := replaced.restored(found)).text == text:
            return marked
        wrapped = _Wrapped(finder)
        marked = wrapped.restored(render(_mapped(values, wrapped.marked)))
        # Marks of letters could be lost while what they mark is kept: then one more is unmarked.
        if marked.text == text and finder.unmarked(marked) == len(finder.spelled(found)):
            return marked
    spelled = next((s for string in strings for s in finder.spelled(string)), "a part of one")
    raise PromptError(
        f"the prompt spells the control token {shown_value(spelled)}, and the model's chat "
        "template rewrites such text: leave it out, or use --parse-special to send it as that token"
    )


class _Finder:
    """Finds where a string spells a control token, or begins or ends within one."""

    def __init__(self, control_tokens: Sequence[str]) -> None:
        longest_first = sorted(filter(None, control_tokens), key=len, reverse=True)
        whole = "|".join(map(re.escape, longest_first))
        self._whole = re.compile(f"(?=({whole}))" if whole else "(?!)")
        # A part of a word is no sign: any text may end in "s".
        parts = [(t[:i], t[i:]) for t in longest_first for i in range(1, len(t))]
        self._heads = tuple({head for head, _ in parts if not head.isalnum()})
        self._tails = tuple({tail for _, tail in parts if not tail.isalnum()})

    def places(self, string: str) -> list[tuple[int, int]]:
        """Begin and end of every control token; of one character at an end that is part of one."""
        places = {found.span(1) for found in self._whole.finditer(string)}
        ends = []
        if string.rstrip().endswith(self._heads):
            ends.append(len(string.rstrip()) - 1)
        if string.lstrip().startswith(self._tails):
            ends.append(len(string) - len(string.lstrip()))
        covered = {place for span in places for place in range(*span)}
        places |= {(place, place + 1) for place in ends if place not in covered}
        return sorted(places)

    def spelled(self, string: str) -> list[str]:
        """The control tokens in a string."""
        return [found[1] for found in self._whole.finditer(string)]

    def unmarked(self, marked: MarkedText) -> int:
        """How many control tokens have no mark on any of their characters."""
        spans = (found.span(1) for found in self._whole.finditer(marked.text))
        return sum(marked.content.isdisjoint(range(*span)) for span in spans)


class _Replaced:
    """Marks by another character in the middle: lengths, first and last characters stay."""

    def __init__(self, finder: _Finder, texts: Sequence[str]) -> None:
        self._finder = finder
        used = set().union(*texts)
        self._unused = (
            chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE) if chr(code) not in used
        )
        self._private: dict[str, str] = {}

    def marked(self, string: str) -> str:
        characters = list(string)
        for begin, end in self._finder.places(string):
            middle = (begin + end) // 2
            original = string[middle]
            if original not in self._private:
                self._private[original] = next(self._unused)
            characters[middle] = self._private[original]
        return "".join(characters)

    def restored(self, text: str) -> MarkedText:
        originals = {private: original for original, private in self._private.items()}
        content = frozenset(i for i, character in enumerate(text) if character in originals)
        restored = text.translate({ord(private): c for private, c in originals.items()})
        return MarkedText(text=restored, content=content)


class _Wrapped:
    """Marks by letters on both sides: the control token itself stays as it is."""

    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def marked(self, string: str) -> str:
        parts, done = [], 0
        for begin, end in self._finder.places(string):
            if begin >= done:
                parts += [string[done:begin], _OPEN, string[begin:end], _CLOSE]
                done = end
        return "".join(parts) + string[done:]

    def restored(self, text: str) -> MarkedText:
        """Only a pair around a whole control token, or around one character, is a mark."""
        kept: list[str] = []
        content: set[int] = set()
        length, opened = 0, -1
        for part in re.split(f"({_OPEN}|{_CLOSE})", text):
            if part == _OPEN:
                opened = length
            elif part == _CLOSE:
                inside = "".join(kept)[opened:] if opened >= 0 else ""
                if len(inside) == 1 or inside in self._finder.spelled(inside):
                    content |= set(range(opened, length))
                opened = -1
            else:
                kept.append(part)
                length += len(part)
        return MarkedText(text="".join(kept), content=frozenset(content))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A value with all its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(entry, change) for entry in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _strings(key)
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
