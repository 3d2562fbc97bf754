"""Streams whose replica is lost in the middle: real replicas on the CPU, a gateway, and what its clients receive, which
is what they would have received without that."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cut_replica import CutReplica, real_replicas
from tests.support.served_gateway import Served, looped, served

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 60}},
            "required": ["word"],
        },
    },
}
STORY = [
    {"role": "system", "content": "You work for the Harbour Library. The Wi-Fi password is QUILL-4821."},
    {"role": "user", "content": "Tell me a long story about the harbour."},
]
DOCUMENT = {"max_tokens": 120, "response_format": {"type": "json_schema", "json_schema": SCHEMA}}
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2}
ENDLESS = {"max_tokens": 40, "ignore_eos": True}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, **ENDLESS},
    "seed": {"temperature": 1.3, "seed": 11, **ENDLESS},
    "four": {"temperature": 1.3, "seed": 12, "max_tokens": 30, "n": 4},
    "logprobs": {"temperature": 0.9, "seed": 13, "logprobs": True, "top_logprobs": 3, **ENDLESS},
    "penalties": {"temperature": 0.8, "seed": 14, **PENALTIES, **ENDLESS},
    "min_tokens": {"temperature": 1.0, "seed": 15, "max_tokens": 40, "min_tokens": 35},
    "schema": {"temperature": 1.1, "seed": 16, **DOCUMENT},
    "schema_of_two": {"temperature": 1.1, "seed": 17, "n": 2, **DOCUMENT},
    "tools": {"temperature": 1.2, "seed": 18, "max_tokens": 120, "tools": [TOOL], "tool_choice": "required"},
    "top": {"temperature": 1.5, "seed": 19, "top_p": 0.9, "top_k": 40, **ENDLESS},
}
_OWN = ("id", "created")  # of each answer


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with real_replicas(tmp_path_factory.mktemp("replicas"), 2) as addresses:
        yield addresses


def relays(folder: Path, addresses: list[str]) -> list[CutReplica]:
    return [CutReplica(folder / f"relay-{index}.sock", address) for index, address in enumerate(addresses)]


def shape(gathered: list[Any]) -> list[tuple[Any, ...]]:
    """What a stream says of each choice, however its tokens were put into events."""
    choices: dict[int, dict[str, Any]] = {}
    for event in gathered:
        for piece in event.get("choices", []) if isinstance(event, dict) else []:
            seen = choices.setdefault(piece["index"], {"text": "", "calls": "", "scores": [], "finish": None})
            delta = piece["delta"]
            seen["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                seen["calls"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            seen["scores"] += (piece.get("logprobs") or {}).get("content") or []
            seen["finish"] = piece.get("finish_reason") or seen["finish"]
    return [(index, *choices[index].values()) for index in sorted(choices)]


def timeless(answer: Any) -> Any:
    """A whole answer without what is another's in each."""
    answer = copy.deepcopy(answer)
    for name in (*_OWN, "usage"):
        answer.pop(name, None)
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls") or []:
            call.pop("id")
    return answer


async def disturbed(gateway: Served, cuts: list[int], **asked: Any) -> Any:
    """The call's answer, while its host is lost after so many tokens: that of one replica, then that of the other."""

    def lose_machine() -> None:
        for machine in list(gateway.fleet.machines):
            machine.close()

    replicas = gateway.fleet.replicas
    submits = [len(replica.submits) for replica in replicas]
    for replica, tokens in zip(replicas, cuts, strict=True):
        assert isinstance(replica, CutReplica)
        replica.cut_in, replica.on_cut = tokens, lose_machine
    answer = await gateway.chat(**asked)
    for replica in replicas:
        assert isinstance(replica, CutReplica)
        replica.cut_in = None
    new = [submit for replica, before in zip(replicas, submits, strict=True) for submit in [*replica.submits][before:]]
    assert any(submit.given for submit in new), "it was cut where there was nothing to lose"
    return answer


@pytest.mark.parametrize("name", CASES)
def test_a_stream_whose_replica_is_lost_goes_on_as_if_it_were_not(
    name: str, addresses: list[str], tmp_path: Path
) -> None:
    asked = {"messages": STORY, **CASES[name]}

    @looped
    async def call() -> None:
        async with served(tmp_path, relays=relays(tmp_path, addresses)) as gateway:
            calm = await gateway.chat(**asked)
            assert calm.status == 200, calm.content
            calm_stream = await gateway.chat(**asked, stream=True)
            whole = await disturbed(gateway, [7, 9], **asked)
            assert timeless(whole.json) == timeless(calm.json)
            assert whole.json["usage"]["completion_tokens"] == calm.json["usage"]["completion_tokens"]
            streamed = await disturbed(gateway, [5, 12], **asked, stream=True)
            assert shape(streamed.events) == shape(calm_stream.events)
            await gateway.settled()
            charged = {(record.prompt_tokens, record.completion_tokens) for record in await gateway.records()}
            assert len(charged) == 1, "each was charged once for its prompt and its tokens"

    call()


def test_a_stop_string_across_the_cut_ends_the_text_there(addresses: list[str], tmp_path: Path) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path, relays=relays(tmp_path, addresses)) as gateway:
            asked = {"messages": STORY, **CASES["seed"]}
            whole = (await gateway.chat(**asked)).json
            text, total = whole["choices"][0]["message"]["content"], whole["usage"]["completion_tokens"]
            middle = len(text) // 2
            stop = text[middle - 12 : middle + 12]
            expected = text[: text.index(stop)]
            for tokens in range(total // 2 - 8, total // 2 + 2, 3):  # one of these falls within its tokens
                answer = await disturbed(gateway, [tokens, tokens], **asked, stop=[stop])
                assert answer.json["choices"][0]["message"]["content"] == expected
                assert answer.json["choices"][0]["finish_reason"] == "stop"

    call()
