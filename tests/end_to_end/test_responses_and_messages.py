"""What OpenAI's Responses and Anthropic's Messages say of the built-in model, by their SDKs, and what it cost."""

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.end_to_end.conftest import EMBER, Hearth
from tests.support.sdks import client_of
from tests.support.waiting import wait_for

ASK: Any = [{"role": "user", "content": "Hello! Who are you?"}]
GREEDY: Any = {"extra_body": {"temperature": 0}}  # which Anthropic's SDK knows no more
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["model", "person"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def used(hearth: Hearth, account_id: str) -> dict[str, int]:
    total: dict[str, int] = json.loads(hearth.command("usage", account_id, "--json"))["total"]
    return total


def test_all_dialects_say_the_same(open_ai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat = open_ai.chat.completions.create(model=EMBER, messages=ASK, temperature=0, max_tokens=40)
    response = open_ai.responses.create(model=EMBER, input=ASK, temperature=0, max_output_tokens=40)
    message = claude.messages.create(model=EMBER, messages=ASK, max_tokens=40, **GREEDY)
    assert chat.choices[0].message.content == response.output_text == text_of(message)
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert chat.usage.prompt_tokens == response.usage.input_tokens == read
    assert chat.usage.completion_tokens == response.usage.output_tokens == message.usage.output_tokens


def test_a_stop_sequence_ends_the_text_before_it(claude: anthropic.Anthropic) -> None:
    whole = text_of(claude.messages.create(model=EMBER, messages=ASK, max_tokens=40, **GREEDY))
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    asked: Any = {"model": EMBER, "messages": ASK, "max_tokens": 40, "stop_sequences": [stop], **GREEDY}
    said = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text_of(said) == whole[: whole.index(stop)]
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_that_is_cut_says_so(open_ai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    response = open_ai.responses.create(model=EMBER, input=ASK, max_output_tokens=2)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    message = claude.messages.create(model=EMBER, messages=ASK, max_tokens=2)
    assert (message.stop_reason, message.usage.output_tokens, response.usage.output_tokens) == ("max_tokens", 2, 2)


def test_a_schema_holds_the_answer_streamed_or_not(open_ai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    format: Any = {"type": "json_schema", "name": "who", "schema": SCHEMA}
    asked: Any = {"model": EMBER, "input": ASK, "temperature": 1, "text": {"format": format}}
    with open_ai.responses.stream(**asked) as stream:
        streamed = stream.get_final_response().output_text
    message = claude.messages.create(
        model=EMBER, messages=ASK, max_tokens=60, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}
    )
    for text in (open_ai.responses.create(**asked).output_text, streamed, text_of(message)):
        said = json.loads(text)
        assert said.keys() == {"name", "kind"}
        assert said["kind"] in ("model", "person")
        assert len(said["name"]) <= 8
    assert open_ai.responses.create(**asked, max_output_tokens=3).status == "incomplete"
    format["schema"] = {"type": "no type"}
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema"):
        open_ai.responses.create(**asked)


def test_what_the_sdks_are_told_is_what_the_ledger_has(hearth: Hearth) -> None:
    account_id, token = hearth.account("teller")
    open_ai = client_of(openai.OpenAI, hearth.base_url, token)
    claude = client_of(anthropic.Anthropic, hearth.base_url, token)
    told = [0, 0]

    def note(prompt_tokens: int, completion_tokens: int) -> None:
        told[0] += prompt_tokens
        told[1] += completion_tokens

    for _ in range(2):
        whole = open_ai.responses.create(model=EMBER, input=ASK, max_output_tokens=20)
        with open_ai.responses.stream(model=EMBER, input=ASK) as stream:
            streamed = stream.get_final_response()
        for response in (whole, streamed):
            note(response.usage.input_tokens, response.usage.output_tokens)
        message = claude.messages.create(model=EMBER, messages=ASK, max_tokens=20)
        with claude.messages.stream(model=EMBER, messages=ASK, max_tokens=20) as messages:
            messages.until_done()
            for said in (message, messages.get_final_message()):
                note(said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0), said.usage.output_tokens)
        claude.messages.count_tokens(model=EMBER, messages=ASK)

    wait_for(lambda: used(hearth, account_id)["requests"] == 10, 10, "ten requests in the ledger")
    ledger = used(hearth, account_id)
    assert [ledger["prompt_tokens"], ledger["completion_tokens"]] == told


def test_a_stream_that_is_left_is_charged_for_what_came(hearth: Hearth) -> None:
    account_id, token = hearth.account("leaver")
    claude = client_of(anthropic.Anthropic, hearth.base_url, token)
    endless: Any = {"type": "json_schema", "schema": {"type": "string", "minLength": 9999}}
    asked: Any = {"model": EMBER, "messages": ASK, "max_tokens": 1500, "output_config": {"format": endless}}
    with claude.messages.stream(**asked) as stream:
        next(iter(stream.text_stream))

    charged = wait_for(lambda: used(hearth, account_id)["completion_tokens"], 10, "the stream's charge")
    assert charged < 1500
