"""A model's chat template: from its folder, in jinja2's immutable sandbox, under limits of time and of what it builds.

It knows jinja and nothing of tokens. Text of a request is only ever data here, never a template.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S_MAX = 1.0
TEXT_CHARS_MAX = 32 << 20  # of one text that a template builds
_OPERAND_MAX = 100_000
_WIDTH_MAX = 999  # that a text is filled up to, or shifted by
_INDENT_MAX = 16
_ITEMS_MAX = 1 << 20
# Fields of more digits than that, or whose width is an argument.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")


# What a template's own code can raise.
_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, MemoryError, RecursionError),
)


class TemplateError(ValueError):
    """The template cannot be used, or refused these messages; the message says which and why."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, with which some templates mark what the model writes: just its body."""

    tags = {"generation"}  # noqa: RUF012  jinja's own spelling

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with what would build something huge refused before it does: one operation has no time limit."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _bounded_filter(name, filter) for name, filter in self.filters.items()}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if isinstance(left, str):
                _check_join("", (left, right))
            case "+" if isinstance(left, list | tuple) and len(left) + len(right) > _ITEMS_MAX:
                raise SecurityError(f"a list of over {_ITEMS_MAX} items")
            case "%" if isinstance(left, str):
                _check_form(_WIDE_PERCENT, left)
            case "*" | "**":
                sizes = [len(side) if isinstance(side, str | list | tuple) else abs(side) for side in (left, right)]
                if max(sizes) > _OPERAND_MAX or (operator == "**" and right > 64):
                    raise SecurityError(f"{operator} of operands over {_OPERAND_MAX}")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **named: Any) -> Any:
        """Calls any method, macro or function, with texts' methods checked before."""
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_text(method.__name__, owner, args, named)
        return super().call(context, obj, *args, **named)


def _bounded_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)  # and so what jinja wants to be passed
    def bounded(*args: Any, **named: Any) -> Any:
        arguments = args[1:] if hasattr(filter, "jinja_pass_arg") else args
        match arguments:
            case [str(text), *rest]:
                _check_text(name, text, rest, named)
            case [_, int(count), *_] if name in ("batch", "slice") and count > _ITEMS_MAX:
                raise SecurityError(f"a list of over {_ITEMS_MAX} items")
            case [list(items) | tuple(items), *rest] if name == "join" and "attribute" not in named:
                _check_join(str(rest[0] if rest else named.get("d", "")), items)
        return filter(*args, **named)

    return bounded


def _check_text(name: str, text: str, args: Iterable[Any], named: Mapping[str, Any]) -> None:
    """Checks a method or filter of a text. Raises SecurityError where the result would be huge."""
    values = [*args, *(value for option, value in named.items() if not option.startswith("_"))]  # jinja's own are not
    match name, values:
        case "format" | "format_map", _:
            _check_form(_WIDE_FIELD, text)
            _check_form(_WIDE_PERCENT, text)
        case "replace", [str(old), str(new), *_] if len(text) + text.count(old) * len(new) > TEXT_CHARS_MAX:
            raise SecurityError(f"a text of over {TEXT_CHARS_MAX} characters")
        case "join", [list(items) | tuple(items)]:
            _check_join(text, items)
        case "center" | "ljust" | "rjust" | "zfill" | "expandtabs" | "indent" | "wordwrap", _:
            if any(isinstance(value, int) and value > _WIDTH_MAX for value in values):
                raise SecurityError(f"a width of over {_WIDTH_MAX}")


def _check_form(wide: re.Pattern[str], form: str) -> None:
    if wide.search(form):
        raise SecurityError(f"a width of over {_WIDTH_MAX}")


def _check_join(between: str, items: Iterable[Any]) -> None:
    size = sum(len(between) + (len(item) if isinstance(item, str) else 0) for item in items)
    if size > TEXT_CHARS_MAX:
        raise SecurityError(f"a text of over {TEXT_CHARS_MAX} characters")


def _concatenated(*items: Any) -> str:
    """`a ~ b`."""
    texts = [str(item) for item in items]
    _check_join("", texts)
    return "".join(texts)


class _Concatenations(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        concatenated = nodes.Name("__concatenated__", "load")
        return nodes.Call(concatenated, node.nodes, [], None, None).set_lineno(node.lineno)


class ChatTemplate:
    """One compiled chat template. `render` may be called from several threads at once."""

    def __init__(self, source: str, *, today: Callable[[], datetime] = datetime.now) -> None:
        """Raises TemplateError where the source is no template."""
        sandbox = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], autoescape=False
        )
        sandbox.filters["tojson"] = _tojson
        sandbox.globals["raise_exception"] = _refuse
        sandbox.globals["strftime_now"] = lambda form: today().strftime(form)
        del sandbox.globals["lipsum"]
        try:
            tree = sandbox.parse(source)
            self.names = meta.find_undeclared_variables(tree) - sandbox.globals.keys()  # what a request may fill
            self.keys = frozenset(_looked_up(tree))
            _Concatenations().visit(tree)
            _tick_in_loops(tree)
            self._template = sandbox.from_string(tree)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from error
        self.source = source

    def render(self, variables: Mapping[str, Any], seconds: float = RENDER_S_MAX) -> str:
        """The conversation as the model reads it. Raises TemplateError where the template refuses the messages (its
        `raise_exception`), fails on them, or has not ended after `seconds` of processor time."""
        deadline = time.thread_time() + seconds

        def tick() -> str:
            if time.thread_time() > deadline:
                raise SecurityError(f"not done after {seconds:g} s")
            return ""

        try:
            return self._template.render({**variables, "__tick__": tick, "__concatenated__": _concatenated})
        except _Refused as refused:
            raise TemplateError(f"the model's chat template refuses these messages: {refused.message}") from refused
        except _FAILURES as error:
            raise TemplateError(f"the model's chat template cannot render these messages: {error}") from error


class _Refused(jinja2.TemplateError):
    pass


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as model folders expect it: no HTML escapes. Never ASCII only, so that escaped characters can be found."""
    if isinstance(indent, int) and indent > _INDENT_MAX:
        raise SecurityError(f"an indent of over {_INDENT_MAX}")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _looked_up(tree: nodes.Template) -> Iterator[str]:
    """The keys of objects that the template reads: `message.content`, `message['content']`, `'name' in tool`."""
    for attribute in tree.find_all(nodes.Getattr):
        yield attribute.attr
    for item in tree.find_all(nodes.Getitem):
        yield from (constant.value for constant in item.arg.find_all(nodes.Const) if isinstance(constant.value, str))
        if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str):
            yield item.arg.value
    for compared in tree.find_all(nodes.Compare):
        if isinstance(compared.expr, nodes.Const) and isinstance(compared.expr.value, str):
            yield compared.expr.value


def _tick_in_loops(tree: nodes.Template) -> None:
    """Lets every turn of a loop and every call of a macro look at the clock: nothing else in a template can be long."""
    blocks: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for block in blocks:
        call = nodes.Call(nodes.Name("__tick__", "load"), [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(call).set_lineno(block.lineno))
