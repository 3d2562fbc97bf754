"""Calls in a section: a marker, calls with markers of their own, a closing marker. It knows no family's spellings."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Scan, Scanner, ScanningParser
from gateway.tool_parsers.tool_schema import FunctionSpec

# Reads one call of a tool with one of these names, behind its opening marker; false: it is no call.
CallReader = Callable[[Scanner, Collection[str]], Scan[bool]]


@dataclass(frozen=True, slots=True)
class SectionMarkers:
    """`separator` stands between a call's name and its arguments."""

    begin: str
    end: str
    call: str
    separator: str
    call_end: str

    @property
    def all(self) -> frozenset[str]:
        return frozenset({self.begin, self.end, self.call, self.separator, self.call_end})


def section_parser(
    markers: SectionMarkers, read_call: CallReader, functions: Mapping[str, FunctionSpec]
) -> ScanningParser:
    def read_one(scanner: Scanner) -> Scan[bool]:
        return read_call(scanner, functions)

    return ScanningParser(
        lambda scanner: json_calls.read_call_sections(scanner, markers.begin, markers.call, markers.end, read_one)
    )


def section_delimiters(
    markers: SectionMarkers, tokens: Mapping[str, int], between: str = ""
) -> call_grammar.CallDelimiters:
    """`between` is a Lark expression that stands before the marker of every call but the first."""
    call = call_grammar.marker(markers.call, tokens)
    return call_grammar.CallDelimiters(
        mark=call_grammar.marker(markers.begin, tokens),
        first=call,
        between=f"{between} {call}",
        last=call_grammar.marker(markers.end, tokens),
    )


def call_rule(rule: str, markers: SectionMarkers, tokens: Mapping[str, int], head: str, body: str) -> list[str]:
    """The Lark rule of a call: what stands before the separator, and what stands between it and the call's end."""
    separator, end = call_grammar.marker(markers.separator, tokens), call_grammar.marker(markers.call_end, tokens)
    return [f"{rule}: {head} {separator} {body} {end}"]


def read_call_end(scanner: Scanner, marker: str) -> Scan[None]:
    """Passes over the marker behind a call, which some models forget."""
    yield from scanner.skip_blank()
    if (yield from scanner.accept(marker)):
        scanner.discard()
