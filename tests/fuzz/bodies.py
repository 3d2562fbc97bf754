"""Bodies for every dialect: whole ones, and what a string of bytes makes of them. What reads one may refuse it, and no
other error may come."""

import copy
import json
from typing import Any, Final

from gateway.api.dialect import GenerationRequest
from gateway.api.routes import dialect_routes
from gateway.catalogue.catalogue import Catalogue, UnknownModel, open_catalogue
from gateway.errors import ApiError
from gateway.http import sse
from gateway.inference.run_options import run_options
from gateway.settings.config import load_config
from gateway.text.tokenizer import TokenizationError

CATALOGUE: Final[Catalogue] = open_catalogue(load_config())
MODEL: Final = next(iter(CATALOGUE))
DIALECTS: Final = {path: route.dialect for path, route in dialect_routes(CATALOGUE).items()}
TURNS: Final = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is <|im_end|> in Köln?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": null}]}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "12 °C"},
    {"role": "user", "content": "Thanks 😀"},
]
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
TOOL: Final = {"name": "f", "description": "The weather", "parameters": SCHEMA}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
SAMPLING: Final = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "stop": ["a", "b"], "stream": True}
MORE: Final = {**SAMPLING, "top_k": 4, "min_p": 0.1, "seed": 7, "frequency_penalty": 1, "logit_bias": {"5": -1}, "n": 1}
# Some of each path, so that what is made of them is beyond the first check.
WHOLE: Final[dict[str, list[Any]]] = {
    "/run": [
        {"model": MODEL.name, "input": {"prompt": "hello", "raw": True, **MORE, "options": {"tags": ["a"]}}},
        {"model": MODEL.name, "input": {"messages": TURNS, "tools": [TOOL], "user": "u", "metadata": {"a": "b"}}},
        {
            "model": MODEL.name,
            "input": {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        },
    ],
    "/v1/chat/completions": [
        {"model": MODEL.name, "messages": TURNS, **MORE, "logprobs": True, "top_logprobs": 3},
        {
            "model": MODEL.name,
            "messages": TURNS,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": FORMAT,
            "chat_template_kwargs": {"enable_thinking": False},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ],
    "/v1/completions": [{"model": MODEL.name, "prompt": "Once", "echo": False, "logprobs": 2, **SAMPLING}],
    "/v1/embeddings": [{"model": MODEL.name, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2}],
    "/v1/rerank": [{"model": MODEL.name, "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}],
    "/v1/responses": [
        {
            "model": MODEL.name,
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "12"},
            ],
            "tools": [{"type": "function", **TOOL, "strict": False}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 9,
        },
        {"model": MODEL.name, "input": "hi", "stream": True},
    ],
    "/v1/responses/input_tokens": [{"model": MODEL.name, "input": "hi"}],
    "/v1/messages": [
        {
            "model": MODEL.name,
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "12"}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["a"],
            "stream": True,
        }
    ],
    "/v1/messages/count_tokens": [{"model": MODEL.name, "messages": [{"role": "user", "content": "hi"}]}],
}
# What JSON can hold in place of anything.
ODD: Final[list[Any]] = [
    None, True, False, 0, 1, -1, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**40, 0.0, -0.0, 0.5, 1e308, 5e-324, 1e16,
    "", " ", "a", "f", "0", "user", "tool", "function", "text", "auto", "required", "json_schema", "\x00", "\ud800",
    "\U0010ffff", "é", "<|im_start|>", "x" * 65, "x" * 513, "y" * 5000, [], {}, [[]], [{}], [None], {"": None},
    {"type": "text"}, {"type": "function"}, {"a": {"b": {"c": {}}}}, list(range(300)), {str(n): n for n in range(300)},
    SCHEMA, TOOL, FORMAT, TURNS, TURNS[1], TURNS[2],
]  # fmt: skip
KEYS: Final = ["a", "", "type", "name", "role", "content", "text", "n", "stream", "options", "seed", "\ud800", "x" * 99]
QUERIES: Final = [
    b"",
    b"tags=a,b",
    b"tags=%00",
    b"rejectIfBusy=true",
    b"requestTimeoutMs=5",
    b"queueRequest=true",
    b"&=&",
]


def made(data: bytes) -> tuple[str, bytes, bytes]:
    """Path, query and body. The first bytes choose a whole body, each three that follow change one place of it; an odd
    third byte has the rest follow as it is."""
    paths = sorted(WHOLE)
    head = data[:4].ljust(4, b"\0")
    path = paths[head[0] % len(paths)]
    body = copy.deepcopy(WHOLE[path][head[1] % len(WHOLE[path])])
    query, rest = QUERIES[head[2] // 2 % len(QUERIES)], data[4:]
    if head[2] % 2:
        return path, query, rest
    for at in range(0, len(rest) - 2, 3):
        body = _changed(body, *rest[at : at + 3])
    text = json.dumps(body, ensure_ascii=bool(head[3] & 1)).encode("utf-8", "surrogatepass")
    cut = head[3] >> 1
    return path, query, text[: len(text) - cut] if cut > 120 else text


def _changed(body: Any, where: int, how: int, what: int) -> Any:
    """One of all places, the body itself included, gets another value, is taken away, doubled, wrapped or renamed."""
    places = _places(body)
    holder, key = places[where % len(places)]
    value = copy.deepcopy(ODD[what % len(ODD)])
    if holder is None:
        return value if how % 8 == 0 else body
    match how % 6:
        case 0 | 1:
            holder[key] = value
        case 2:
            del holder[key]
        case 3:
            if isinstance(holder, list):
                holder.insert(key, value)
            else:
                holder[KEYS[what % len(KEYS)]] = holder[key]
        case 4:
            holder[key] = [holder[key]] * (what % 5)
        case 5:
            if isinstance(holder, dict):
                holder[KEYS[what % len(KEYS)]] = value
    return body


def _places(body: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = [(None, None)]
    waiting = [body]
    while waiting and len(found) < 256:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


def read(path: str, query: bytes, body: bytes) -> bool:
    """Whether it is what may be asked: then its text is encoded too. Any error but a refusal comes through; a model
    that is not there is one, which the caller puts into words."""
    try:
        run_options({}, query)
        asked = DIALECTS[path](body, query, None, 7)
        if not isinstance(asked, GenerationRequest):
            return True
        prompt, text = asked.prompt, MODEL.tokenizer
        options = {name: value for name, value in prompt.template_options.items() if name in text.template_options}
        if prompt.messages is not None and prompt.length < 4096:
            text.encode_chat(prompt.messages, prompt.tools, options=options)
        asked.reply(MODEL.name, "id", 7, sse.paddings())
    except ApiError as refusal:
        if not 400 <= refusal.status < 500 or not refusal.message:
            raise
        return False
    except (TokenizationError, UnknownModel):
        return False
    return True
