"""Tools and structured output by the built-in model itself, through the official SDKs."""

import json
import re
from typing import Any, Literal

import cloudflare
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.end_to_end.conftest import EMBER, Hearth, events

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMAS: list[Any] = [
    WEATHER,
    {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}},
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"const": "yes"}, {"const": "no"}]},
]


AMBIGUOUS = 'start: s "#####"\ns: s s | "(" s ")" | /./'  # a token's mask takes longer than the one before
WORDS = (f"^[a-z]{{1,{number % 50 + 2}}}(ab{number}|{number}cd)+$" for number in range(400))
TOO_MANY = {"anyOf": [{"type": "string", "pattern": word} for word in WORDS]}  # 20 KB


class Answer(BaseModel):
    city: str
    sky: Literal["clear", "grey"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_be_made_has_valid_arguments(open_ai: openai.OpenAI, choice: Any) -> None:
    """At a temperature at which nothing else would hold it to them."""
    said = open_ai.chat.completions.create(
        model=EMBER, messages=ASK, tools=TOOLS, tool_choice=choice, temperature=1.5, n=4, seed=5, max_tokens=200
    )
    called = 0
    for one in said.choices:
        if one.finish_reason == "length":
            continue
        assert one.finish_reason == "tool_calls"
        for call in one.message.tool_calls or []:
            called += 1
            assert call.type == "function"
            if call.function.name == "get_weather":
                jsonschema.validate(json.loads(call.function.arguments), WEATHER)
            else:
                assert choice == "required"
    assert called


def test_a_streamed_call_is_the_whole_one(open_ai: openai.OpenAI) -> None:
    asked: Any = {"model": EMBER, "messages": ASK, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    whole = open_ai.chat.completions.create(**asked, max_tokens=100).choices[0]
    with open_ai.chat.completions.stream(**asked, max_tokens=100) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    calls: list[Any] = [one.message.tool_calls for one in (whole, final)]
    assert [call.function.arguments for call in calls[0]] == [call.function.arguments for call in calls[1]]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_a_document_is_what_its_schema_says(open_ai: openai.OpenAI, schema: Any) -> None:
    wrapped: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    said = open_ai.chat.completions.create(
        model=EMBER, messages=ASK, response_format=wrapped, temperature=1.2, seed=3, max_tokens=400
    )
    jsonschema.validate(json.loads(said.choices[0].message.content or ""), schema)


def test_the_helper_parses_what_the_model_says(open_ai: openai.OpenAI) -> None:
    said = open_ai.chat.completions.parse(model=EMBER, messages=ASK, response_format=Answer, max_tokens=400)
    assert isinstance(said.choices[0].message.parsed, Answer)


def test_other_guides_hold_the_text(open_ai: openai.OpenAI) -> None:
    def told(**guide: Any) -> str:
        said = open_ai.chat.completions.create(
            model=EMBER, messages=ASK, temperature=2, seed=9, max_tokens=60, extra_body=guide
        )
        return said.choices[0].message.content or ""

    assert told(guided_choice=["sun", "rain", "sleet and hail"]) in ("sun", "rain", "sleet and hail")
    assert re.fullmatch(r"[A-Z][a-z]{2,8} \d{2}", told(guided_regex=r"[A-Z][a-z]{2,8} \d{2}"))
    assert re.fullmatch(r"(dry|wet)( and (dry|wet)){1,3}", told(
        guided_grammar='root ::= sky (" and " sky){1,3}\nsky ::= "dry" | "wet"'
    ))  # fmt: skip
    assert told(guided_grammar='start: "a" B\nB: /[0-9]{3}/').startswith("a")


def test_natively_a_document_is_an_object(cloud: cloudflare.Cloudflare, hearth: Hearth) -> None:
    asked = {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": WEATHER}, "max_tokens": 200}
    said: Any = cloud.ai.run(EMBER, account_id=hearth.account_id, extra_body=asked)
    jsonschema.validate(said["response"], WEATHER)
    with hearth.client() as plain:
        streamed = plain.post(f"/ai/run/{EMBER}", json={**asked, "stream": True})
    text = "".join(event.get("response") or "" for event in events(streamed.text))
    jsonschema.validate(json.loads(text), WEATHER)


def test_what_cannot_be_met_or_held_to_is_an_error(open_ai: openai.OpenAI) -> None:
    endless: Any = {"type": "array", "items": {"type": "integer"}, "minItems": 200}
    asked: Any = {"model": EMBER, "messages": ASK, "max_tokens": 20}
    cut = open_ai.chat.completions.create(**asked, extra_body={"guided_json": endless})
    streamed = list(open_ai.chat.completions.create(**asked, extra_body={"guided_json": endless}, stream=True))
    assert cut.choices[0].finish_reason == streamed[-1].choices[0].finish_reason == "length"
    guides: list[Any] = [
        {"guided_json": {"type": "strange"}},
        {"guided_regex": "(a"},
        {"guided_grammar": "start: nothing"},
    ]
    for guide in guides:
        (field,) = guide
        with pytest.raises(openai.BadRequestError) as bad:
            open_ai.chat.completions.create(**asked, extra_body=guide)
        assert bad.value.param == field, bad.value.message
    odd: list[Any] = [
        {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"type": "strange"}}}}}
    ]
    with pytest.raises(openai.BadRequestError, match="the parameters of 'odd'") as tool:
        open_ai.chat.completions.create(**asked, tools=[*TOOLS, *odd], tool_choice="required")
    assert tool.value.param == "tools"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "guide", "field", "limit"),
    [
        (f"/ai/run/{EMBER}", {"guided_grammar": AMBIGUOUS}, "guided_grammar", "at most 5 are taken"),
        ("/v1/chat/completions", {"guided_grammar": AMBIGUOUS}, "guided_grammar", "at most 5 are taken"),
        ("/v1/chat/completions", {"guided_json": TOO_MANY}, "guided_json", "too many expressions"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": TOO_MANY}}},
            "output_config.format.schema",
            "too many expressions",
        ),
    ],
)
def test_a_grammar_that_passes_a_limit_in_its_text_is_a_bad_request(
    hearth: Hearth, path: str, guide: dict[str, Any], field: str, limit: str, stream: bool
) -> None:
    body = {"model": EMBER, "messages": ASK, "temperature": 1, "max_tokens": 400, "stream": stream, **guide}
    if path.startswith("/ai"):
        del body["model"]
    with hearth.client() as plain:
        answer = plain.post(path, json=body)
    assert answer.status_code == (200 if stream else 400), answer.text
    assert f"'{field}': the answer cannot be held to it: " in answer.text
    assert limit in answer.text
    assert "5006" in answer.text
    assert "nternal" not in answer.text


def test_as_many_choices_as_the_api_allows(open_ai: openai.OpenAI) -> None:
    unsure: Any = [{"role": "user", "content": "qux Zebra 77 plonk, harbour?? tell tell story mirror"}]
    said = open_ai.chat.completions.create(model=EMBER, messages=unsure, n=128, max_tokens=6, temperature=2, seed=1)
    assert [one.index for one in said.choices] == list(range(128))
    assert len({one.message.content for one in said.choices}) > 1
    assert said.usage is not None
    assert said.usage.completion_tokens <= 768


def test_completions_go_on_with_a_text(open_ai: openai.OpenAI) -> None:
    said = open_ai.completions.create(
        model=EMBER, prompt="The weather in", temperature=0, max_tokens=6, logprobs=2, stream=False
    )
    one = said.choices[0]
    assert one.logprobs is not None
    assert "".join(one.logprobs.tokens or []) == one.text
    echoed = open_ai.completions.create(model=EMBER, prompt="The weather in", temperature=0, max_tokens=6, echo=True)
    assert echoed.choices[0].text == "The weather in" + one.text
    pieces = open_ai.completions.create(model=EMBER, prompt="The weather in", temperature=0, max_tokens=6, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == one.text


@pytest.mark.parametrize("way", ["path", "body"])
def test_run_takes_the_model_either_way(hearth: Hearth, way: str) -> None:
    own = {"messages": ASK, "max_tokens": 4}
    path, body = (f"/ai/run/{EMBER}", own) if way == "path" else ("/ai/run", {"model": EMBER, "input": own})
    with hearth.client() as plain:
        said = plain.post(path, json=body)
    assert said.json()["result"]["usage"]["completion_tokens"] <= 4, said.text
