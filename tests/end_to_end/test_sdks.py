"""The official SDKs, unchanged, pointed at a running Hearth by their base URL."""

import asyncio
import json
from typing import Any

import cloudflare
import openai
import pytest

from tests.end_to_end.conftest import EMBER, Hearth, events
from tests.support.sdks import client_of

ASK = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture(params=["account path", "short path"])
def open_ai(request: pytest.FixtureRequest, hearth: Hearth) -> openai.OpenAI:
    below = f"/client/v4/accounts/{hearth.account_id}/ai" if request.param == "account path" else ""
    return client_of(openai.OpenAI, hearth.base_url + below, hearth.token)


def test_openai_chat_answers(open_ai: openai.OpenAI) -> None:
    said = open_ai.chat.completions.create(model=EMBER, messages=ASK, temperature=0, max_tokens=40)
    assert said.object == "chat.completion"
    assert said.choices[0].message.content
    assert said.choices[0].finish_reason in ("stop", "length")
    assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
    assert said.usage.prompt_tokens_details.cached_tokens >= 0


def test_openai_streams_what_it_answers(open_ai: openai.OpenAI) -> None:
    whole = open_ai.chat.completions.create(model=EMBER, messages=ASK, temperature=0, max_tokens=40)
    chunks = list(
        open_ai.chat.completions.create(
            model=EMBER, messages=ASK, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_n_choices_are_reproducible_by_seed(open_ai: openai.OpenAI) -> None:
    def draw() -> list[str | None]:
        asked: Any = {"model": EMBER, "messages": ASK, "temperature": 2, "seed": 7, "n": 3, "max_tokens": 60}
        said = open_ai.chat.completions.create(**asked, extra_body={"ignore_eos": True})  # where it is sure of nothing
        assert [choice.index for choice in said.choices] == [0, 1, 2]
        return [choice.message.content for choice in said.choices]

    first = draw()
    assert first == draw()
    assert len(set(first)) > 1


def test_openai_logprobs_are_of_the_chosen_tokens(open_ai: openai.OpenAI) -> None:
    said = open_ai.chat.completions.create(
        model=EMBER, messages=ASK, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    found = said.choices[0].logprobs.content
    assert len(found) == said.usage.completion_tokens or len(found) == said.usage.completion_tokens - 1
    for token in found:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs))


def test_openai_stop_strings_never_show(open_ai: openai.OpenAI) -> None:
    whole = open_ai.chat.completions.create(model=EMBER, messages=ASK, temperature=0, max_tokens=40)
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    said = open_ai.chat.completions.create(model=EMBER, messages=ASK, temperature=0, max_tokens=40, stop=[stop])
    assert said.choices[0].message.content == text[: text.index(stop)]
    assert said.choices[0].finish_reason == "stop"


def test_openai_errors_have_their_classes(open_ai: openai.OpenAI, hearth: Hearth) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        open_ai.chat.completions.create(model=EMBER, messages=ASK, temperature=9)
    assert "temperature" in str(bad.value)
    stranger = client_of(openai.OpenAI, hearth.base_url, "hearth_nothing")
    with pytest.raises(openai.APIStatusError):
        stranger.chat.completions.create(model=EMBER, messages=ASK)


def test_openai_lists_models(open_ai: openai.OpenAI) -> None:
    assert EMBER in [model.id for model in open_ai.models.list()]


def test_openai_async_streams_side_by_side(hearth: Hearth) -> None:
    async def run() -> list[str]:
        async with client_of(openai.AsyncOpenAI, hearth.base_url, hearth.token) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=EMBER, messages=ASK, temperature=0, max_tokens=24, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

            return await asyncio.gather(*(one() for _ in range(8)))

    texts = asyncio.run(run())
    assert texts[0]
    assert len(set(texts)) == 1


def test_cloudflare_runs_a_prompt_and_messages(cloud: cloudflare.Cloudflare, hearth: Hearth) -> None:
    prompted = cloud.ai.run(EMBER, account_id=hearth.account_id, prompt="Hello!", max_tokens=16)
    chatted = cloud.ai.run(EMBER, account_id=hearth.account_id, messages=ASK, temperature=0)
    for said in (prompted, chatted):
        found = said if isinstance(said, dict) else said.to_dict()
        assert isinstance(found["response"], str)
        assert found["usage"]["completion_tokens"] >= 1


def test_cloudflare_streams_through_its_raw_response(cloud: cloudflare.Cloudflare, hearth: Hearth) -> None:
    with cloud.ai.with_streaming_response.run(
        EMBER, account_id=hearth.account_id, messages=ASK, stream=True, temperature=0
    ) as said:
        found = events("".join(said.iter_text()))
    assert "".join(str(event["response"]) for event in found if event.get("response"))


def test_cloudflare_errors_have_their_classes(cloud: cloudflare.Cloudflare, hearth: Hearth) -> None:
    with pytest.raises(cloudflare.BadRequestError) as unknown:
        cloud.ai.run("@cf/meta/nothing", account_id=hearth.account_id, prompt="x")
    assert "5007" in str(unknown.value)
    with pytest.raises(cloudflare.PermissionDeniedError):
        cloud.ai.run(EMBER, account_id="0" * 32, prompt="x")


def test_cloudflare_pages_through_the_models_to_the_end(cloud: cloudflare.Cloudflare, hearth: Hearth) -> None:
    found = list(cloud.ai.models.list(account_id=hearth.account_id))
    names = [model["name"] if isinstance(model, dict) else model.name for model in found]
    assert names.count(EMBER) == 1


def test_cloudflare_manages_an_accounts_tokens(cloud: cloudflare.Cloudflare, hearth: Hearth) -> None:
    """The whole life of a token by the official client, as an administrator and as the token itself."""
    command = ("tokens", "mint", hearth.account_id, "--name", "admin", "--permissions", "account:admin", "--json")
    boss = cloud.with_options(api_token=json.loads(hearth.command(*command))["token"])
    policies = [{"effect": "allow", "permission_groups": [{"id": "inference"}], "resources": {}}]
    made = boss.accounts.tokens.create(account_id=hearth.account_id, name="ci", policies=policies)
    assert made.id
    assert made.value
    own = cloud.with_options(api_token=made.value)
    assert own.user.tokens.verify().status == "active"
    assert own.ai.run(EMBER, account_id=hearth.account_id, prompt="Hello!", max_tokens=4)
    with pytest.raises(cloudflare.PermissionDeniedError):
        own.accounts.tokens.get(made.id, account_id=hearth.account_id)
    assert made.id in {token.id for token in boss.accounts.tokens.list(account_id=hearth.account_id)}
    rolled = boss.accounts.tokens.value.update(made.id, account_id=hearth.account_id)
    assert cloud.with_options(api_token=rolled).user.tokens.verify().id == made.id
    boss.accounts.tokens.delete(made.id, account_id=hearth.account_id)
    with pytest.raises(cloudflare.NotFoundError):
        boss.accounts.tokens.get(made.id, account_id=hearth.account_id)
