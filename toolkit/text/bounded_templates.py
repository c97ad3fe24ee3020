"""A jinja environment in which a template can neither run for long nor build anything large.

A template is a program of a stranger. The sandbox of jinja keeps it from the machine; here it is
kept from time and memory, within the process and without a thread, as every operation it has goes
through one of a few places: operators, calls, filters, tests, literals, loops and joins. Each of
them checks how large its result can become before it runs, and pays for what it reads and makes.
Since no value is ever larger than `Budget.most`, no single step takes long, and the steps stop
with the budget or the clock.
"""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from types import BuiltinMethodType, GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
"""Time of one rendering; published templates take milliseconds."""
MAX_SOURCE = 65_536
"""Characters of a template; the longest published ones have some 30,000."""

_MAX_BITS = 2**17
"""Of an integer that `*` or `**` gives."""
_MAX_NUMBER = 2**20
"""Of an argument that is a width, a count or a number of digits."""
_MAX_SLOW = 2**16
"""Characters that the filters get which are slow per character."""
_ELEMENT = 8

# Names no template can write, so that none of them can be called from outside.
_BUILT, _JOINED, _LOOPED = "a literal", "a join", "a loop"
_SIZED_BY_NUMBER = frozenset(
    [
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "to_bytes",
        "indent",
        "wordwrap",
        "round",
        "batch",
        "slice",
        "tojson",
    ]
)
_FORMATS = frozenset(("format", "format_map"))
_MULTIPLYING = _SIZED_BY_NUMBER | _FORMATS | {"join", "translate", "urlize", "xmlattr", "sum"}
# These look at no element, or at one.
_INSTANT = frozenset(
    [
        "length",
        "count",
        "first",
        "last",
        "default",
        "d",
        "get",
        "defined",
        "undefined",
        "none",
        "string",
        "mapping",
        "number",
        "integer",
        "float",
        "boolean",
        "true",
        "false",
        "iterable",
        "sequence",
        "callable",
        "sameas",
    ]
)
_SLOW = frozenset(["pprint", "striptags", "urlize", "wordwrap", "xmlattr"])


class TemplateLimitError(jinja2.TemplateError):
    """A template wants more time or memory than any needs."""


class Budget:
    """What one rendering may still spend, in characters read or made and elements visited."""

    def __init__(self, variables: object = None) -> None:
        """A new budget, larger for larger `variables`, which templates may copy and repeat."""
        self._weights: dict[int, tuple[object, int]] = {}
        weight = self.weigh(variables)
        self.most = 2**22 + 16 * weight
        """Weight of the largest value."""
        self._largest_product = 2**26 + 1024 * weight
        self._left = 2**27 + 256 * weight
        self._deadline = time.monotonic() + MAX_SECONDS

    def weigh(self, value: object) -> int:
        """Characters of a value, elements of a collection counted wherever they occur.

        Collections cannot be changed by a template, so each is looked through once.
        """
        if isinstance(value, str | bytes):
            return len(value) + 1
        if isinstance(value, int):
            return value.bit_length() // 8 + 1
        if isinstance(value, range):
            return _ELEMENT * len(value) + 1
        if not isinstance(value, Collection) or isinstance(value, jinja2.Undefined):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            weight = 1 + sum(_ELEMENT + self.weigh(part) for part in value)
            if isinstance(value, Mapping):
                weight += sum(map(self.weigh, value.values()))
            known = self._weights[id(value)] = (value, weight)
        return known[1]

    def spend(self, amount: int) -> None:
        """Pay for a step.

        Raises:
            TemplateLimitError: nothing is left of the budget or of the time.
        """
        self._left -= amount
        if self._left < 0 or time.monotonic() > self._deadline:
            raise TemplateLimitError(
                f"it takes more than {MAX_SECONDS:g} s or than any template's number of steps"
            )

    def allow(self, weight: int) -> None:
        """Pay for a value of `weight` that is about to be made."""
        if weight > self.most:
            raise TemplateLimitError(f"it makes a value of {weight:,} characters")
        self.spend(weight)

    def made(self, value: Any) -> Any:
        """`value`, paid for."""
        self.allow(self.weigh(value))
        return value

    def allow_call(self, name: str, value: object, arguments: list[Any]) -> None:
        """Pay for a filter or a method `name` of `value`, if it may have these `arguments`."""
        if name in _INSTANT:
            self.spend(1)
            return
        weight = self.weigh(value)
        reach = sum(map(self.weigh, arguments))
        if name in _SLOW and weight + reach > _MAX_SLOW:
            raise TemplateLimitError(f"it gives {weight + reach:,} characters to {name!r}")
        times = weight
        if name in _FORMATS and isinstance(value, str):
            times = self._fields(value, arguments)
        elif name == "sum" and any(isinstance(start, list | tuple) for start in arguments):
            reach += weight  # each sum is a new list
        elif name == "replace" and len(arguments) > 1 and isinstance(value, str):
            reach = self.weigh(arguments[1])
            times = 1 + value.count(str(arguments[0]))
        if name in _SIZED_BY_NUMBER:
            reach += sum(map(_checked_number, arguments))
        if (name in _MULTIPLYING or name == "replace") and times * reach > self._largest_product:
            raise TemplateLimitError(f"it makes {times * reach:,} characters with {name!r}")
        self.spend(weight + reach)

    def allow_operator(self, operator: str, left: object, right: object) -> None:
        """Pay for `left operator right`."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * right)
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
            elif isinstance(left, int) or isinstance(right, int):
                number, value = (left, right) if isinstance(left, int) else (right, left)
                assert isinstance(number, int)
                self.allow(self.weigh(value) * max(number, 1))
        elif operator == "+":
            self.allow(self.weigh(left) + self.weigh(right))
        elif isinstance(left, str):
            arguments = list(right) if isinstance(right, tuple) else [right]
            self.allow_call("format", left, arguments)

    def _fields(self, text: str, arguments: list[Any]) -> int:
        """How often a format may repeat its arguments; widths written in it are paid for."""
        if "*" in text or re.search(r":[^{}]*\{", text):  # widths that are arguments
            self.allow(sum(map(_checked_number, arguments)) * len(text))
        self.allow(sum(int(digits[:10]) for digits in re.findall(r"\d+", text)))
        return 1 + text.count("{") + text.count("%")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose every operation is paid for from `budget`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.budget = Budget()
        del self.globals["lipsum"]  # loops for as long as it is asked to, and no prompt needs it
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        filters: dict[str, Any] = {**self.filters}
        self.filters = {name: self._paid(name, f) for name, f in filters.items()}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: self._paid(name, f) for name, f in tests.items()}
        self.filters["tojson"] = self._paid("tojson", self._to_json)
        self.filters[_BUILT] = lambda value: self.budget.made(value)
        self.filters[_LOOPED] = self._looped
        self.filters[_JOINED] = pass_eval_context(lambda c, parts: self._joined(c, parts))

    def concat(self, parts: Iterable[str]) -> str:
        """All that a template, a macro or a block wrote."""
        kept, weight = [], 0
        for part in parts:
            weight += len(part) + 1
            if weight > self.budget.most:
                self.budget.allow(weight)
            self.budget.spend(1)
            kept.append(part)
        self.budget.allow(weight)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator that can make large values."""
        self.budget.allow_operator(operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a macro, a method or a global."""
        method = getattr(function, "__wrapped__", function)  # jinja wraps str.format
        if isinstance(method, BuiltinMethodType):
            args = tuple(map(self._drained, args))
            owner = getattr(method, "__self__", None)
            self.budget.allow_call(method.__name__, owner, [*args, *kwargs.values()])
        else:
            self.budget.allow(1 + sum(map(self.budget.weigh, (*args, *kwargs.values()))))
        return self.budget.made(super().call(context, function, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _PaidNodes().visit(tree)  # type: ignore[no-any-return]

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or a test that is paid for, given a context by jinja where it wants one."""
        is_given_context = hasattr(function, "jinja_pass_arg")

        @wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            head, values = (
                args[:is_given_context],
                list(map(self._drained, args[is_given_context:])),
            )
            kwargs = {key: self._drained(value) for key, value in kwargs.items()}
            arguments = [*values[1:], *kwargs.values()]
            self.budget.allow_call(name, values[0] if values else None, arguments)
            return self.budget.made(function(*head, *values, **kwargs))

        return paid

    def _drained(self, value: Any) -> Any:
        """All that a generator gives, so that its size is known; any other value as it is."""
        return list(self._looped(value)) if isinstance(value, GeneratorType) else value

    def _looped(self, value: Iterable[Any]) -> Iterator[Any]:
        for element in value:
            self.budget.spend(1)
            yield element

    def _to_json(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as a prompt wants it: jinja's own filter escapes HTML."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return encoder.encode(x) if indent is None else self.concat(encoder.iterencode(x))

    def _joined(self, context: nodes.EvalContext, parts: list[Any]) -> str:
        """What ``~`` gives."""
        self.budget.allow(sum(map(self.budget.weigh, parts)))
        return self.budget.made(  # type: ignore[no-any-return]
            (markup_join if context.autoescape else str_join)(parts)
        )


class _PaidNodes(NodeTransformer):
    """Passes what literals, ``~`` and loops are made of through a filter of ours."""

    def _visit_literal(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        return _filtered(node, _BUILT)

    visit_List = visit_Tuple = visit_Dict = _visit_literal  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filtered(node.iter, _LOOPED)
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is text like any."""

    tags: set[str] = {"generation"}  # noqa: RUF012, as jinja declares it

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict`, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace that shows nothing of what it holds, and takes no private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the private name {name!r}")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"it makes an integer of {bits:,} bits")


def _checked_number(value: object) -> int:
    """The size of an argument that is a width or a count; 0 for one that is none."""
    if not isinstance(value, int):
        return 0
    if abs(value) > _MAX_NUMBER:
        raise TemplateLimitError(f"it asks for a width or a count above {_MAX_NUMBER:,}")
    return abs(value)
