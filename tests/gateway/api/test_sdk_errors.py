"""Bad input by the official SDKs, unchanged: the field, what is wrong with it and what may stand there, and the code.

What is provoked here is all that a request can do wrong. Wrong tokens, accounts and paths are at the end.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudflare
import openai
import pytest
from cloudflare import AsyncCloudflare
from openai import AsyncOpenAI

from engine.protocol.types import RejectReason
from tenants.records.limits import Limits
from tests.support.sdks import client_of, talking
from tests.support.served_gateway import Served, looped
from tests.support.stub_replica import MODEL

HELLO: Any = [{"role": "user", "content": "hello"}]
RAIN = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
DEEP: Any = {}
for _ in range(60):
    DEEP = {"items": DEEP}

# Fields of both families: value, the field that is named, and words of what may stand there.
BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"top_p": 1.1}, "top_p", "to 1"),
    ({"top_k": 51}, "top_k", "from 1 to 50"),
    ({"min_p": -0.1}, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 2.1}, "repetition_penalty", "above 0 to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "from -2 to 2"),
    ({"presence_penalty": "high"}, "presence_penalty", "from -2 to 2"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "send one"),
    ({"stop": ["x"] * 5}, "stop", "at most 4"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]", "from -100 to 100"),
    ({"logit_bias": {"6000": 1}}, "logit_bias", "the vocabulary has 6000"),
    ({"metadata": {"a": 5}}, "metadata[...]", "at most 512 characters"),
    ({"user": "x" * 513}, "user", "at most 512 characters"),
    ({"stream": "yes"}, "stream", "bool"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "assistant, developer"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "give the turn a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages[0].content[0].image_url",
        "is no data: URI",
    ),
    ({"tools": [RAIN] * 129}, "tools", "at most 128"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name", "A-Za-z0-9"),
    ({"tools": [RAIN, {"name": "rain"}]}, "tools[1]", "'rain' is there twice"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "either 'function' or 'name'"),
    ({"tools": [{"name": "f", "parameters": DEEP}]}, "tools[0].parameters", "flatten"),
    ({"tool_choice": "perhaps"}, "tool_choice", "auto, none, required"),
    ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
    ({"tool_choice": {"type": "function", "function": {"name": "sun"}}, "tools": [RAIN]}, "tool_choice", "'sun'"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object, json_schema, text"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "give the schema"),
    ({"guided_json": DEEP}, "guided_json", "flatten"),
    ({"guided_json": "no"}, "guided_json", "JSON object"),
    ({"guided_regex": ""}, "guided_regex", "1 to 4096 characters"),
    ({"guided_choice": []}, "guided_choice", "1 to 1024"),
    ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "line 1"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "send one"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "high, low, max"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not known to the template"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking", "not known"),
    ({"chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs", "flatten"),
    ({"functions": [{"name": "f", "code": "1"}]}, "functions", "'tools'"),
    ({"colour": "red"}, "colour", "leave it out"),
]
CHAT: list[tuple[dict[str, Any], str, str]] = [
    *BOTH,
    ({"temperature": 2.1}, "temperature", "from 0 to 2"),
    ({"n": 129}, "n", "from 1 to 128"),
    ({"seed": 1 << 63}, "seed", "9223372036854775807"),
    ({"logprobs": 1}, "logprobs", "bool"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"top_logprobs": 1}, "top_logprobs", "'logprobs'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "'stream'"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "leave it out"),
    ({"function_call": "auto"}, "function_call", "'tool_choice'"),
    ({"modalities": ["audio"]}, "modalities", "['text']"),
    *(({name: {}}, name, "leave it out") for name in ("audio", "prediction", "web_search_options", "moderation")),
    ({"prompt_cache_options": {}}, "prompt_cache_options", "leave it out"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "in_memory"),
    ({"service_tier": "flex"}, "service_tier", "'default'"),
    ({"store": True}, "store", "nothing is stored"),
    ({"verbosity": "low"}, "verbosity", "'medium'"),
]
NATIVE: list[tuple[dict[str, Any], str, str]] = [
    *BOTH,
    ({"temperature": 5.1}, "temperature", "from 0 to 5"),
    ({"top_p": 0}, "top_p", "from 0.001 to 1"),
    ({"seed": 0}, "seed", "from 1 to 9999999999"),
    ({"n": 2}, "n", "send 1"),
    ({"logprobs": True}, "logprobs", "chat/completions"),
    ({"raw": True}, "raw", "'prompt'"),
    ({"prompt": "x"}, "prompt", "2 matches"),
]
COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ["a", "b"]}, "prompt", "send one"),
    ({"prompt": [6000]}, "prompt", "below 6000"),
    ({"logprobs": 6}, "logprobs", "from 0 to 5"),
    ({"n": 2, "best_of": 1}, "best_of", "at least 'n'"),
    ({"n": 2, "best_of": 3, "stream": True}, "best_of", "cannot be streamed"),
    ({"echo": True, "logprobs": 1}, "echo", "without 'logprobs'"),
    ({"suffix": "x"}, "suffix", "leave it out"),
    ({"temperature": 2.1}, "temperature", "from 0 to 2"),
]


@contextlib.asynccontextmanager
async def asking(folder: Path, **options: Any) -> AsyncIterator[tuple[Served, AsyncOpenAI, AsyncCloudflare]]:
    async with (
        talking(AsyncOpenAI, folder, **options) as (gateway, openai_client),
        client_of(AsyncCloudflare, gateway.base_url, gateway.token) as cloudflare_client,
    ):
        yield gateway, openai_client, cloudflare_client


def code_of(error: openai.APIStatusError | cloudflare.APIStatusError) -> tuple[int, int]:
    body: Any = error.response.json()
    return error.status_code, body["errors"][0]["code"]


@looped
async def test_a_wrong_field_is_named_with_what_may_stand_there(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, client, cloud):
        for body, field, words in CHAT:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
            assert (code_of(bad.value), bad.value.param) == ((400, 5006), field), body
            assert f"'{field}" in bad.value.message, bad.value.message
            assert words in bad.value.message, bad.value.message
        for body, field, words in COMPLETIONS:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model=MODEL, prompt="hello", extra_body=body)
            assert (code_of(bad.value), bad.value.param) == ((400, 5006), field), body
            assert words in bad.value.message, bad.value.message
        for body, field, words in NATIVE:
            asked = {"messages": HELLO, **body}
            with pytest.raises(cloudflare.BadRequestError) as wrong:
                await cloud.ai.run(MODEL, account_id=gateway.account_id, extra_body=asked)
            assert code_of(wrong.value) == (400, 5006), body
            message = str(wrong.value.errors[0].message)
            assert f"'{field}" in message, message
            assert words in message, message
        assert not gateway.fleet.submits
        assert not await gateway.records()


@looped
async def test_what_a_model_cannot_do_has_its_own_code(tmp_path: Path) -> None:
    async with asking(tmp_path, body_bytes_max=100_000) as (gateway, client, cloud):
        account = gateway.account_id
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="@cf/test/stop", messages=HELLO)
        assert (code_of(unknown.value), unknown.value.code) == ((404, 3042), "model_not_found")
        assert f"did you mean {MODEL}?" in unknown.value.message
        with pytest.raises(openai.BadRequestError) as other:
            await client.embeddings.create(model=MODEL, input="x")
        assert code_of(other.value) == (400, 5007)
        with pytest.raises(cloudflare.BadRequestError) as nowhere:
            await cloud.ai.run("@cf/no/body", account_id=account, prompt="x")
        assert code_of(nowhere.value) == (400, 5007)
        with pytest.raises(cloudflare.APIStatusError) as adapter:
            await cloud.ai.run(MODEL, account_id=account, prompt="x", lora="mine")
        assert code_of(adapter.value) == (405, 5005)
        assert adapter.value.response.headers["allow"] == "POST"
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a b " * 9000}])
        assert (code_of(long.value), long.value.code) == ((400, 3030), "context_length_exceeded")
        assert "8192" in long.value.message
        with pytest.raises(openai.APIStatusError) as large:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 100_001}])
        assert code_of(large.value) == (413, 3006)
        with pytest.raises(openai.BadRequestError) as empty:
            await client.post("/chat/completions", cast_to=object)
        assert code_of(empty.value) == (400, 3003)


@looped
async def test_a_grammar_that_the_replica_refuses_is_called_by_its_field(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, client, _):
        gateway.behaviour.reject = RejectReason.GRAMMAR
        bodies: list[tuple[dict[str, Any], str]] = [
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"guided_json": {"type": "object"}}, "guided_json"),
            ({"guided_regex": "a"}, "guided_regex"),
            ({"guided_choice": ["a"]}, "guided_choice"),
            ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
        ]
        for body, field in bodies:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
            assert (code_of(bad.value), bad.value.param) == ((400, 5006), field)
            assert "as told" in bad.value.message


@looped
async def test_an_answer_that_is_cut_says_so_where_it_has_a_finish_reason(tmp_path: Path) -> None:
    """OpenAI's answers end with `length`, streamed or not; the native answer, which has no reason, is an error. What
    was generated is charged either way."""
    json_object: Any = {"type": "json_object"}
    async with asking(tmp_path) as (gateway, client, cloud):
        asked: Any = {"model": MODEL, "messages": HELLO, "response_format": json_object, "max_tokens": 5}
        extras: list[Any] = [{}, {"n": 3}]
        for extra in extras:
            whole = await client.chat.completions.create(**asked, **extra)
            assert [choice.finish_reason for choice in whole.choices] == ["length"] * extra.get("n", 1)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 5 * extra.get("n", 1)
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, **extra, stream=True)]
            assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(cloudflare.BadRequestError) as native:
            await cloud.ai.run(
                MODEL, account_id=gateway.account_id, messages=HELLO, response_format=json_object, max_tokens=5
            )
        assert code_of(native.value) == (400, 5024)
        assert "JSON Mode couldn't be met" in native.value.message
        assert "'max_tokens'" in native.value.message
        await gateway.settled()
        records = await gateway.records()
        assert sorted(record.outcome for record in records) == ["done"] * 4 + ["json_not_met"]
        assert sorted(record.completion_tokens for record in records)[:3] == [5, 5, 5]
        assert all(record.neurons > 0 for record in records)


@looped
async def test_a_document_ended_by_a_stop_string_is_none_natively(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, client, cloud):
        model = gateway.app._serving.endpoint.catalogue.find(MODEL)
        assert model is not None
        gateway.behaviour.script = model.tokenizer.encode_prompt('{"city": "Rome"}')
        asked: Any = {"model": MODEL, "messages": HELLO, "response_format": {"type": "json_object"}}
        said = await client.chat.completions.create(**asked)
        assert said.choices[0].message.content == '{"city": "Rome"}'
        cut = (await client.chat.completions.create(**asked, stop=["Ro"])).choices[0]
        assert (cut.message.content, cut.finish_reason) == ('{"city": "', "stop")
        native = {"messages": HELLO, "response_format": asked["response_format"], "stop": ["Ro"]}
        with pytest.raises(cloudflare.BadRequestError, match="'stop'") as bad:
            await cloud.ai.run(MODEL, account_id=gateway.account_id, extra_body=native)
        assert code_of(bad.value) == (400, 5024)
        gateway.behaviour.script = model.tokenizer.encode_prompt("no document at all")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(**asked)
        assert code_of(wrong.value) == (400, 5024)


@looped
async def test_capacity_and_crashes_have_their_codes(tmp_path: Path) -> None:
    async with asking(tmp_path, wait_s=0.1, request_s=0.5) as (gateway, client, cloud):
        ask: Any = {"model": MODEL, "messages": HELLO}
        gateway.behaviour.reject = RejectReason.BUSY
        with pytest.raises(openai.RateLimitError) as busy:
            await client.chat.completions.create(**ask)
        assert code_of(busy.value) == (429, 3040)
        gateway.behaviour.reject = RejectReason.TOO_LONG
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(**ask)
        assert code_of(long.value) == (400, 3030)
        gateway.behaviour.reject = None
        gateway.behaviour.step_s = 0.3
        with pytest.raises(cloudflare.APIStatusError) as late:
            await cloud.ai.run(MODEL, account_id=gateway.account_id, prompt="x")
        assert code_of(late.value) == (408, 3046)
        gateway.behaviour.step_s = 0
        gateway.behaviour.fail_at = 1
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(**ask)
        assert code_of(failed.value) == (500, 5000)


async def first_refusal(client: AsyncOpenAI, **asked: Any) -> openai.RateLimitError:
    """Asks the same until a limit refuses it."""
    for _ in range(9):
        try:
            await client.chat.completions.create(model=MODEL, messages=HELLO, **asked)
        except openai.RateLimitError as refused:
            return refused
    raise AssertionError("no limit was met")


@looped
async def test_limits_have_their_codes(tmp_path: Path) -> None:
    async with asking(tmp_path, limits=Limits(neurons_per_day=5)) as (_, client, _cloud):
        spent = await first_refusal(client, max_tokens=400)
        assert (code_of(spent), spent.code) == ((429, 4006), "insufficient_quota")
        assert int(spent.response.headers["retry-after"]) > 0
    async with asking(tmp_path / "second", limits=Limits(requests_per_minute=1)) as (_, client, _cloud):
        fast = await first_refusal(client, max_tokens=1)
        assert (code_of(fast), fast.code) == ((429, 3021), "rate_limit_exceeded")


@looped
async def test_who_may_not_ask_is_told_so(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, client, cloud):
        ask: Any = {"model": MODEL, "messages": HELLO}
        with pytest.raises(openai.AuthenticationError) as junk:
            await client.with_options(api_key="junk").chat.completions.create(**ask)
        assert (code_of(junk.value), junk.value.type) == ((401, 9106), "invalid_request_error")
        with pytest.raises(openai.NotFoundError, match="No route for that URI: /client/v4/chat/completions"):
            await client.with_options(base_url=f"{gateway.base_url}/client/v4").chat.completions.create(**ask)
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        with pytest.raises(cloudflare.PermissionDeniedError) as foreign:
            await cloud.ai.run(MODEL, account_id="0" * 32, prompt="x")
        assert code_of(foreign.value) == (403, 10000)
        with pytest.raises(cloudflare.NotFoundError) as malformed:
            await cloud.ai.run(MODEL, account_id="nobody", prompt="x")
        assert code_of(malformed.value) == (404, 7003)
        with pytest.raises(openai.NotFoundError) as route:
            await client.post("/chat/nothing", cast_to=object)
        assert code_of(route.value) == (404, 7000)
        with pytest.raises(openai.APIStatusError) as method:
            await client.get("/chat/completions", cast_to=object)
        assert code_of(method.value) == (405, 7001)
        await gateway.accounts.revoke(token.id)
        with pytest.raises(openai.AuthenticationError) as revoked:
            await client.chat.completions.create(**ask)
        assert (code_of(revoked.value), revoked.value.code) == ((401, 10000), "invalid_api_key")
