"""Lets atheris write completions for the parsers of all formats of calls, and for that of thoughts.

`python -m tests.fuzz.fuzz_calls -max_total_time=60`; other options are libFuzzer's. It fails with the input that broke
a parser, or that one read differently in other pieces.
"""

import sys

import atheris

with atheris.instrument_imports(include=["gateway.calls"]):
    from gateway.tool_parsers.reasoning import ReasoningParser
    from gateway.tool_parsers.registry import TOOL_FORMATS

from tests.support.call_reading import check, cut, parser, read
from tests.support.recorded_calls import RECORDED

NAMES = sorted(TOOL_FORMATS)
# What a byte from 128 on stands for: what parsers look for would take long to be found letter by letter.
WORDS = sorted(
    {marker for name in NAMES for marker in TOOL_FORMATS[name].markers}
    | {
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        "<think>",
        "</think>",
        "```json\n",
        "```",
        "functions.",
    }
    | {
        '{"name": "',
        '", "arguments": ',
        '"parameters": ',
        '{"city": "Rome"}',
        '"type": ',
        '"id": "',
        "get_weather",
        "now",
    }
    | {"city=", "days=", "\\u", "\\ud83d", "\\ude42", "true", "None", "é", "🙂", "\n</", "wind", "hours", "note", ":0"}
)


def completion(data: bytes) -> str:
    return "".join(chr(byte) if byte < 128 else WORDS[(byte - 128) % len(WORDS)] for byte in data)


def one(data: bytes) -> None:
    """The first byte chooses the format, the second the size of pieces; the third a recorded beginning, or none."""
    if len(data) < 3:
        return
    name = NAMES[data[0] % len(NAMES)]
    size = data[1] % 16 + 1
    begun = [recorded.completion for recorded in RECORDED if recorded.format == name]
    chosen = data[2] % (2 * len(begun))
    text = (begun[chosen][: data[1]] if chosen < len(begun) else "") + completion(data[3:])
    check(name, text, cut(text, size))
    opened = bool(data[1] & 16)
    whole = read(ReasoningParser(parser(name), opened), [text])
    assert read(ReasoningParser(parser(name), opened), cut(text, size)) == whole


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
