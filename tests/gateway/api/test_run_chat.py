import json
from itertools import repeat
from typing import Any

import pytest

from gateway.api.chat import read_run_chat
from gateway.api.dialect import GenerationRequest
from gateway.errors import ApiError
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, ScoredToken, Usage

MODEL = "@cf/test/stub"
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, neurons=0.25)
MESSAGES = [{"role": "user", "content": "hello"}]


def read(query: bytes = b"", **fields: Any) -> GenerationRequest:
    return read_run_chat(json.dumps(fields).encode(), query, MODEL, 77)


def parsed(**fields: Any) -> Prompt:
    return read(**fields).prompt


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(**fields)
    return raised.value


def test_bodies_of_the_other_family_just_work() -> None:
    prompt = parsed(prompt="hello", raw=True, max_tokens=5, top_k=3, options={"rejectIfBusy": True})
    assert (prompt.text, prompt.raw, prompt.max_tokens, prompt.sampling.top_k) == ("hello", True, 5, 3)
    assert prompt.options is not None
    assert prompt.options.rejectIfBusy
    assert not parsed(prompt="hello").raw


def test_defaults_are_those_of_chat_completions() -> None:
    prompt = parsed(messages=MESSAGES)
    assert (prompt.sampling.temperature, prompt.max_tokens, prompt.messages) == (1.0, None, MESSAGES)
    assert parsed(messages=MESSAGES, model=MODEL) == prompt


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"messages": MESSAGES, "raw": True}, "raw"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "tools"),
        ({"prompt": "a", "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "model": "@cf/an/other"}, "model"),
        ({"messages": MESSAGES, "functions": [{"name": "f", "code": "1"}]}, "functions"),
        ({"messages": MESSAGES, "temperature": 2.5}, "temperature"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    refused = refusal(**fields)
    assert refused.param == field
    assert refused.status == 400


def test_an_adapter_is_what_no_model_takes() -> None:
    refused = refusal(messages=MESSAGES, lora="mine")
    assert (refused.status, refused.code, refused.param, refused.allowed) == (405, 5005, "lora", "POST")


@pytest.mark.parametrize(
    ("given", "kind"), [({"messages": MESSAGES}, "chat.completion"), ({"prompt": "a"}, "text_completion")]
)
def test_the_result_is_a_completion_of_what_was_given(given: dict[str, Any], kind: str) -> None:
    asked = read(**given, logprobs=True)
    chosen = [ScoredToken("hi", b"hi", -0.5)]
    whole = json.loads(
        asked.reply(MODEL, "the-id", 5, repeat(b"abc")).whole([Completion("hi", "stop", [], chosen)], USAGE)
    )
    assert list(whole) == ["result", "success", "errors", "messages"]
    assert (whole["result"]["object"], whole["result"]["usage"]["neurons"]) == (kind, 0.25)
    assert whole["result"]["choices"][0]["logprobs"]
    last, done = asked.reply(MODEL, "the-id", 5, repeat(b"abc")).end(USAGE).split(b"\n\n")[:2]
    assert json.loads(last[6:])["response"] == ""
    assert done == b"data: [DONE]"


def test_its_errors_are_the_envelopes() -> None:
    answer = read(messages=MESSAGES).reply(MODEL, "the-id", 5, repeat(b"abc"))
    error, done = answer.fail(refusal(), "the-id").split(b"\n\n")[:2]
    assert list(json.loads(error[6:])) == ["errors", "success", "result", "messages", "error"]
    assert done == b"data: [DONE]"
