"""Streams of every dialect: written as a string of bytes says, and read back by a reader that follows the standard for
server-sent events and knows nothing of the writers."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.api.dialect import GenerationRequest
from gateway.http import sse
from gateway.inference.reply import Reply, RunningUsage, ToolUse, Usage
from tests.fuzz.bodies import DIALECTS, MODEL, SCHEMA

USER: Final = [{"role": "user", "content": "hi"}]
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
STREAMED: Final[dict[str, dict[str, Any]]] = {
    "/run": {"model": MODEL.name, "input": {"messages": USER, "tools": TOOLS, "stream": True}},
    "/v1/chat/completions": {
        "model": MODEL.name,
        "messages": USER,
        "tools": TOOLS,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"model": MODEL.name, "prompt": "hi", "stream": True},
    "/v1/responses": {
        "model": MODEL.name,
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}],
        "stream": True,
    },
    "/v1/messages": {
        "model": MODEL.name,
        "messages": USER,
        "max_tokens": 2000,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stream": True,
    },
}
# What has a meaning in events, in JSON or on a line, and what is more than one byte.
PIECES: Final = [
    "a", "\n", "\r", "\r\n", "\n\n", "\x00", "\x85", "\u2028", "\u2029", "\x1b", "\x7f", "\ufeff", "�", '"', "\\",
    "\\n", "data: ", "data: [DONE]\n\n", "event: x\n", ":", ": ping\n\n", "[DONE]", "{", "}", '","p":"', "</a>", "é",
    "東", "😀", "👩‍👩‍👧", "\U0010ffff", " ", "  ", "\t", "id: 1\n", "retry: 0\n", "null", "\u0301",
]  # fmt: skip


@dataclass
class Told:
    """What a stream is about."""

    text: str = ""
    thought: str = ""
    calls: list[str] = field(default_factory=list)  # their arguments


def reply_of(path: str) -> Reply:
    asked = DIALECTS[path](json.dumps(STREAMED[path]).encode(), b"", None, 7)
    assert isinstance(asked, GenerationRequest)
    return asked.reply(MODEL.name, "0000-id", 1_800_000_000, sse.paddings())


def written(path: str, data: bytes) -> tuple[bytes, Told]:
    """A whole stream: thoughts where a dialect has a place for them, then text, then calls, each in pieces."""
    reply, told = reply_of(path), Told()
    events = [reply.begin(RunningUsage(5, 2))]
    speaks = path != "/v1/completions"
    pieces, which = _cut(data), 0
    for kind, text in pieces:
        which = max(which, kind) if speaks else 1
        if which == 0:
            told.thought += text
            events.append(reply.thought(0, text))
        elif which == 1:
            told.text += text
            events.append(reply.text(0, text, []))
        else:
            arguments = json.dumps({text: text})
            told.calls.append(arguments)
            number = len(told.calls) - 1
            events.append(reply.call(0, number, ToolUse(f"call_{number}", "f", "")))
            half = len(text) % len(arguments)
            events += [reply.arguments(0, number, part) for part in (arguments[:half], arguments[half:]) if part]
            events.append(reply.called(0, number, ToolUse(f"call_{number}", "f", arguments)))
    reason = "tool_calls" if told.calls else "stop"
    events.append(reply.finish(0, reason, None))
    events.append(reply.end(Usage(5, 7, 2, 0.25, {"neurons_per_day": 1.5})))
    return b"".join(events), told


def _cut(data: bytes) -> list[tuple[int, str]]:
    """A piece for each four bytes or so: the first says what it is, the others what is in it."""
    return [
        (data[at] % 7 // 3, "".join(PIECES[byte % len(PIECES)] for byte in data[at + 1 : at + 2 + data[at] % 4]) or "b")
        for at in range(0, min(len(data), 200), 4)
    ]


def events_of(stream: bytes) -> list[tuple[str, str]]:
    """Kind and data of each event, as a browser reads them: lines end with CRLF, LF or CR, and an empty one ends an
    event; a colon begins a comment."""
    lines = stream.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert lines[-1] == "", "the last event is not ended"
    events, kind, data = [], "message", []
    for line in lines[:-1]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line == "":
            if data:
                events.append((kind, "\n".join(data)))
            kind, data = "message", []
        elif name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        else:
            assert name == "", f"a line of no known field: {line!r}"
    assert not data
    return events


def read(path: str, stream: bytes) -> Told:
    """What a client makes of it. Each event is one line of JSON, or the end."""
    told, events = Told(), events_of(stream)
    assert stream.count(b"data: ") >= len(events)
    if path != "/v1/messages" and path != "/v1/responses":
        assert events[-1] == ("message", "[DONE]")
        events = events[:-1]
    for kind, data in events:
        assert "\n" not in data
        document = json.loads(data)
        assert kind in ("message", document.get("type"))
        _take(path, document, told)
    return told


def _take(path: str, document: dict[str, Any], told: Told) -> None:
    match path:
        case "/run":
            told.text += document["response"]
            told.thought += document.get("reasoning_content", "")
            told.calls += [json.dumps(call["arguments"]) for call in document.get("tool_calls", [])]
        case "/v1/chat/completions":
            for choice in document["choices"]:
                delta = choice["delta"]
                told.text += delta.get("content") or ""
                told.thought += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls", []):
                    told.calls += [""] * (call["index"] + 1 - len(told.calls))
                    told.calls[call["index"]] += call["function"].get("arguments", "")
        case "/v1/completions":
            told.text += "".join(choice["text"] for choice in document["choices"])
        case "/v1/responses":
            match document["type"]:
                case "response.output_text.delta":
                    told.text += document["delta"]
                case "response.reasoning_text.delta":
                    told.thought += document["delta"]
                case "response.function_call_arguments.done":
                    told.calls.append(document["arguments"])
        case "/v1/messages":
            delta = document.get("delta", {})
            told.text += delta.get("text", "")
            told.thought += delta.get("thinking", "")
            if document["type"] == "content_block_start" and document["content_block"]["type"] == "tool_use":
                told.calls.append("")
            if "partial_json" in delta:
                told.calls[-1] += delta["partial_json"]


def check(path: str, data: bytes) -> None:
    stream, told = written(path, data)
    assert read(path, stream) == told
