import json
from itertools import repeat
from typing import Any

import pytest
from openai.types.completion_create_params import CompletionCreateParamsBase

from gateway.api.completions import CompletionsBody, CompletionsReply, read_completions
from gateway.errors import ApiError
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, Usage

BEGUN = RunningUsage(7, 0)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, neurons=0.25)
HELLO: dict[str, Any] = {"model": "@cf/test/stub", "prompt": "hello"}


def parsed(**fields: Any) -> Prompt:
    asked = read_completions(json.dumps({**HELLO, **fields}).encode(), b"", None, 77)
    assert asked.model == "@cf/test/stub"
    return asked.prompt


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parsed(**fields)
    assert (raised.value.status, raised.value.code) == (400, 5006)
    return raised.value


def reply(prompt: Prompt, **options: Any) -> CompletionsReply:
    options = {"shown": prompt.n, "scored": False, **options}
    return CompletionsReply(prompt, "@cf/test/stub", "the-id", 1_700_000_000, repeat(b"abc"), **options)


def events(raw: bytes) -> list[Any]:
    blocks = raw.split(b"\n\n")
    assert blocks.pop() == b""
    return [block[6:].decode() if block.endswith(b"[DONE]") else json.loads(block[6:]) for block in blocks]


def test_every_field_of_the_sdk_is_known() -> None:
    assert set(CompletionCreateParamsBase.__annotations__) <= set(CompletionsBody.__struct_fields__)


def test_defaults_are_those_of_the_api() -> None:
    prompt = parsed()
    assert (prompt.text, prompt.raw, prompt.max_tokens, prompt.n, prompt.stream) == ("hello", True, 16, 1, False)
    assert (prompt.sampling.temperature, prompt.sampling.top_p, prompt.sampling.logprobs) == (1.0, 1.0, None)


@pytest.mark.parametrize("prompt", ["hello", ["hello"]])
def test_a_prompt_is_a_text(prompt: Any) -> None:
    assert (parsed(prompt=prompt).text, parsed(prompt=prompt).ids) == ("hello", None)


@pytest.mark.parametrize(("prompt", "ids"), [([5, 6], [5, 6]), ([[5, 6]], [5, 6]), ([5], [5])])
def test_a_prompt_may_be_tokens(prompt: Any, ids: list[int]) -> None:
    assert (parsed(prompt=prompt).text, parsed(prompt=prompt).ids) == (None, ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", 1]),
        ("prompt", [-1]),
        ("prompt", None),
        ("suffix", "x"),
        ("logprobs", 6),
        ("logprobs", True),
        ("best_of", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("temperature", 2.1),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("tools", []),
    ],
)
def test_a_wrong_or_unserved_field_is_refused_by_name(field: str, value: Any) -> None:
    refused = refusal(**{field: value})
    assert f"'{field}" in refused.message, refused.message
    assert (refused.param or "").startswith(field)


def test_best_of_is_at_least_n_and_not_streamed() -> None:
    assert refusal(n=3, best_of=2).param == "best_of"
    assert refusal(best_of=2, stream=True).param == "best_of"
    prompt = parsed(n=2, best_of=5)
    assert (prompt.n, prompt.sampling.logprobs) == (5, 0)
    assert parsed(n=2, best_of=2, stream=True).sampling.logprobs is None


def test_echo_goes_with_text_alone() -> None:
    assert refusal(echo=True, logprobs=1).param == "echo"
    assert refusal(echo=True, prompt=[1]).param == "echo"
    assert parsed(echo=True)


def scored(token: str, logprob: float, *top: ScoredToken) -> ScoredToken:
    return ScoredToken(token, token.encode(), logprob, list(top))


def test_the_best_are_shown_in_order() -> None:
    drawn = [
        Completion(text, "stop", [], [scored("x", logprob), scored("y", logprob)])
        for text, logprob in (("a", -3.0), ("b", -1.0), ("c", -2.0))
    ]
    whole = json.loads(reply(parsed(n=2, best_of=3), shown=2).whole(drawn, USAGE))
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in whole["choices"]] == [
        (0, "b", None),
        (1, "c", None),
    ]


def test_the_whole_answer_is_a_text_completion() -> None:
    completion = Completion("hi there", "length", [], [scored("hi", -0.5, scored("ho", -1.0)), scored(" there", -0.1)])
    whole = json.loads(reply(parsed(logprobs=1), scored=True, echo="hello").whole([completion], USAGE))
    assert (whole["id"], whole["object"], whole["usage"]["total_tokens"]) == ("cmpl-the-id", "text_completion", 10)
    assert whole["choices"] == [
        {
            "index": 0,
            "text": "hellohi there",
            "logprobs": {
                "tokens": ["hi", " there"],
                "token_logprobs": [-0.5, -0.1],
                "top_logprobs": [{"ho": -1.0, "hi": -0.5}, {" there": -0.1}],
                "text_offset": [0, 2],
            },
            "finish_reason": "length",
        }
    ]


def test_the_stream_goes_on_behind_the_echo() -> None:
    chunks = reply(parsed(stream=True, stream_options={"include_usage": True}), echo="hello")
    raw = chunks.begin(BEGUN) + chunks.text(0, " you", []) + chunks.finish(0, "stop", None) + chunks.end(USAGE)
    *shown, done = events(raw)
    assert done == "[DONE]"
    assert [chunk["choices"] for chunk in shown] == [
        [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": " you", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    assert {chunk["object"] for chunk in shown} == {"text_completion"}
    assert shown[-1]["usage"]["total_tokens"] == 10
    assert reply(parsed()).begin(BEGUN) == b""


def test_offsets_go_on_from_piece_to_piece() -> None:
    chunks = reply(parsed(stream=True, logprobs=0))
    first, second = events(chunks.text(0, "hi", [scored("hi", -0.5)]) + chunks.text(0, " you", [scored(" you", -1.0)]))
    assert first["choices"][0]["logprobs"]["text_offset"] == [0]
    assert second["choices"][0]["logprobs"] == {
        "tokens": [" you"],
        "token_logprobs": [-1.0],
        "top_logprobs": None,
        "text_offset": [2],
    }
