"""The request path over real sockets, with stub replicas behind it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import frames
from engine.protocol.types import FinishReason, RejectReason, Scope, ScopeKind
from gateway.cluster.stream import OutputDelta
from gateway.images.decoder import DecodedImage
from gateway.images.source import ImageSource
from gateway.images.tiling import PictureLayout
from gateway.images.vision import Vision
from gateway.inference.account_lock import AccountLocks
from gateway.inference.lifecycle import InferenceCall
from gateway.inference.pipeline import TextGeneration
from gateway.inference.prompt import Prompt
from gateway.inference.prompt_encoding import EncodedPrompt, decode_prompt_images
from tenants.records.limits import Limits
from tests.support.loop_holds import loop_holds
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL, WORDS
from tests.support.waiting import turns, until

TEN: dict[str, Any] = {"prompt": "hello", "max_tokens": 10}


def words(gateway: Served, ids: list[int]) -> str:
    model = gateway.app._serving.endpoint.catalogue.find(MODEL)
    assert model is not None
    return model.tokenizer.detokenizer([]).push(ids)


def expected(gateway: Served, submit: frames.Submit, count: int = 10, choice: int = 0) -> str:
    """What the stub answers to this submit."""
    at = sum(memoryview(submit.tokens).cast("I")) + choice
    return words(gateway, [WORDS[(at + i) % len(WORDS)] for i in range(count)])


@looped
async def test_whole_and_streamed_answers_are_the_same_text_and_cost(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.cached_tokens = 3
        whole = (await gateway.run(**TEN)).json["result"]
        streamed = (await gateway.run(**TEN, stream=True)).events
        text = expected(gateway, gateway.fleet.submits[0])
        assert whole["response"] == text
        assert whole["tool_calls"] == []
        assert "".join(event["response"] for event in streamed[:-1]) == text
        assert all(8 <= len(event["p"]) < 72 for event in streamed[:-2])
        assert streamed[-1] == "[DONE]"
        assert streamed[-2]["usage"].pop("neurons_left") == {"neurons-per-day": pytest.approx(1e6 - 0.0877, abs=0.01)}
        assert streamed[-2]["usage"] == whole["usage"]
        prompt_tokens = len(gateway.fleet.submits[0].tokens) // 4
        cost = ((prompt_tokens - 3) * 1000 + 3 * 100 + 10 * 4000) / 1e6
        assert whole["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 10,
            "total_tokens": prompt_tokens + 10,
            "prompt_tokens_details": {"cached_tokens": 3},
            "neurons": pytest.approx(cost),
        }


def test_what_comes_behind_the_stop_string_of_a_choice_fails_no_other() -> None:
    prompt, ended = SimpleNamespace(n=2), SimpleNamespace(finish="stop")
    finish = frames.SequenceFinished(1, FinishReason.ERROR, 3, "the model failed in this step")
    work = TextGeneration(prompt, SimpleNamespace())  # type: ignore[arg-type]
    assert work.receive(ended, OutputDelta(0, [], finish=finish), time.monotonic) == ([], [])  # type: ignore[arg-type]


@looped
async def test_every_token_leaves_before_the_next_is_made(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.1
        for native in (True, False):
            body: dict[str, Any] = {"stream": True, "max_tokens": 100}
            message = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
            client = await gateway.client()
            if native:
                await client.post(gateway.run_path, {**body, "prompt": "hello"}, gateway.headers)
            else:
                await client.post("/v1/chat/completions", {**body, **message}, gateway.headers)
            await client.head()
            seen = 0
            async for event in client.events():
                text = event["response"] if native else event["choices"][0]["delta"]["content"]
                if text:
                    seen += 1
                    assert gateway.fleet.replicas[0].emitted == seen
                if seen == 6:
                    break
            client.leave()
            await gateway.settled()


@looped
async def test_one_usage_record_says_what_the_answer_said(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        answer = await gateway.run(**TEN)
        await gateway.settled()
        (record,) = await gateway.records()
        usage = answer.json["result"]["usage"]
        assert record.request_id == answer.headers["x-request-id"]
        assert (record.prompt_tokens, record.completion_tokens) == (usage["prompt_tokens"], 10)
        assert record.neurons == usage["neurons"] == float(answer.headers["cf-ai-neurons"])
        assert (record.outcome, record.model, record.account_id) == ("done", MODEL, gateway.account_id)
        assert 0 < record.first_token_ms <= record.total_ms


@looped
async def test_the_submit_says_all_that_was_asked(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await gateway.chat(
            max_tokens=7, temperature=0.5, seed=9, n=3, logit_bias={"5": 2}, top_logprobs=2, logprobs=True
        )
        (submit,) = gateway.fleet.submits
        assert (submit.max_tokens, submit.n, submit.stop_ids) == (7, 3, [1])
        sampling = submit.sampling
        assert (sampling.temperature, sampling.seed, sampling.logit_bias, sampling.logprobs) == (0.5, 9, {5: 2.0}, 2)
        scope = gateway.accounts.scope(gateway.account_id)
        assert submit.scope == Scope(ScopeKind.TENANT, scope, account=scope)


@looped
async def test_what_a_call_leaves_to_the_model_is_as_its_folder_says(tmp_path: Path) -> None:
    """Natively the temperature stays Workers AI's own, which its schema states."""
    async with served(tmp_path) as gateway:
        catalogue = gateway.app._serving.endpoint.catalogue
        own = {"temperature": 0.25, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.5}
        catalogue.replace([replace(model, sampling=own) for model in catalogue], {})
        await gateway.chat(max_tokens=1)
        await gateway.chat(max_tokens=1, temperature=0, top_p=1, top_k=3, repetition_penalty=1)
        await gateway.run(**TEN)
        message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "model": MODEL}
        for path in ("/v1/messages", "/v1/responses", "/v1/completions"):
            body = {"input": "hello", "prompt": "hello"}
            taken = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path)
            answer = await gateway.call(path, {"model": MODEL, taken: body[taken]} if taken else message)
            assert answer.status == 200, answer.content
        sampled = [
            (each.sampling.temperature, each.sampling.top_k, each.sampling.top_p, each.sampling.repetition_penalty)
            for each in gateway.fleet.submits
        ]
        assert sampled == [(0.25, 20, 0.75, 1.5), (0, 3, 1, 1), (0.6, 20, 0.75, 1.5), *[(0.25, 20, 0.75, 1.5)] * 3]


@looped
async def test_a_request_without_a_seed_gets_a_new_one_each_time(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for _ in range(3):
            await gateway.run(**TEN)
        assert len({submit.sampling.seed for submit in gateway.fleet.submits}) == 3


@looped
async def test_prompt_messages_and_raw_differ_in_their_tokens(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await gateway.run(prompt="hello")
        await gateway.run(messages=[{"role": "user", "content": "hello"}])
        await gateway.run(prompt="hello", raw=True)
        chat, messages, raw = (submit.tokens for submit in gateway.fleet.submits)
        assert chat == messages != raw


@looped
async def test_openai_answers_streamed_and_not_agree(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        whole = (await gateway.chat(n=2, max_tokens=10)).json
        streamed = (await gateway.chat(n=2, max_tokens=10, stream=True, stream_options={"include_usage": True})).events
        texts = {0: "", 1: ""}
        finishes = {}
        for chunk in streamed[:-2]:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                finishes[choice["index"]] = choice["finish_reason"]
        submit = gateway.fleet.submits[0]
        for choice in whole["choices"]:
            assert choice["message"]["content"] == texts[choice["index"]]
            assert texts[choice["index"]] == expected(gateway, submit, choice=choice["index"])
        assert finishes == {0: "length", 1: "length"}
        del streamed[-2]["usage"]["neurons_left"]
        assert streamed[-2]["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] == 20


@looped
async def test_a_stop_token_ends_the_text_and_is_not_shown(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.stop_at = 4
        (choice,) = (await gateway.chat(logprobs=True)).json["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == expected(gateway, gateway.fleet.submits[0], 4)
        assert len(choice["logprobs"]["content"]) == 4


@looped
async def test_a_stop_string_ends_the_text_before_it_and_cancels_the_rest(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.01
        await gateway.run(**TEN)
        text = expected(gateway, gateway.fleet.submits[0], 200)
        stop = text[20:24]
        before = text[: text.index(stop)]
        for stream in (False, True):
            answer = await gateway.run(prompt="hello", max_tokens=2000, stop=[stop], stream=stream)
            shown = (
                "".join(event["response"] for event in answer.events[:-1])
                if stream
                else answer.json["result"]["response"]
            )
            assert shown == before
            usage = answer.events[-2]["usage"] if stream else answer.json["result"]["usage"]
            assert usage["completion_tokens"] < 30
        await gateway.settled()
        assert len(gateway.fleet.replicas[0].cancels) == 2


@looped
async def test_one_choice_stops_while_the_other_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.01
        await gateway.chat(n=2, max_tokens=30)
        submit = gateway.fleet.submits[0]
        first, second = (expected(gateway, submit, 30, choice) for choice in (0, 1))
        stop = next(first[i : i + 5] for i in range(20) if first[i : i + 5] not in second)
        choices = (await gateway.chat(n=2, max_tokens=30, stop=stop)).json["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
        assert choices[0]["message"]["content"] == first[: first.index(stop)]
        assert choices[1]["message"]["content"] == second
        await gateway.settled()
        assert len(gateway.fleet.replicas[0].cancels) == 1


@looped
async def test_logprobs_name_each_token_of_the_text(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        (choice,) = (await gateway.chat(max_tokens=5, logprobs=True, top_logprobs=2)).json["choices"]
        scored = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in scored) == choice["message"]["content"]
        assert all(one["logprob"] == -0.25 and len(one["top_logprobs"]) == 2 for one in scored)
        assert all(bytes(one["bytes"]).decode() == one["token"] for one in scored)
        streamed = (await gateway.chat(max_tokens=5, logprobs=True, top_logprobs=2, stream=True)).events
        chunks = [chunk["choices"][0].get("logprobs") for chunk in streamed[:-1] if "choices" in chunk]
        assert [one for chunk in chunks if chunk for one in chunk["content"]] == scored


@looped
async def test_tool_calls_are_found_whole_and_streamed_in_both_dialects(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        call = '{"name": "rain", "arguments": {"city": "Rome"}}'
        model = gateway.app._serving.endpoint.catalogue.find(MODEL)
        assert model is not None
        gateway.behaviour.script = model.tokenizer.encode_prompt(call)
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": "rain?"}],
            "tools": [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}],
        }
        native = (await gateway.run(**asked)).json["result"]
        assert (native["response"], native["tool_calls"]) == ("", [{"name": "rain", "arguments": {"city": "Rome"}}])
        events = (await gateway.run(**asked, stream=True)).events
        assert [event["tool_calls"] for event in events[:-2]] == [[{"name": "rain", "arguments": {"city": "Rome"}}]]
        (choice,) = (await gateway.chat(**asked)).json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "rain", "arguments": '{"city": "Rome"}'}
        chunks = (await gateway.chat(**asked, stream=True)).events
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "tool_calls"
        (unasked,) = (await gateway.chat(messages=asked["messages"])).json["choices"]
        assert (unasked["finish_reason"], unasked["message"]["content"]) == ("stop", call)


@looped
async def test_text_that_only_begins_like_a_call_is_shown_in_the_end(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        model = gateway.app._serving.endpoint.catalogue.find(MODEL)
        assert model is not None
        gateway.behaviour.script = model.tokenizer.encode_prompt('{"no": "call"}')
        tools = [{"name": "rain", "parameters": {"type": "object"}}]
        answer = await gateway.run(messages=[{"role": "user", "content": "rain?"}], tools=tools, stream=True)
        assert "".join(event["response"] for event in answer.events[:-1]) == '{"no": "call"}'


@looped
async def test_max_tokens_is_cut_to_the_context_and_too_long_a_prompt_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await larger(gateway, 64)
        prompt = "one two three " * 5
        answer = await gateway.run(prompt=prompt, max_tokens=1000)
        usage = answer.json["result"]["usage"]
        assert usage["total_tokens"] == 64
        for stream in (False, True):
            refused = await gateway.run(prompt=prompt * 20, stream=stream)
            assert (refused.status, refused.code) == (400, 3030)
            assert "> 64" in refused.message
        await gateway.settled()
        assert len(await gateway.records()) == 1


@looped
async def test_a_bias_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        refused = await gateway.run(prompt="hello", logit_bias={"6000": 1})
        assert (refused.status, refused.code) == (400, 5006)
        assert "logit_bias" in refused.message
        assert (await gateway.run(prompt="hello", logit_bias={"5999": 1})).status == 200


@looped
async def test_too_many_requests_and_a_used_up_day_say_when_to_come_back(tmp_path: Path) -> None:
    limits = Limits(requests_per_minute=2, neurons_per_day=0.12, burst=2)
    async with served(tmp_path, limits=limits) as gateway:
        assert (await gateway.run(**TEN)).status == 200
        used_up = await gateway.run(prompt="hello " * 100, max_tokens=5000)
        assert (used_up.status, used_up.code) == (429, 4006)
        assert int(used_up.headers["retry-after"]) >= 1
        assert used_up.headers["ratelimit"].startswith('"neurons-per-day";r=0;t=')
        assert (await gateway.run(**TEN)).status == 200
        for call in (gateway.run(**TEN), gateway.run(**TEN, stream=True), gateway.chat(max_tokens=1)):
            refused = await call
            assert (refused.status, refused.code) == (429, 3021)
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["ratelimit-policy"] == '"requests-per-minute";q=2;w=60'
        await gateway.settled()
        assert len(await gateway.records()) == 2


@looped
async def test_answers_say_what_the_limits_have_left(tmp_path: Path) -> None:
    limits = Limits(requests_per_minute=60, neurons_per_day=10, concurrent_requests=3, input_tokens_per_minute=500)
    async with served(tmp_path, limits=limits) as gateway:
        for call in (gateway.run(**TEN), gateway.run(**TEN, stream=True)):
            answer = await call
            assert answer.headers["ratelimit-policy"] == (
                '"neurons-per-day";q=10;w=86400, "requests-per-minute";q=60;w=60, '
                '"input-tokens-per-minute";q=500;w=60, "concurrent-requests";q=3'
            )
        states = dict(part.split(";", 1) for part in answer.headers["ratelimit"].split(", "))
        assert states['"requests-per-minute"'] in ("r=58;t=2", "r=59;t=1")
        assert states['"concurrent-requests"'] == "r=2"
        assert states['"neurons-per-day"'].startswith("r=9;t=")
        tokens = 2 * len(gateway.fleet.submits[0].tokens) // 4
        assert 500 - tokens <= int(states['"input-tokens-per-minute"'].split(";")[0][2:]) <= 500 - tokens + 8


@looped
async def test_a_budget_that_has_less_cuts_the_answer_with_a_reason_of_its_own(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(neurons_per_day=0.12)) as gateway:
        streamed = (await gateway.run(prompt="hello", max_tokens=5000, stream=True)).events
        last = streamed[-2]
        assert last["finish_reason"] == "quota"
        assert last["usage"]["neurons"] <= 0.12
        assert last["usage"]["neurons"] > 0.12 - 0.004, "one token more would have been too much"
        assert last["usage"]["neurons_left"]["neurons-per-day"] == pytest.approx(0.12 - last["usage"]["neurons"])
        assert gateway.fleet.submits[0].max_tokens == last["usage"]["completion_tokens"]
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.neurons == pytest.approx(last["usage"]["neurons"])
        assert (await gateway.run(prompt="hello", max_tokens=1)).status == 429


@looped
async def test_an_openai_choice_that_the_budget_ends_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(neurons_per_day=0.2)) as gateway:
        answer = await gateway.chat(n=2, max_tokens=5000)
        assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["quota", "quota"]
        assert answer.json["usage"]["neurons"] <= 0.2


@looped
async def test_a_model_without_a_replica_is_503_and_charges_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, wait_s=0.1) as gateway:
        path = gateway.run_path.replace(MODEL, "@cf/hearth/ember")
        refused = await gateway.call(path, TEN)
        assert (refused.status, refused.code) == (503, 3040)
        assert int(refused.headers["retry-after"]) >= 1
        await gateway.settled()
        (record,) = await gateway.records()
        assert (record.outcome, record.micro_neurons) == ("unavailable", 0)


@looped
async def test_a_busy_replica_is_429_in_time(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.reject = RejectReason.BUSY
        refused = await gateway.run(**TEN, stream=True)
        assert len(gateway.fleet.submits) == 1, "it was not tried again"
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, 3040, "2")
        gateway.behaviour.reject = RejectReason.TOO_LONG
        refused = await gateway.run(**TEN)
        assert (refused.status, refused.code) == (400, 3030)


@looped
async def test_what_a_replica_rejects_after_it_waited_there_is_told_as_busy_and_costs_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.reject, gateway.behaviour.reject_s = RejectReason.BUSY, 1.3
        whole, streamed = await asyncio.gather(gateway.run(**TEN), gateway.run(**TEN, stream=True))
        assert (whole.status, whole.code, whole.headers["retry-after"]) == (429, 3040, "2")
        assert streamed.status == 200  # its head was sent while it waited
        assert streamed.events[-2]["errors"][0]["code"] == 3040
        assert streamed.events[-1] == "[DONE]"
        await gateway.settled()
        assert [record.micro_neurons for record in await gateway.records()] == [0, 0]


@looped
async def test_a_replica_that_drains_hands_the_request_to_another(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2, wait_s=0.5) as gateway:
        first, second = gateway.fleet.replicas
        gateway.behaviour.reject = RejectReason.DRAINING
        refused = await gateway.run(**TEN)
        assert (refused.status, refused.code) == (503, 3040)
        assert len(gateway.fleet.submits) == 2, "each was asked once"
        gateway.behaviour.reject = None
        second.load()
        first.load(draining=True)
        for _ in range(5):
            assert (await gateway.run(**TEN)).status == 200
        assert len(second.submits) >= 5


@looped
async def test_reject_if_busy_does_not_wait_in_a_queue(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        asked = {**TEN, "options": {"rejectIfBusy": True}}
        assert (await gateway.run(**asked)).status == 200
        gateway.fleet.replicas[0].load(waiting=1)
        known = gateway.app._serving.context.fleet
        await until(lambda: known.busy(MODEL))
        refused = await gateway.run(**asked)
        assert (refused.status, refused.code) == (429, 3040)
        assert (await gateway.call(gateway.run_path + "?rejectIfBusy=true", TEN)).code == 3040
        assert (await gateway.run(**TEN)).status == 200


@looped
async def test_a_replica_lost_before_the_first_token_is_replaced_unseen(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        gateway.behaviour.first_s = 0.2
        call = asyncio.create_task(gateway.run(**TEN, stream=True))
        await until(lambda: gateway.fleet.running)
        (first,) = [replica for replica in gateway.fleet.replicas if replica.running]
        first.die()
        answer = await call
        assert answer.status == 200
        assert answer.events[-2]["usage"]["completion_tokens"] == 10
        assert len(gateway.fleet.submits) == 2
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.outcome == "done"


@looped
async def test_a_replica_lost_in_mid_stream_is_replaced_behind_the_last_token(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        calm = await gateway.chat(max_tokens=10, n=2)
        gateway.behaviour.step_s, gateway.behaviour.cached_tokens = 0.1, 4
        call = asyncio.create_task(gateway.chat(max_tokens=10, n=2, stream=True))
        await until(lambda: sum(replica.emitted for replica in gateway.fleet.replicas) >= 6)
        (first,) = [replica for replica in gateway.fleet.replicas if replica.running]
        gateway.behaviour.cached_tokens = 9  # where it goes on: no part of what the client is told
        first.die()
        answer = await call
        texts = ["", ""]
        for event in answer.events[:-1]:
            for piece in event["choices"]:
                texts[piece["index"]] += piece["delta"].get("content") or ""
        assert texts == [choice["message"]["content"] for choice in calm.json["choices"]]
        (resumed,) = [submit for submit in gateway.fleet.submits if submit.given]
        assert [given.choice for given in resumed.given] == [0, 1]
        assert all(given.tokens for given in resumed.given)
        await gateway.settled()
        told = sorted(
            (record.outcome, record.completion_tokens, record.cached_tokens) for record in await gateway.records()
        )
        assert told == [("done", 20, 0), ("done", 20, 4)]


@pytest.mark.parametrize("dialect", ["native", "openai"])
def test_a_request_whose_replicas_die_again_and_again_ends_with_an_error_and_done(tmp_path: Path, dialect: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path, replicas=2) as gateway:
            gateway.behaviour.step_s, gateway.behaviour.die_at = 0.01, 4
            asked = {"max_tokens": 10, "stream": True}
            native = dialect == "native"
            answer = await (gateway.run(prompt="hello", **asked) if native else gateway.chat(**asked))
            assert answer.status == 200
            *_, error, done = answer.events
            assert done == "[DONE]"
            assert error["errors"][0]["code"] == 5000
            assert error["success"] is False
            assert error["error"]["code"] == "replica_lost", "OpenAI's member is on every path"
            await gateway.settled()
            (record,) = await gateway.records()
            assert (record.outcome, record.completion_tokens) == ("replica_lost", 4)
            assert record.micro_neurons == record.prompt_tokens * 1000 + 4 * 4000

    call()


@looped
async def test_a_whole_answer_cut_short_is_a_500_with_the_envelope(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.fail_at = 3
        refused = await gateway.run(**TEN)
        assert (refused.status, refused.code) == (500, 5000)
        assert "the stub was told to fail" in refused.message
        streamed = await gateway.run(**TEN, stream=True)
        assert streamed.events[-1] == "[DONE]"


@looped
async def test_a_request_that_was_in_two_crashes_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        gateway.behaviour.die_at, gateway.behaviour.first_s = 0, 0.05
        gateway.behaviour.announce, gateway.behaviour.cached_tokens = True, 4
        first = await gateway.run(**TEN)
        assert (first.status, first.code) == (500, 5000)
        deaths = sum(replica.deaths for replica in gateway.fleet.replicas)
        assert deaths == 2
        gateway.behaviour.die_at = None
        refused = await gateway.run(**TEN)
        assert (refused.status, refused.code) == (422, 5012)
        assert (await gateway.run(prompt="another one")).status == 200
        await gateway.settled()
        records = await gateway.records()
        assert sorted(record.outcome for record in records) == ["done", "replica_lost"]
        assert {record.micro_neurons for record in records if record.outcome != "done"} == {0}


@looped
async def test_a_request_that_lives_too_long_is_ended(tmp_path: Path) -> None:
    async with served(tmp_path, request_s=0.3) as gateway:
        gateway.behaviour.step_s = 0.05
        refused = await gateway.run(prompt="hello", max_tokens=1000)
        assert (refused.status, refused.code) == (408, 3046)
        streamed = await gateway.run(prompt="hello", max_tokens=1000, stream=True)
        assert streamed.events[-2]["errors"][0]["code"] == 3046
        await gateway.settled()


async def larger(gateway: Served, context_tokens: int) -> None:
    """The replica comes back with another context."""
    gateway.behaviour.context_tokens = context_tokens
    gateway.fleet.replicas[0].die()
    known = gateway.app._serving.context.fleet
    await until(lambda: (hello := known.hello(MODEL)) is not None and hello.context_tokens == context_tokens)


@looped
async def test_a_long_prompt_is_encoded_beside_the_streams(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await larger(gateway, 1_000_000)
        gateway.behaviour.step_s = 0.005
        client = await gateway.client()
        await client.post(gateway.run_path, {"prompt": "hello", "max_tokens": 5000, "stream": True}, gateway.headers)
        await client.head()
        events = client.events()
        await anext(events)
        began_s = time.process_time()
        async with loop_holds() as holds:
            answer = await gateway.run(prompt="a long story about nothing at all " * 30_000, max_tokens=1)
        took_s = time.process_time() - began_s
        assert answer.status == 200
        assert holds.longest_ms < 1000 * took_s / 4
        await anext(events)
        client.leave()


def test_streams_wait_where_a_long_prompt_is_encoded_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compute(self: InferenceCall, function: Callable[[], Any]) -> Any:
        return function()

    monkeypatch.setattr(InferenceCall, "compute", compute)
    with pytest.raises(AssertionError, match="longest_ms"):
        test_a_long_prompt_is_encoded_beside_the_streams(tmp_path)


@looped
async def test_a_prompt_that_cannot_fit_is_not_even_encoded(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        began = time.process_time()  # what else runs here is left out, all threads of this test counted
        refused = await gateway.run(prompt="a long story about nothing at all " * 250_000)
        assert (refused.status, refused.code) == (400, 3030)
        assert time.process_time() - began < 1


@looped
async def test_what_is_wrong_reserves_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for body in (b"", b"{", {"prompt": 5}, {"prompt": "a", "colour": 1}, {"prompt": "a", "max_tokens": -1}):
            assert (await gateway.call(gateway.run_path, body)).status == 400
        assert (await gateway.call(gateway.run_path.replace("stub", "unknown"), TEN)).code == 5007
        assert (await gateway.call(gateway.run_path, {"prompt": "x"}, authorization="Bearer junk")).status == 401
        await gateway.settled()
        assert await gateway.records() == []
        assert not gateway.fleet.submits


@looped
async def test_a_request_leaves_one_line_in_the_journal_and_no_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.cached_tokens = 2
        with caplog.at_level("INFO"):
            answer = await gateway.run(prompt="my secret", max_tokens=3)
            await gateway.settled()
        (line,) = [record for record in caplog.records if record.getMessage() == "request_ended"]
        fields: dict[str, Any] = line.fields  # type: ignore[attr-defined]
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        usage = answer.json["result"]["usage"]
        assert fields.pop("total_ms") >= fields.pop("first_token_ms") > 0
        assert fields.pop("gateway_ms") >= 0
        assert fields == {
            "request": answer.headers["x-request-id"],
            "account": gateway.account_id,
            "token": token.id,
            "model": MODEL,
            "outcome": "done",
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": 2,
            "completion_tokens": 3,
        }
        assert "secret" not in caplog.text


@looped
async def test_images_of_an_account_are_decoded_one_call_after_the_other() -> None:
    """Pictures that are slow to decode would else keep the few processes from all other accounts."""
    decoding, go, locks = list[str](), asyncio.Event(), AccountLocks()

    class Decoder:
        async def decode(self, images: tuple[ImageSource, ...], *_: object) -> list[DecodedImage]:
            decoding.append(images[0].field)
            await go.wait()
            return [DecodedImage(bytes(32), b"") for _ in images]

    async def decoded(account: str, field: str) -> None:
        prompt = Prompt(images=(ImageSource(b"x", None, field),))
        call: Any = SimpleNamespace(
            context=SimpleNamespace(account_locks=locks, images=Decoder()),
            caller=SimpleNamespace(account=SimpleNamespace(id=account)),
            model=SimpleNamespace(vision=Vision(1, 2, 1, 7, "", "", 7)),
        )
        assert len(await decode_prompt_images(call, prompt, EncodedPrompt([1, 7], [PictureLayout(1, 1)]))) == 1

    async with asyncio.TaskGroup() as tasks:
        for account, field in (("ann", "ann 1"), ("ann", "ann 2"), ("ann", "ann 3"), ("bob", "bob 1")):
            tasks.create_task(decoded(account, field))
        await turns(20)
        assert decoding == ["ann 1", "bob 1"]
        async with asyncio.timeout(10), locks.lock("ann"):  # its texts are encoded meanwhile
            go.set()
    assert decoding == ["ann 1", "bob 1", "ann 2", "ann 3"]
