"""Calls in a section, between a marker and a closing one, each with markers of its own: as DeepSeek and Kimi K2 write.

DeepSeek V3 and R1 have the arguments in a fenced block, V3.1 and later bare. Kimi has an id with the name in it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Final

from gateway.tool_parsers.call_grammar import bare_name, marker, quoted, schema
from gateway.tool_parsers.json_calls import read_named_call
from gateway.tool_parsers.scanner import Scan, Scanner
from gateway.tool_parsers.tool_format import CallDelimiters, ToolFormat
from gateway.tool_parsers.tool_schema import FunctionSpec, arguments

FENCE: Final = "```json"
FENCE_END: Final = "```"

_HEAD: Final = re.compile(r"[^<]*")
_LINE: Final = re.compile(r"[^\n]*")
_KIMI_ID: Final = re.compile(r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*")


@dataclass(frozen=True, slots=True)
class SectionMarkers:
    """`separator` stands between a call's name and its arguments."""

    begin: str
    end: str
    call: str
    separator: str
    call_end: str


_DEEPSEEK: Final = SectionMarkers(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
_KIMI: Final = SectionMarkers(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)


def _sectioned(
    name: str,
    markers: SectionMarkers,
    read_call: Callable[[Scanner, Collection[str]], Scan[bool]],
    write_call: Callable[[FunctionSpec], tuple[str, str]],
    between: str = "",
) -> ToolFormat:
    """`read_call` reads a call of a tool with one of these names, behind its opening marker; false: it is none.
    `write_call` gives the Lark expressions before and behind the separator; `between` is one that stands before the
    opening marker of every call but the first."""

    def read(scanner: Scanner, functions: Mapping[str, FunctionSpec]) -> Scan[None]:
        while (yield from scanner.read_text_until(markers.begin)) is not None:
            called = False
            while True:
                yield from scanner.skip_blank()
                mark = yield from scanner.accept(markers.call, markers.end)
                if mark != markers.call or not (yield from read_call(scanner, functions)):
                    break
                called = True
            if mark == markers.end and called:
                scanner.discard()

    def delimiters(tokens: Mapping[str, int]) -> CallDelimiters:
        call = marker(markers.call, tokens)
        begin, end = marker(markers.begin, tokens), marker(markers.end, tokens)
        return CallDelimiters(mark=begin, first=call, between=f"{between} {call}", last=end)

    def write(rule: str, function: FunctionSpec, tokens: Mapping[str, int]) -> list[str]:
        head, body = write_call(function)
        return [f"{rule}: {head} {marker(markers.separator, tokens)} {body} {marker(markers.call_end, tokens)}"]

    return ToolFormat(name=name, markers=frozenset(astuple(markers)), read=read, delimiters=delimiters, write=write)


def _read_deepseek(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    """Reads both forms of a call: the character behind the separator tells them apart."""
    name = yield from scanner.match(_HEAD)
    if name is None or not (yield from scanner.accept(_DEEPSEEK.separator)):
        return False
    yield from scanner.skip_blank()
    fenced = (yield from scanner.peek()) != "{"
    if fenced:
        name = yield from scanner.match(_LINE)
        yield from scanner.skip_blank()
        if name is None or not (yield from scanner.accept(FENCE)):
            return False
    called = yield from read_named_call(scanner, name.strip(), names)
    if called:
        yield from scanner.skip_blank()
        if fenced:
            yield from scanner.accept(FENCE_END)
        yield from _read_call_end(scanner, _DEEPSEEK.call_end)
    return called


def _read_kimi(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    id = _KIMI_ID.fullmatch((yield from scanner.match(_HEAD)) or "")
    if id is None or not (yield from scanner.accept(_KIMI.separator)):
        return False
    called = yield from read_named_call(scanner, id[1], names)
    if called:
        yield from _read_call_end(scanner, _KIMI.call_end)
    return called


def _read_call_end(scanner: Scanner, marker: str) -> Scan[None]:
    """Passes over the marker behind a call, which some models forget."""
    yield from scanner.skip_blank()
    if (yield from scanner.accept(marker)):
        scanner.discard()


def _write_deepseek(function: FunctionSpec) -> tuple[str, str]:
    """name<｜tool▁sep｜>{…}"""
    return quoted(bare_name(function)), schema(arguments(function))


def _write_deepseek_fenced(function: FunctionSpec) -> tuple[str, str]:
    """function<｜tool▁sep｜>name, and a fenced block of JSON"""
    name = quoted(f"{bare_name(function)}\n{FENCE}\n")
    return '"function"', f"{name} {schema(arguments(function))} {quoted(chr(10) + FENCE_END)}"


def _write_kimi(function: FunctionSpec) -> tuple[str, str]:
    name = quoted(f"functions.{bare_name(function)}:")
    return f"{name} /[0-9]{{1,3}}/", schema(arguments(function))


DEEPSEEK: Final = _sectioned("deepseek", _DEEPSEEK, _read_deepseek, _write_deepseek)
DEEPSEEK_FENCED: Final = _sectioned("deepseek_fenced", _DEEPSEEK, _read_deepseek, _write_deepseek_fenced, '"\\n"')
KIMI: Final = _sectioned("kimi", _KIMI, _read_kimi, _write_kimi)
