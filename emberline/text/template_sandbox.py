"""A sandboxed Jinja environment for chat templates of model files, which are untrusted, with bounded work and memory.

Limits of one rendering:
- work: every loop iteration, call and filter counts as one unit, and so do every 16 characters written to the output,
  to blocks, macros and variables (`work`). The processor time is checked each time (`seconds`).
- size: every text, list and number that an operator, literal, filter or call creates, including nested values, is
  bounded (`chars`, `items`, MAX_BITS). It is checked beforehand where a result can be larger than its operands.
Not bounded is the time of one built-in operation on values within these sizes (a sort, a comparison): a few seconds.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from json import dumps
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BITS = 4096
MAX_WIDTH = 9_999  # of padding, indents and batches; range() has Jinja's own bound
CHARS_PER_WORK = 16

_WIDTHS = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "wordwrap", "zfill"}
)
MAX_TIME_FORMAT = 1000  # characters of a format for `strftime_now`
_WIDE_TIME = re.compile(r"%[-_0^#+]*\d{3}")  # a width of three digits, which the C library fills with spaces
_FORMATS = frozenset({"format", "format_map"})
# A width of five digits, or one that is an argument, in a format for % or for str.format.
_WIDE_FORMAT = re.compile(r"%[-+ #0]*(?:\*|\d{5}|\d*\.(?:\*|\d{5}))|\{[^{}]*\d{5}|\{[^{}]+\{")


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one rendering."""

    chars: int = 16 << 20  # of one text or nested value
    items: int = 1 << 20  # of one list
    work: int = 4_000_000
    seconds: float = 2.0


class TemplateLimit(TemplateError):
    """The template exceeded a limit."""


class TemplateRefusal(TemplateError):
    """The template called raise_exception: it rejects these messages."""


class _Budget(threading.local):
    """Operations and memory that the current rendering in this thread has used."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self.begin()

    def begin(self) -> None:
        """Start a rendering: nothing is used yet."""
        self.work = 0
        limit_s = self.limits.seconds
        self.clock_s, self.cpu_s = time.monotonic() + limit_s, time.thread_time() + limit_s  # when to stop
        self.weights: dict[int, tuple[object, int]] = {}  # by id; the reference keeps the id from being reused

    def spend(self, work: int) -> None:
        """Count work. Raises TemplateLimit if the rendering has used up its work or its time."""
        self.work += work
        if self.work > self.limits.work:
            raise TemplateLimit(f"it did more than {self.limits.work} steps")
        if time.monotonic() > self.clock_s and time.thread_time() > self.cpu_s:  # the first is cheaper to ask
            raise TemplateLimit(f"it ran for more than {self.limits.seconds} seconds")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders templates within `limits`. Threads may share it: each has a budget of its own."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=self._written,
        )
        self.limits = TemplateLimits() if limits is None else limits
        self.budget = _Budget(self.limits)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = self._tojson
        self.filters["_joined"] = lambda pieces: "".join(map(str, pieces))
        self.filters.update({name: self._bounded(name, function) for name, function in self.filters.items()})
        self.filters["_weighed"] = self._weighed
        self.filters["_counted"] = self._counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _instrument(tree)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.spend(1)
        receiver = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(receiver, str):
            self._check_growth(obj.__name__, (receiver, *args, *kwargs.values()))
        elif isinstance(obj, LoopContext) and args:  # a recursive loop goes another level down
            args = (self._counted(args[0], 0), *args[1:])
        return self._checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(1)
        if not (operator == "+" and type(left) is type(right) is str):  # nearly every operation of a template
            self._check_operands(operator, left, right)
            return self._weighed(super().call_binop(context, operator, left, right))
        if len(left) + len(right) >= self.limits.chars:
            raise TemplateLimit(f"it made a value of more than {self.limits.chars} characters")
        return left + right

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter with its work counted and its result checked. `wraps` keeps Jinja's pass_* attributes."""
        n_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(1)
            self._check_growth(name, (*args[n_passed:], *kwargs.values()))
            return self._checked(function(*args, **kwargs))

        return bounded

    def _check_operands(self, operator: str, left: Any, right: Any) -> None:
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TemplateLimit(f"it formats a text with a width above {MAX_WIDTH}")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if (
                    isinstance(value, str | list | tuple)
                    and isinstance(times, int)
                    and len(value) * times > self.limits.chars
                ):
                    raise TemplateLimit(f"it makes a value of more than {self.limits.chars} characters")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimit(f"it computes a number of more than {MAX_BITS} bits")

    def _check_growth(self, name: str, args: Sequence[Any]) -> None:
        """The first of `args` is the value that the filter or method is applied to."""
        if name in _WIDTHS and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args[1:]):
            raise TemplateLimit(f"it calls {name} with a number above {MAX_WIDTH}")
        if name in _FORMATS and _WIDE_FORMAT.search(str(args[0])):
            raise TemplateLimit(f"it formats a text with a width above {MAX_WIDTH}")
        if name in _GROWTH and len(args) > 1 and _GROWTH[name](args[0], *args[1:]) > self.limits.chars:
            raise TemplateLimit(f"{name} would make a text of more than {self.limits.chars} characters")

    def _checked(self, value: Any) -> Any:
        if isinstance(value, str):
            self.budget.spend(len(value) // CHARS_PER_WORK)
            if len(value) > self.limits.chars:
                raise TemplateLimit(f"it made a text of more than {self.limits.chars} characters")
        elif isinstance(value, list | tuple | dict) and len(value) > self.limits.items:
            raise TemplateLimit(f"it made a list of more than {self.limits.items} items")
        return value

    def _weighed(self, value: Any) -> Any:
        if self._weight(value) > self.limits.chars:
            raise TemplateLimit(f"it made a value of more than {self.limits.chars} characters")
        return value

    def _weight(self, value: Any) -> int:
        """Characters and items in a value, with repeated parts counted each time; cached by identity."""
        if isinstance(value, str):
            return len(value) + 1
        if not isinstance(value, list | tuple | dict):
            return 1
        known = self.budget.weights.get(id(value))
        if known is None:
            self.budget.spend(len(value))
            inner = value.values() if isinstance(value, dict) else value
            known = self.budget.weights[id(value)] = (value, 1 + len(value) + sum(map(self._weight, inner)))
        return known[1]

    def _counted(self, iterable: Any, n_literal: int) -> "_CountedIterable":
        """The iterable of a loop; each iteration costs one unit and the literal text in the loop's body."""
        return _CountedIterable(iterable, self.budget, 1 + max(n_literal, 0) // CHARS_PER_WORK)

    @pass_context
    def _written(self, context: Context, value: Any) -> str:
        """Counts the value of an expression that is written to the output, a block or a macro."""
        text = value if isinstance(value, str) else str(self._weighed(value))
        self.budget.spend(len(text) // CHARS_PER_WORK)
        return text

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Unlike Jinja's own, which escapes for HTML: models are trained on plain JSON."""
        plain = self._weighed(value)
        return dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _CountedIterable:
    """An iterable whose iterations count as work. It has a length if the wrapped iterable has one.

    Attribute names begin with an underscore, so that templates, which may get hold of it, cannot read them.
    """

    __slots__ = ("_budget", "_iterable", "_price")

    def __init__(self, iterable: Any, budget: _Budget, price: int) -> None:
        self._iterable = iterable
        self._budget = budget
        self._price = price

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._budget.spend(self._price)
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


class _GenerationTag(Extension):
    """`{% generation %}` marks generated text for training; here only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _instrument(node: nodes.Node) -> None:
    """Inserts the counting filters where a template can loop or grow without a call."""
    for field, child in node.iter_fields():
        if isinstance(child, nodes.Node):
            setattr(node, field, _instrumented(child))
        elif isinstance(child, list):
            child[:] = [_instrumented(item) if isinstance(item, nodes.Node) else item for item in child]
    if isinstance(node, nodes.For):
        n_literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, "_counted", nodes.Const(n_literal))


def _instrumented(node: nodes.Node) -> nodes.Node:
    _instrument(node)
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")
    literal = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    constant = all(isinstance(child, nodes.Const) for child in node.find_all(nodes.Expr))
    return _filtered(node, "_weighed") if literal and not constant else node


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _joined_length(one: Any, other: Any = "", *_: Any) -> int:
    """`join` is called on the separator as a method, on the pieces as a filter."""
    separator, pieces = (one, other) if isinstance(one, str) else (other, one)
    return _length(separator) * _length(pieces)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


def _longest(table: Any) -> int:
    """Upper bound of the characters that a table for `str.translate` makes of one."""
    values = table.values() if isinstance(table, dict) else table if isinstance(table, list | tuple) else ()
    return max((len(value) for value in values if isinstance(value, str)), default=1) or 1


# Upper bounds of results that can be larger than their operands.
_GROWTH: dict[str, Callable[..., int]] = {
    "replace": lambda text, old="", new="", *_: str(text).count(str(old)) * _length(new),
    "join": _joined_length,
    "translate": lambda text, table=None, *_: len(str(text)) * _longest(table),
    "indent": lambda text, width=4, *_: (
        (str(text).count("\n") + 1) * (width if isinstance(width, int) else _length(width))
    ),
}


def _strftime_now(form: object) -> str:
    text = str(form)
    if len(text) > MAX_TIME_FORMAT or _WIDE_TIME.search(text):
        raise TemplateLimit(f"it formats the time in more than {MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(text)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message)[:1000])
