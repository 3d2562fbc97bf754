"""Requests of promptfoo 0.121.20 and guidellm 0.8.1, as they were seen on the wire, and what both read of answers."""

from pathlib import Path
from typing import Any

import msgspec

from gateway.listing.answers import ChatChunk, TextCompletion
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL

STREAMED: dict[str, Any] = {
    "model": MODEL,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1 0 m0 Finish medical want almost away until"}]}]


async def streamed(gateway: Served, path: str, body: Any) -> list[Any]:
    answer = await gateway.call(path, body)
    assert answer.status == 200, answer.content
    return answer.events


@looped
async def test_promptfoo_is_answered_on_all_paths_that_it_has(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1024, "temperature": 0}
        turns = [{"role": "user", "content": "When does it open?"}]
        chat = await gateway.call("/v1/chat/completions", {**asked, "messages": turns}, x_promptfoo_version="0.121.20")
        assert chat.json["choices"][0]["message"]["content"]
        cut = {**asked, "max_tokens": 5, "messages": turns, "response_format": {"type": "json_object"}}
        assert (await gateway.call("/v1/chat/completions", cut)).json["choices"][0]["finish_reason"] == "length"
        penalties = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "best_of": 1}
        stops = ["<|im_end|>", "<|endoftext|>"]
        text = {**asked, **penalties, "prompt": "When does it open?", "stop": stops}
        assert (await gateway.call("/v1/completions", text)).json["choices"][0]["text"]
        response = {"model": MODEL, "input": "When?", "max_output_tokens": 1024, "temperature": 0}
        said = await gateway.call("/v1/responses", {**response, "text": {"format": {"type": "text"}}})
        assert said.json["output"][0]["content"][0]["text"]
        wrong = await gateway.call("/v1/chat/completions", {**asked, "messages": turns}, authorization="Bearer wrong")
        assert (wrong.status, wrong.json["error"]["code"]) == (401, "invalid_api_key")


@looped
async def test_guidellm_gets_just_the_tokens_that_it_asks_for_and_counts_them_in_every_chunk(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.stop_at = None
        exact = {"ignore_eos": True, "stop": None}
        bodies = {
            "/v1/chat/completions": {**STREAMED, **exact, "max_completion_tokens": 12, "messages": PARTS},
            "/v1/completions": {**STREAMED, **exact, "max_tokens": 12, "prompt": "1 0 m0 Finish medical"},
        }
        for path, body in bodies.items():
            *chunks, last, done = await streamed(gateway, path, body)
            assert done == "[DONE]"
            documented: Any = ChatChunk if "chat" in path else TextCompletion
            for chunk in (*chunks, last):
                msgspec.convert(chunk, documented)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert (counts[-1], last["usage"]["completion_tokens"]) == (12, 12)
            assert all(each["usage"]["total_tokens"] == each["usage"]["prompt_tokens"] + count
                       for each, count in zip(chunks, counts, strict=True))  # fmt: skip
        whole = {"model": MODEL, **exact, "max_output_tokens": 12, "input": "hello"}
        answer = await gateway.call("/v1/responses", whole)
        assert (answer.status, answer.json["usage"]["output_tokens"]) == (200, 12)
        assert [submit.sampling.ignore_eos for submit in gateway.fleet.submits] == [True] * 3


@looped
async def test_min_tokens_holds_stop_strings_back_and_is_not_more_than_max_tokens(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        model = gateway.app._serving.endpoint.catalogue.find(MODEL)
        assert model is not None
        gateway.behaviour.script = model.tokenizer.encode_prompt("one two. three four. five six.")
        script = len(gateway.behaviour.script)
        plain = await gateway.chat(stop=["."], max_tokens=100)
        assert plain.json["choices"][0]["message"]["content"] == "one two"
        early = plain.json["usage"]["completion_tokens"]
        late = await gateway.chat(stop=["."], max_tokens=100, min_tokens=early + 1)
        assert late.json["choices"][0]["message"]["content"] == "one two. three four"
        assert gateway.fleet.submits[-1].sampling.min_tokens == early + 1 < script
        refused = await gateway.chat(max_tokens=5, min_tokens=6)
        assert (refused.code, refused.json["error"]["param"]) == (5006, "min_tokens")
        assert "'max_tokens', which is 5" in refused.message
        for field in ({"min_tokens": 1}, {"ignore_eos": True}):
            held = await gateway.chat(response_format={"type": "json_object"}, **field)
            assert (held.code, [held.json["error"]["param"]]) == (5006, list(field))
