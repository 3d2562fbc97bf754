"""A model's chat template: from its folder, in jinja2's immutable sandbox, under a time limit.

It knows jinja and nothing of tokens. What a request says is only ever data here, never a template.
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_S_MAX = 1.0
_OPERAND_MAX = 100_000


class TemplateError(ValueError):
    """The template cannot be used, or refused these messages; the message says which and why."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, with which some templates mark what the model writes: just its body."""

    tags = {"generation"}  # noqa: RUF012  jinja's own spelling

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with `*` and `**` refused where they would build something huge."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else abs(side) for side in (left, right)]
        if max(sizes) > _OPERAND_MAX or (operator == "**" and right > 64):
            raise SecurityError(f"{operator} of operands over {_OPERAND_MAX}")
        return super().call_binop(context, operator, left, right)


class Template:
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
            _tick_in_loops(tree)
            self._template = sandbox.from_string(tree)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from error
        self.source = source

    def render(self, variables: Mapping[str, Any], seconds: float = RENDER_S_MAX) -> str:
        """The conversation as the model reads it. Raises TemplateError where the template refuses the messages (its
        `raise_exception`), fails on them, or has not ended after `seconds`."""
        deadline = time.monotonic() + seconds

        def tick() -> str:
            if time.monotonic() > deadline:
                raise SecurityError(f"not done after {seconds:g} s")
            return ""

        try:
            return self._template.render({**variables, "__tick__": tick})
        except _Refused as refused:
            raise TemplateError(f"the model's chat template refuses these messages: {refused.message}") from refused
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
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
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _tick_in_loops(tree: nodes.Template) -> None:
    """Lets every turn of a loop and every call of a macro look at the clock: nothing else in a template can be long."""
    blocks: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for block in blocks:
        call = nodes.Call(nodes.Name("__tick__", "load"), [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(call).set_lineno(block.lineno))
