"""Answers in messages of several channels, as gpt-oss writes them: thoughts in `analysis`, what is for the reader in
`final` and `commentary`, and calls in `commentary` to a function.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

A chat of such a model is in this format whether or not it has tools. It knows no other.
"""

import re
from collections.abc import Mapping
from typing import Final

from engine.protocol.types import Grammar
from gateway.tool_parsers.call_grammar import bare_name, marker, quoted, schema
from gateway.tool_parsers.json_calls import read_named_call
from gateway.tool_parsers.reasoning import grammar_behind
from gateway.tool_parsers.scanner import Scan, Scanner, partial_marker_start
from gateway.tool_parsers.tool_format import CallDelimiters, ToolFormat
from gateway.tool_parsers.tool_schema import FunctionSpec, arguments

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
_START: Final = "<|start|>"
_CONSTRAIN: Final = "<|constrain|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_WORDS: Final = re.compile(r"[^<]*")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ASSISTANT: Final = "assistant"
_THOUGHTS: Final = "analysis"


def _read(scanner: Scanner, functions: Mapping[str, FunctionSpec]) -> Scan[None]:
    """Reads message after message. What has no header is text. A thought that comes behind text or a call is left out:
    there is no place for it in an answer."""
    answered = False
    while True:
        yield from scanner.skip_blank()
        header = yield from _header(scanner)
        if header is None and scanner.ended and scanner.pending.startswith("<|"):
            scanner.at = len(scanner.text)
            scanner.discard()  # a header that was cut
        if header is not None:
            scanner.discard()
            if f"{CHANNEL}{_THOUGHTS}" in header:
                if not (yield from _thought(scanner, shown=not answered)):
                    return
                continue
            answered = True
            recipient = _RECIPIENT.search(header)
            name = None if recipient is None else recipient[1]
            if name is not None and (yield from read_named_call(scanner, name, functions)):
                yield from scanner.skip_blank()
                if (yield from scanner.accept(*_ENDS)):
                    scanner.discard()
                continue
        answered = True
        if (yield from scanner.read_text_until(*_ENDS)) is None:
            return
        scanner.discard()


def _header(scanner: Scanner) -> Scan[str | None]:
    """All before a message's content. None: something else comes next."""
    header = ""
    while (mark := (yield from scanner.accept(_START, CHANNEL, _CONSTRAIN, MESSAGE))) != MESSAGE:
        words = None if mark is None else (yield from scanner.match(_WORDS))
        if words is None:
            return None
        header += f"{mark}{words}"
    return header


def _thought(scanner: Scanner, shown: bool) -> Scan[bool]:
    """Reads a thought; false where the text ends with it."""
    pass_on = scanner.emit_reasoning if shown else scanner.discard
    while True:
        ends = [(at, end) for end in _ENDS if (at := scanner.text.find(end, scanner.at)) >= 0]
        scanner.at = min(ends)[0] if ends else partial_marker_start(scanner.text, scanner.at, _ENDS)
        pass_on()
        if ends:
            scanner.at += len(min(ends)[1])
            scanner.discard()
            return True
        if not (yield from scanner.wait_text()):
            scanner.at = len(scanner.text)
            pass_on()
            return False


def _delimiters(tokens: Mapping[str, int]) -> CallDelimiters:
    """Without a mark: nobody can tell a call from a message by its first token."""
    return CallDelimiters(between=f'{marker(_ENDS[-1], tokens)} {marker(_START, tokens)} "{_ASSISTANT}"')


def _write(rule: str, function: FunctionSpec, tokens: Mapping[str, int]) -> list[str]:
    head = quoted(f"commentary to=functions.{bare_name(function)} ")
    channel, constrain, message = (marker(each, tokens) for each in (CHANNEL, _CONSTRAIN, MESSAGE))
    return [f'{rule}: {channel} {head} {constrain} "json" {message} {schema(arguments(function))}']


def _held(grammar: Grammar, tokens: Mapping[str, int], calls: bool) -> Grammar:
    """What an answer is held to, behind a thought that is free: calls, or else the content of the final message."""
    channel, message, end, start = (marker(each, tokens) for each in (CHANNEL, MESSAGE, _ENDS[0], _START))
    head = "" if calls else f'{channel} "final" {message}'
    thought = f'({channel} "{_THOUGHTS}" {message} free_thought)?'
    return grammar_behind(grammar, f"{thought} {head}", f'{end} {start} "{_ASSISTANT}"')


HARMONY: Final = ToolFormat(
    name="harmony", markers=frozenset({_START, CHANNEL, _CONSTRAIN, MESSAGE, *_ENDS}), read=_read,
    delimiters=_delimiters, write=_write, hold=_held,
)  # fmt: skip
