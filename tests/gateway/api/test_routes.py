"""Which path leads to which dialect, in all forms of the path."""

from pathlib import Path
from typing import Any

from gateway.settings.config import ModelEntryConfig
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL

EMBER = Path(__file__).parents[3] / "engine" / "builtin_model"
CHAT = [
    ModelEntryConfig(name=MODEL, folder=str(EMBER), dialect="chat")
]  # in place of the entry that is of the native family
MESSAGES = [{"role": "user", "content": "hello"}]


def forms(gateway: Served, resource: str) -> list[str]:
    """The path of a resource, with the account in it and without."""
    bare = [resource] if resource.startswith("/v1/") else []
    return [f"/client/v4/accounts/{gateway.account_id}/ai{resource}", f"/ai{resource}", *bare]


@looped
async def test_run_takes_the_model_from_its_path_or_its_body(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        own = {"prompt": "hello", "max_tokens": 2}
        for resource, body in ((f"/run/{MODEL}", own), ("/run", {"model": MODEL, "input": own})):
            for path in forms(gateway, resource):
                answer = await gateway.call(path, body)
                assert answer.json["result"]["usage"]["completion_tokens"] == 2, path


@looped
async def test_unknown_fields_are_left_out_and_named_where_the_server_ignores_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello", "weight": 1}, {"role": "user", "content": "you", "weight": 2}]
    strange = {"messages": messages, "max_tokens": 2, "colour": "red", "stream": True}
    async with served(tmp_path, unknown_fields="ignore") as gateway:
        chat = await gateway.chat(**strange)
        assert (chat.status, chat.headers["x-ignored-fields"]) == (200, "messages[].weight, colour")
        run = await gateway.call("/ai/run", {"model": MODEL, "input": {"prompt": "hello", "colour": "red"}, "mood": 1})
        assert (run.status, run.headers["x-ignored-fields"]) == (200, "mood, input.colour")
        assert "x-ignored-fields" not in (await gateway.chat(max_tokens=2)).headers
        assert (await gateway.chat(temperature=9, colour="red")).code == 5006, "a field that is known is not ignored"
        assert (await gateway.chat(functions=[])).code == 5006, "nor is one that is not served"
        assert (await gateway.chat(**{f"field-{i}": 1 for i in range(17)})).code == 5006, "there is a limit"
        limit = await gateway.call("/v1/messages", {**strange, "model": MODEL, "messages": messages[:1]})
        assert (limit.status, limit.headers["x-ignored-fields"]) == (200, "messages[].weight, colour")
    async with served(tmp_path / "strict") as gateway:
        assert (await gateway.chat(**strange)).code == 5006


@looped
async def test_a_wrong_body_of_run_is_refused_by_name(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        cases: list[tuple[Any, int, str]] = [
            ({"input": {"prompt": "hello"}}, 5006, "'model' is missing"),
            ({"model": MODEL}, 5006, "'input' is missing"),
            ({"model": MODEL, "prompt": "hello"}, 5006, "'prompt' is not a field"),
            ({"model": MODEL, "input": "hello"}, 5006, "send one JSON object"),
            ({"model": MODEL, "input": {"prompt": "hello", "top_k": 51}}, 5006, "'top_k'"),
            ({"model": "@cf/no/body", "input": {}}, 5007, "No such model @cf/no/body"),
        ]
        for body, code, said in cases:
            answer = await gateway.call("/ai/run", body)
            assert (answer.status, answer.code) == (400, code), body
            assert said in answer.message
            assert said in answer.json["error"]["message"]


@looped
async def test_a_model_of_the_chat_family_answers_run_with_a_completion_in_the_envelope(tmp_path: Path) -> None:
    async with served(tmp_path, models=CHAT) as gateway:
        for path in forms(gateway, f"/run/{MODEL}"):
            answer = await gateway.call(path, {"messages": MESSAGES, "max_tokens": 2, "n": 2})
            assert answer.json["success"] is True
            result = answer.json["result"]
            assert (result["object"], len(result["choices"]), result["model"]) == ("chat.completion", 2, MODEL)
            assert answer.headers["cf-ai-neurons"]
        refused = await gateway.run(messages=MESSAGES, temperature=9)
        assert refused.json["error"]["param"] == "temperature"
        assert (await gateway.run(messages=MESSAGES, model="@cf/an/other")).status == 400


@looped
async def test_its_stream_ends_with_the_native_usage(tmp_path: Path) -> None:
    async with served(tmp_path, models=CHAT) as gateway:
        body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
        answer = await gateway.call(gateway.run_path, body)
        *chunks, last, done = answer.events
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert (last["response"], last["usage"]["completion_tokens"], done) == ("", 2, "[DONE]")
        assert last["usage"]["neurons"] > 0


@looped
async def test_a_prompt_to_it_is_answered_with_a_text_completion(tmp_path: Path) -> None:
    async with served(tmp_path, models=CHAT) as gateway:
        whole = await gateway.run(prompt="hello", max_tokens=2)
        assert (whole.json["result"]["object"], whole.json["success"]) == ("text_completion", True)
        raw = await gateway.run(prompt="hello", raw=True, max_tokens=2)
        tokens = [answer.json["result"]["usage"]["prompt_tokens"] for answer in (whole, raw)]
        assert tokens[1] < tokens[0], "raw skips the chat template"
        streamed = await gateway.run(prompt="hello", max_tokens=2, stream=True)
        text = "".join(event["choices"][0]["text"] for event in streamed.events[:-2])
        assert text == whole.json["result"]["choices"][0]["text"]


@looped
async def test_completions_are_in_all_forms_of_the_path(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for path in forms(gateway, "/v1/completions"):
            answer = await gateway.call(path, {"model": MODEL, "prompt": "hello"})
            assert (answer.json["object"], answer.json["usage"]["completion_tokens"]) == ("text_completion", 16), path
