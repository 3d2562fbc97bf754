"""OpenAI's SDK, unchanged, and `/v1/responses` over a real socket; what the model says is the test's."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from engine.protocol.types import GrammarKind
from tenants.records.limits import Limits
from tests.support.sdks import Weather, script, talking
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL

RAIN: Any = {"type": "function", "name": "rain", "parameters": {"type": "object"}, "strict": None}
CALL = '{"name": "rain", "arguments": {"city": "Rome"}}'


@looped
async def test_an_answer_and_its_stream_say_the_same_and_cost_what_they_say(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, "Hello, I am a stub.")
        gateway.behaviour.cached_tokens = 4
        whole = await client.responses.create(model=MODEL, input="hello", instructions="be brief", metadata={"a": "b"})
        assert (whole.output_text, whole.status, whole.metadata) == ("Hello, I am a stub.", "completed", {"a": "b"})
        assert whole.usage is not None
        assert whole.usage.input_tokens_details.cached_tokens == 4
        async with client.responses.stream(model=MODEL, input="hello", instructions="be brief") as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert (text, final.output_text) == (whole.output_text,) * 2
        assert final.usage is not None
        assert final.usage.output_tokens == whole.usage.output_tokens
        await gateway.settled()
        for record in await gateway.records():
            assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (
                *(whole.usage.input_tokens, whole.usage.output_tokens),
                4,
            )


@looped
async def test_both_forms_of_the_path_lead_there(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        base = f"{gateway.base_url}/client/v4/accounts/{gateway.account_id}/ai/v1"
        for one in (client, client.with_options(base_url=base)):
            said = await one.responses.create(model=MODEL, input="hello", max_output_tokens=2)
            assert said.usage is not None
            assert said.usage.output_tokens == 2


@looped
async def test_an_answer_cut_by_max_output_tokens_is_incomplete(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (_, client):
        said = await client.responses.create(model=MODEL, input="hello", max_output_tokens=3)
        assert said.incomplete_details is not None
        assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        stream = await client.responses.create(model=MODEL, input="hello", max_output_tokens=3, stream=True)
        *_, last = [event async for event in stream]
        assert last.type == "response.incomplete"
        assert last.response.output_text == said.output_text


@looped
async def test_a_tool_is_called_and_its_result_goes_back(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, CALL)
        asked: Any = [{"role": "user", "content": "rain?"}]
        said = await client.responses.create(model=MODEL, input=asked, tools=[RAIN])
        (call,) = said.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), call.status) == ("rain", {"city": "Rome"}, "completed")
        async with client.responses.stream(model=MODEL, input=asked, tools=[RAIN]) as stream:
            events = [event async for event in stream]
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(pieces)) == {"city": "Rome"}
        script(gateway, "Dry.")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "no"}
        then = await client.responses.create(model=MODEL, input=[*asked, *said.output, result], tools=[RAIN])  # type: ignore[list-item]
        assert then.output_text == "Dry."
        assert then.usage is not None
        assert said.usage is not None
        assert then.usage.input_tokens > said.usage.input_tokens


@looped
async def test_a_schema_is_parsed_into_its_type(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        script(gateway, '{"city": "Rome", "rain": false}')
        said = await client.responses.parse(model=MODEL, input="rain?", text_format=Weather)
        assert said.output_parsed == Weather(city="Rome", rain=False)
        async with client.responses.stream(model=MODEL, input="rain?", text_format=Weather) as stream:
            assert (await stream.get_final_response()).output_parsed == Weather(city="Rome", rain=False)
        for submit in gateway.fleet.submits:
            assert submit.grammar is not None
            assert submit.grammar.kind is GrammarKind.JSON_SCHEMA
            assert set(json.loads(submit.grammar.source)["properties"]) == {"city", "rain"}
        format: Any = {"type": "json_schema", "name": "weather", "schema": Weather.model_json_schema()}
        cut = await client.responses.create(model=MODEL, input="rain?", text={"format": format}, max_output_tokens=3)
        assert cut.incomplete_details is not None
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@looped
async def test_log_probabilities_are_those_of_the_text(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (_, client):
        asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 4, "top_logprobs": 2}
        said = await client.responses.create(**asked, include=["message.output_text.logprobs"])
        (message,) = said.output
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert "".join(one.token for one in part.logprobs) == part.text
        assert {len(one.top_logprobs) for one in part.logprobs} == {2}


@looped
async def test_refusals_raise_the_classes_of_the_sdk(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path, limits=Limits(requests_per_minute=2, burst=2)) as (gateway, client):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model=MODEL, input="hello", previous_response_id="resp_1")
        assert (bad.value.param, bad.value.code) == ("previous_response_id", "invalid_request")
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        other = await gateway.accounts.create("other")
        away = client.with_options(base_url=f"{gateway.base_url}/client/v4/accounts/{other.id}/ai/v1")
        with pytest.raises(openai.PermissionDeniedError):
            await away.responses.create(model=MODEL, input="hello")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")
        await client.responses.create(model=MODEL, input="hello", max_output_tokens=1)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.responses.create(model=MODEL, input="hello")
        assert int(limited.value.response.headers["retry-after"]) >= 1
        await gateway.accounts.revoke(token.id)
        with pytest.raises(openai.AuthenticationError):
            await client.responses.create(model=MODEL, input="hello")
    async with talking(AsyncOpenAI, tmp_path / "failing") as (gateway, client):
        gateway.behaviour.fail_at = 1
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model=MODEL, input="hello")


@looped
async def test_a_stream_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        gateway.behaviour.fail_at = 3
        stream = await client.responses.create(model=MODEL, input="hello", stream=True)
        events = [event async for event in stream]
        *_, error, failed = events
        assert error.type == "error"
        assert "the stub was told to fail" in error.message
        assert failed.type == "response.failed"
        assert failed.response.error is not None
        assert [event.sequence_number for event in events] == list(range(len(events)))
        async with client.responses.stream(model=MODEL, input="hello") as again:
            with pytest.raises(RuntimeError):
                await again.get_final_response()


@looped
async def test_leaving_a_stream_stops_it_and_what_came_is_charged(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path) as (gateway, client):
        gateway.behaviour.step_s = 0.01
        stream = await client.responses.create(model=MODEL, input="hello", stream=True, max_output_tokens=1000)
        deltas = 0
        async for event in stream:
            deltas += event.type == "response.output_text.delta"
            if deltas == 3:
                break
        await stream.close()
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.outcome == "client_gone"
        assert 3 <= record.completion_tokens < 1000


@looped
async def test_a_count_is_what_the_answer_is_charged_for_and_costs_a_request_alone(tmp_path: Path) -> None:
    async with talking(AsyncOpenAI, tmp_path, limits=Limits(requests_per_minute=60, neurons_per_day=100)) as (
        gateway,
        client,
    ):
        asked: Any = {"model": MODEL, "input": "hello", "instructions": "be brief", "tools": [RAIN]}
        counted = await client.responses.input_tokens.count(**asked)
        said = await client.responses.create(**asked, max_output_tokens=1)
        assert said.usage is not None
        assert counted.input_tokens == said.usage.input_tokens
        await gateway.settled()
        (count,) = [record for record in await gateway.records() if not record.completion_tokens]
        assert (count.outcome, count.prompt_tokens, count.neurons) == ("done", 0, 0)
