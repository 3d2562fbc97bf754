"""The official SDKs, unchanged, and chat completions, completions and `/ai/run`; what the model says is the test's."""

import json
from pathlib import Path
from typing import Any

from cloudflare import AsyncCloudflare
from openai import AsyncOpenAI

from engine.protocol.types import GrammarKind
from gateway.settings.config import ModelEntryConfig
from tenants.records.limits import Limits
from tests.support.sdks import Weather, client_of, script, talking
from tests.support.served_gateway import looped, served
from tests.support.stub_replica import MODEL

HELLO: Any = [{"role": "user", "content": "hello"}]
RAIN: Any = {
    "type": "function",
    "function": {
        "name": "rain",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SUN: Any = {"type": "function", "function": {"name": "sun", "parameters": {"type": "object"}}}
ROME, OSLO = [json.dumps({"name": "rain", "arguments": {"city": city}}) for city in ("Rome", "Oslo")]


@looped
async def test_calls_come_whole_and_as_the_helpers_events(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, f"{ROME}\n{OSLO}")
        asked: Any = {"model": MODEL, "messages": HELLO, "tools": [RAIN]}
        said = (await client.chat.completions.create(**asked)).choices[0]
        assert (said.finish_reason, said.message.content) == ("tool_calls", None)
        calls: Any = said.message.tool_calls
        assert [call.function.arguments for call in calls] == ['{"city": "Rome"}', '{"city": "Oslo"}']
        assert len({call.id for call in calls}) == 2
        async with client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        streamed: Any = final.message.tool_calls
        assert [call.function.name for call in streamed] == ["rain", "rain"]
        assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]
        deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert len(deltas) > 4, "arguments come piece by piece"


@looped
async def test_a_conversation_with_calls_goes_on_in_both_spellings(tmp_path: Path) -> None:
    """The assistant's turn as the SDK gives it back, with the tool's answer to its id; natively without one."""
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, ROME)
        asked: Any = {"model": MODEL, "tools": [RAIN]}
        first = (await client.chat.completions.create(**asked, messages=HELLO)).choices[0].message
        assert first.tool_calls is not None
        answer: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "dry"}
        turns: Any = [*HELLO, first, answer]
        script(gateway, "It is dry.")
        second = await client.chat.completions.create(**asked, messages=turns)
        assert second.choices[0].message.content == "It is dry."
        spoken = gateway.fleet.submits[-1].tokens
        native: Any = [
            *HELLO,
            {"role": "assistant", "tool_calls": [{"name": "rain", "arguments": {"city": "Rome"}}]},
            {"role": "tool", "name": "rain", "content": "dry"},
        ]
        assert (await gateway.run(messages=native, tools=[RAIN["function"]])).json["result"]["response"]
        assert gateway.fleet.submits[-1].tokens == spoken


@looped
async def test_a_required_call_is_held_to_its_tools(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, ROME)
        asked: Any = {"model": MODEL, "messages": HELLO, "tools": [RAIN, SUN]}
        choices: list[tuple[Any, set[str]]] = [
            ("required", {"rain", "sun"}),
            ({"type": "function", "function": {"name": "rain"}}, {"rain"}),
        ]
        for choice, mentioned in choices:
            await client.chat.completions.create(**asked, tool_choice=choice)
            grammar = gateway.fleet.submits[-1].grammar
            assert grammar is not None
            assert {name for name in ("rain", "sun") if f'\\"{name}\\"' in grammar.source} == mentioned
        await client.chat.completions.create(**asked, tool_choice="auto")
        assert gateway.fleet.submits[-1].grammar is None
        prompts = {len(submit.tokens) for submit in gateway.fleet.submits}
        assert len(prompts) == 1, "the model is told of the same tools"
        await client.chat.completions.create(**asked, tool_choice="none")
        assert len(gateway.fleet.submits[-1].tokens) < min(prompts)


@looped
async def test_one_call_alone_ends_an_answer_that_may_hold_no_more(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, f"{ROME}\n{OSLO} and much more that nobody reads")
        asked: Any = {"model": MODEL, "messages": HELLO, "tools": [RAIN], "parallel_tool_calls": False}
        said = await client.chat.completions.create(**asked)
        assert said.choices[0].finish_reason == "tool_calls"
        calls: Any = said.choices[0].message.tool_calls
        assert [call.function.arguments for call in calls] == ['{"city": "Rome"}']
        await gateway.settled()
        assert said.usage is not None
        assert said.usage.completion_tokens < len(gateway.behaviour.script or [])
        pieces = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        assert [chunk.choices[0].finish_reason for chunk in pieces][-1] == "tool_calls"
        assert not any(chunk.choices[0].delta.content for chunk in pieces)


@looped
async def test_an_answer_is_parsed_into_the_callers_own_type(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, '{"city": "Rome", "rain": false}')
        said = await client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Weather)
        assert said.choices[0].message.parsed == Weather(city="Rome", rain=False)
        grammar = gateway.fleet.submits[-1].grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.JSON_SCHEMA
        assert set(json.loads(grammar.source)["properties"]) == {"city", "rain"}


@looped
async def test_a_native_document_is_an_object_and_its_stream_text(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        script(gateway, '{"city": "Rome", "big": 12345678901234567890}')
        asked: Any = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"type": "object"}}}
        async with client_of(AsyncCloudflare, gateway.base_url, gateway.token) as cloud:
            said: Any = await cloud.ai.run(MODEL, account_id=gateway.account_id, extra_body=asked)
            assert said["response"] == {"city": "Rome", "big": 12345678901234567890}
        streamed = await gateway.run(**asked, stream=True)
        text = "".join(event["response"] for event in streamed.events[:-1])
        assert json.loads(text) == said["response"]


@looped
async def test_128_choices_are_drawn_shown_and_charged(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "n": 128}
        said = await client.chat.completions.create(**asked)
        assert [choice.index for choice in said.choices] == list(range(128))
        assert said.usage is not None
        assert said.usage.completion_tokens == 512
        finished = set()
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            finished |= {choice.index for choice in chunk.choices if choice.finish_reason == "length"}
        assert finished == set(range(128))
        await gateway.settled()
        assert [record.completion_tokens for record in await gateway.records()] == [512, 512]


@looped
async def test_all_choices_at_their_longest_are_reserved(tmp_path: Path) -> None:
    """A budget of one choice's tokens ends each of several early, as the price of all of them says."""
    async with talking(AsyncOpenAI, tmp_path, limits=Limits(neurons_per_day=5)) as (_, client):
        said = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1000, n=10)
        assert {choice.finish_reason for choice in said.choices} == {"quota"}
        assert said.usage is not None
        assert said.usage.completion_tokens <= 5000 / 4


@looped
async def test_the_best_of_several_completions_is_shown(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        said = await client.completions.create(model=MODEL, prompt="hello", best_of=5, n=2, max_tokens=3, echo=True)
        assert [choice.index for choice in said.choices] == [0, 1]
        assert all(choice.text.startswith("hello") for choice in said.choices)
        assert said.usage is not None
        assert said.usage.completion_tokens == 15
        assert gateway.fleet.submits[-1].sampling.logprobs == 0
        ids = [1000, 1001, 1002]
        told = await client.completions.create(model=MODEL, prompt=ids, max_tokens=1, logprobs=2)
        assert told.usage is not None
        assert told.usage.prompt_tokens == 3
        assert told.choices[0].logprobs is not None


@looped
async def test_a_template_gets_the_variables_that_it_knows(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    ember = Path(__file__).parents[3] / "engine" / "builtin_model"
    for name in ("config.json", "tokenizer.json"):
        (folder / name).symlink_to(ember / name)
    (folder / "chat_template.jinja").write_text(
        "{% if not messages %}{{ raise_exception('x') }}{% endif %}"
        "{% if not enable_thinking %}quiet {% endif %}{{ reasoning_effort }} {{ messages[0].content }}"
    )
    async with talking(AsyncOpenAI, tmp_path, models=[ModelEntryConfig(name=MODEL, folder=str(folder))]) as (
        gateway,
        client,
    ):
        model = gateway.app._serving.endpoint.catalogue.find(MODEL)
        assert model is not None
        for asked, text in (
            ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}, "low hello"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "quiet  hello"),
            ({"chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": 1}}, "high hello"),
        ):
            await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, extra_body=asked)
            assert gateway.fleet.submits[-1].tokens == array_of(model.tokenizer.encode_prompt(text))
        for name in ("messages", "tools", "add_generation_prompt", "raise_exception", "__tick__", "bos_token"):
            refused = await gateway.chat(chat_template_kwargs={name: "x"})
            assert refused.json["error"]["param"] == f"chat_template_kwargs.{name}"
            assert "enable_thinking, reasoning_effort" in refused.message


def array_of(ids: list[int]) -> bytes:
    return b"".join(id.to_bytes(4, "little") for id in ids)
