"""Anthropic's SDK, unchanged, and `/v1/messages` over a real socket; what the model says is the test's."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import ThreadUnsupportedRequestError

from tenants.records.limits import Limits
from tests.support.sdks import Weather, script, talking
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL

RAIN: Any = {"name": "rain", "input_schema": {"type": "object"}}
CALL = '{"name": "rain", "arguments": {"city": "Rome"}}'
HELLO: Any = {"role": "user", "content": "hello"}
ASKED: Any = {"model": MODEL, "max_tokens": 100, "messages": [HELLO]}


@looped
async def test_an_answer_and_its_stream_say_the_same_and_cost_what_they_say(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        script(gateway, "Hello, I am a stub.")
        gateway.behaviour.cached_tokens = 4
        whole = await client.messages.create(**ASKED, system="be brief")
        (block,) = whole.content
        assert block.type == "text"
        assert (block.text, whole.stop_reason, whole.model) == ("Hello, I am a stub.", "end_turn", MODEL)
        async with client.messages.stream(**ASKED, system="be brief") as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == block.text
        assert final.content[0].type == "text"
        assert final.content[0].text == text
        assert final.usage.model_dump(exclude={"neurons"}) == whole.usage.model_dump(exclude={"neurons"})
        assert whole.usage.cache_read_input_tokens == 4
        await gateway.settled()
        for record in await gateway.records():
            assert record.prompt_tokens == whole.usage.input_tokens + 4
            assert (record.completion_tokens, record.cached_tokens) == (whole.usage.output_tokens, 4)


@looped
async def test_a_stream_tells_at_once_what_the_prompt_cost(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        gateway.behaviour.cached_tokens = 4
        stream = await client.messages.create(**{**ASKED, "max_tokens": 2}, stream=True)
        first, *_, last, _ = [event async for event in stream]
        assert first.type == "message_start"
        assert last.type == "message_delta"
        assert first.message.usage.input_tokens == last.usage.input_tokens
        assert first.message.usage.cache_read_input_tokens == 4
        assert (last.usage.output_tokens, last.delta.stop_reason) == (2, "max_tokens")


@looped
async def test_the_credential_may_be_an_api_key_under_every_path(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        base = f"{gateway.base_url}/client/v4/accounts/{gateway.account_id}/ai"
        for one in (client, client.with_options(base_url=base)):
            assert (await one.messages.create(**{**ASKED, "max_tokens": 1})).usage.output_tokens == 1
        own = {"authorization": "", "x-api-key": gateway.token, "anthropic-version": "2023-06-01"}
        body = {**ASKED, "max_tokens": 1}
        assert (await gateway.call("/v1/messages", body, **own)).status == 200
        assert (await gateway.call("/v1/models", b"", "GET", **own)).status == 200
        for wrong, status in (("", 401), ("junk", 401)):
            answer = await gateway.call("/v1/messages", body, **{**own, "x-api-key": wrong})
            assert (answer.status, answer.json["type"], answer.json["request_id"]) == (
                *(status, "error"),
                answer.headers["x-request-id"],
            )
        both = await gateway.call("/v1/messages", body, **{**own, "authorization": "Bearer junk"})
        assert both.status == 401
        twice = await gateway.client()
        head = f"x-api-key: {gateway.token}\r\n" * 2
        twice.writer.write(f"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n{head}\r\n".encode())
        assert await twice.head() == 400


@looped
async def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        script(gateway, "one two three")
        said = await client.messages.create(**ASKED, stop_sequences=["nine", " three"])
        assert said.content[0].type == "text"
        assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("one two", "stop_sequence", " three")
        async with client.messages.stream(**ASKED, stop_sequences=[" three"]) as stream:
            final = await stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " three")
        assert final.content[0].to_dict() == said.content[0].to_dict()


@looped
async def test_a_tool_is_called_and_its_result_goes_back(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        script(gateway, CALL)
        said = await client.messages.create(**ASKED, tools=[RAIN])
        (call,) = said.content
        assert call.type == "tool_use"
        assert (call.name, call.input, said.stop_reason) == ("rain", {"city": "Rome"}, "tool_use")
        async with client.messages.stream(**ASKED, tools=[RAIN]) as stream:
            (streamed,) = (await stream.get_final_message()).content
        assert streamed.type == "tool_use"
        assert (streamed.name, streamed.input) == ("rain", {"city": "Rome"})
        script(gateway, "Dry.")
        results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "no"}]
        turns: Any = [HELLO, {"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
        then = await client.messages.create(**{**ASKED, "messages": turns}, tools=[RAIN])
        assert then.content[0].type == "text"
        assert then.content[0].text == "Dry."
        assert then.usage.input_tokens > said.usage.input_tokens


@looped
async def test_a_schema_is_parsed_into_its_type(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        script(gateway, '{"city": "Rome", "rain": false}')
        said = await client.messages.parse(**ASKED, output_format=Weather)
        assert said.parsed_output == Weather(city="Rome", rain=False)
        (submit,) = gateway.fleet.submits
        assert submit.grammar is not None
        assert set(json.loads(submit.grammar.source)["properties"]) == {"city", "rain"}
        asked = {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": Weather.model_json_schema()}}}
        for fields, reason in (({"max_tokens": 3}, "max_tokens"), ({"stop_sequences": ["Rome"]}, "stop_sequence")):
            assert (await client.messages.create(**{**asked, **fields})).stop_reason == reason


@looped
async def test_refusals_raise_the_classes_of_the_sdk(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path, limits=Limits(requests_per_minute=3, burst=3)) as (gateway, client):
        with pytest.raises(anthropic.BadRequestError, match="'temperature'"):
            await client.messages.create(**ASKED, extra_body={"temperature": 1.5})
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match="'thinking' is not known to the template"):
            await client.messages.create(**{**ASKED, "max_tokens": 2000}, thinking=thinking)
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        other = await gateway.accounts.create("other")
        away = client.with_options(base_url=f"{gateway.base_url}/client/v4/accounts/{other.id}/ai")
        with pytest.raises(anthropic.PermissionDeniedError):
            await away.messages.create(**ASKED)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve("batch_1")
        await client.messages.create(**{**ASKED, "max_tokens": 1}, thinking={"type": "disabled"})
        with pytest.raises(anthropic.RateLimitError) as limited:
            await client.messages.create(**ASKED)
        assert int(limited.value.response.headers["retry-after"]) >= 1
        await gateway.accounts.revoke(token.id)
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASKED)
    async with talking(AsyncAnthropic, tmp_path / "failing") as (gateway, client):
        gateway.behaviour.fail_at = 1
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.create(**ASKED)


@looped
async def test_the_sdks_threads_go_on_without_the_servers_help(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        with pytest.raises(ThreadUnsupportedRequestError):
            await client.beta.messages.create(**ASKED, thread={"type": "create"})

        @anthropic.beta_async_tool
        async def rain(city: str) -> str:
            """Whether it rains there."""
            script(gateway, f"Dry in {city}.")
            return "no"

        script(gateway, CALL)
        runner = client.beta.messages.tool_runner(**ASKED, tools=[rain])
        called, said = [message async for message in runner]
        assert called.stop_reason == "tool_use"
        assert said.content[0].type == "text"
        assert said.content[0].text == "Dry in Rome."


@looped
async def test_a_stream_that_fails_raises_its_error(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        gateway.behaviour.fail_at, gateway.behaviour.step_s = 3, 0.05
        stream = await client.messages.create(**ASKED, stream=True)
        assert (await anext(stream)).type == "message_start"
        with pytest.raises(anthropic.APIStatusError, match="the stub was told to fail") as failed:
            [event async for event in stream]
        body: Any = failed.value.body
        assert body["error"]["type"] == "api_error"


@looped
async def test_leaving_a_stream_stops_it_and_what_came_is_charged(tmp_path: Path) -> None:
    async with talking(AsyncAnthropic, tmp_path) as (gateway, client):
        gateway.behaviour.step_s = 0.01
        async with client.messages.stream(**{**ASKED, "max_tokens": 1000}) as stream:
            pieces = 0
            async for _ in stream.text_stream:
                pieces += 1
                if pieces == 3:
                    break
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.outcome == "client_gone"
        assert 3 <= record.completion_tokens < 1000


@looped
async def test_a_count_is_what_the_answer_is_charged_for_and_costs_a_request_alone(tmp_path: Path) -> None:
    limits = Limits(requests_per_minute=2, burst=2, neurons_per_day=100)
    async with talking(AsyncAnthropic, tmp_path, limits=limits) as (gateway, client):
        asked: Any = {"model": MODEL, "messages": [HELLO], "system": "be brief", "tools": [RAIN]}
        counted = await client.messages.count_tokens(**asked)
        said = await client.messages.create(**asked, max_tokens=1)
        assert counted.input_tokens == said.usage.input_tokens
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.count_tokens(**asked)
        await gateway.settled()
        (count,) = [record for record in await gateway.records() if not record.completion_tokens]
        assert (count.outcome, count.prompt_tokens, count.neurons) == ("done", 0, 0)
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        await gateway.accounts.revoke(token.id)
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.count_tokens(**asked)
