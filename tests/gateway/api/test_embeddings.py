"""Requests for vectors through a whole gateway: every body form, what is refused, and what is charged."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from engine.protocol.types import Pooling, RejectReason
from gateway.catalogue.catalogue import BUILT_IN
from gateway.inference.embed import AT_ONCE_MAX
from gateway.settings.config import ModelEntryConfig
from tenants.records.limits import Limits
from tests.support import minilm
from tests.support.served_gateway import PRICE, Served, looped, served
from tests.support.stub_replica import MODEL, spread
from tests.support.waiting import until

WIDTH = 384
TOKENIZER = AutoTokenizer.from_pretrained(minilm.folder())
LONG = "word " * 300


@contextlib.asynccontextmanager
async def vectors(folder: Path, *, model: dict[str, Any] | None = None, **more: Any) -> AsyncIterator[Served]:
    """A gateway whose stub is MiniLM."""
    entry = ModelEntryConfig(name=MODEL, folder=str(minilm.folder()), price=PRICE, **(model or {}))
    async with served(folder, models=[entry], **more) as gateway:
        yield gateway


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


def expected(text: str) -> Any:
    vector = np.array(spread(ids_of(text)), np.float32)
    return vector / np.linalg.norm(vector)


def result(answer: Any) -> Any:
    assert answer.status == 200, answer.content
    return answer.json["result"]


@looped
async def test_one_text_and_several_become_unit_vectors(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        one = await gateway.run(text="Hello world!")
        found = result(one)
        assert found["shape"] == [1, WIDTH]
        assert found["pooling"] == "mean"
        assert np.allclose(found["data"][0], expected("Hello world!"), atol=1e-6)
        assert found["usage"]["prompt_tokens"] == len(ids_of("Hello world!"))
        assert found["usage"]["completion_tokens"] == 0
        assert float(one.headers["cf-ai-neurons"]) == pytest.approx(found["usage"]["neurons"])
        texts = ["a", "Grüße", "漢字 and more"]
        several = result(await gateway.run(text=texts))
        assert several["shape"] == [3, WIDTH]
        for vector, text in zip(several["data"], texts, strict=True):
            assert np.allclose(vector, expected(text), atol=1e-6)


@looped
async def test_text_that_spells_control_tokens_stays_text(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        await gateway.run(text="one [SEP] two [CLS] [PAD] [MASK]")
        ids = np.frombuffer(gateway.fleet.submits[0].tokens, "<u4").tolist()
        control = set(TOKENIZER.all_special_ids)
        assert (ids[0], ids[-1]) == (TOKENIZER.cls_token_id, TOKENIZER.sep_token_id)
        assert control.isdisjoint(ids[1:-1])


@looped
async def test_the_callers_pooling_reaches_the_replica(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        assert result(await gateway.run(text="a", pooling="cls"))["pooling"] == "cls"
        assert [submit.pooling for submit in gateway.fleet.submits] == [Pooling.CLS]


@looped
async def test_the_operators_pooling_is_the_default(tmp_path: Path) -> None:
    async with vectors(tmp_path, model={"pooling": "cls"}) as gateway:
        assert result(await gateway.run(text="a"))["pooling"] == "cls"


@looped
async def test_a_query_makes_scores_of_contexts(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        contexts = [{"text": "far away"}, {"text": "near"}, {"text": "a query"}]
        found = result(await gateway.run(query="a query", contexts=contexts))
        assert [each["id"] for each in found["response"]] == [0, 1, 2]
        scores = [float(expected("a query") @ expected(context["text"])) for context in contexts]
        assert np.allclose([each["score"] for each in found["response"]], scores, atol=1e-5)
        assert found["response"][2]["score"] == pytest.approx(1, abs=1e-5)


@looped
async def test_contexts_alone_become_vectors_under_response(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        found = result(await gateway.run(contexts=[{"text": "a"}, {"text": "b"}]))
        assert found["shape"] == [2, WIDTH]
        assert np.allclose(found["response"][1], expected("b"), atol=1e-6)


@looped
async def test_queries_come_before_documents(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        found = result(await gateway.run(documents=["d"], queries=["q", "r"]))
        assert np.allclose(found["data"], [expected("q"), expected("r"), expected("d")], atol=1e-6)


@looped
async def test_openais_list_of_floats_is_the_native_vectors(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        for path in ("/v1/embeddings", "/ai/v1/embeddings"):
            answer = await gateway.call(path, {"model": MODEL, "input": ["x", "y"], "user": "me"})
            assert answer.status == 200, answer.content
            body = answer.json
            assert (body["object"], body["model"]) == ("list", MODEL)
            assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", 0), ("embedding", 1)]
            assert np.allclose([each["embedding"] for each in body["data"]], [expected("x"), expected("y")], atol=1e-6)
            tokens = len(ids_of("x")) + len(ids_of("y"))
            assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (tokens, tokens)


@looped
async def test_base64_holds_the_same_float32(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        bodies = [{"model": MODEL, "input": "x", "encoding_format": form} for form in ("float", "base64")]
        plain, packed = [(await gateway.call("/v1/embeddings", body)).json["data"][0]["embedding"] for body in bodies]
        assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain


@looped
async def test_token_ids_are_sent_as_they_are(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        ids = ids_of("some text")
        for said, sequences in ((ids, [ids]), ([ids, [101, 102]], [ids, [101, 102]])):
            before = len(gateway.fleet.submits)
            answer = await gateway.call("/v1/embeddings", {"model": MODEL, "input": said})
            assert answer.status == 200, answer.content
            sent = [np.frombuffer(submit.tokens, "<u4").tolist() for submit in gateway.fleet.submits[before:]]
            assert sent == sequences


@looped
async def test_vectors_are_cut_and_have_length_one_again_where_the_model_allows_it(tmp_path: Path) -> None:
    async with vectors(tmp_path, model={"matryoshka": True}) as gateway:
        answer = await gateway.call("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": 16})
        found = np.array(answer.json["data"][0]["embedding"])
        whole = expected("x")[:16]
        assert np.allclose(found, whole / np.linalg.norm(whole), atol=1e-6)
        refused = await gateway.call("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": WIDTH + 1})
        assert (refused.status, refused.code) == (400, 5006)


@looped
async def test_dimensions_are_refused_by_name_where_the_model_does_not_allow_them(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        refused = await gateway.call("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": 16})
        assert (refused.status, refused.code) == (400, 5006)
        assert refused.json["error"]["param"] == "dimensions"
        whole = await gateway.call("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": WIDTH})
        assert whole.status == 200


@looped
async def test_what_is_too_long_is_refused_by_name_or_cut_where_asked(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        refused = await gateway.run(text=["short", LONG])
        assert (refused.status, refused.code) == (400, 3030)
        assert "'text[1]'" in refused.message
        assert not gateway.fleet.submits
        found = result(await gateway.run(text=["short", LONG], truncate_inputs=True))
        cut = TOKENIZER(LONG, truncation=True, max_length=256)["input_ids"]
        assert np.frombuffer(gateway.fleet.submits[1].tokens, "<u4").tolist() == cut
        assert found["usage"]["prompt_tokens"] == len(ids_of("short")) + 256
        assert "set 'truncate_inputs'" in refused.message
        for input in ([101] * 257, LONG):
            ids = await gateway.call("/v1/embeddings", {"model": MODEL, "input": input})
            assert (ids.status, ids.code) == (400, 3030)
            assert "truncate_inputs" not in ids.message, "there is no such field of OpenAI's"


@looped
async def test_a_native_body_that_is_wrong_is_refused_by_its_field(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"text": ["a"] * 101}, "text"),
        ({"text": 5}, "text"),
        ({"text": ["a", 5]}, "text[1]"),
        ({"contexts": []}, "contexts"),
        ({"contexts": ["a"]}, "contexts[0]"),
        ({"text": "a", "pooling": "last"}, "pooling"),
        ({"text": "a", "query": "b"}, "query"),
        ({"text": "a", "instruction": "b"}, "instruction"),
        ({"queries": "a", "instruction": "b"}, "instruction"),
        ({"text": "a", "model": "@cf/another/model"}, "model"),
        ({"text": "a", "stream": True}, "stream"),
    ]
    async with vectors(tmp_path) as gateway:
        for body, field in wrong:
            refused = await gateway.run(**body)
            assert (refused.status, refused.code) == (400, 5006)
            assert f"'{field}'" in refused.message
        for none_or_two in ({}, {"text": "a", "contexts": [{"text": "b"}]}, {"query": "a"}):
            refused = await gateway.run(**none_or_two)
            assert (refused.status, refused.code) == (400, 5006)
            assert "oneOf at '/' not met" in refused.message
        assert not gateway.fleet.submits


@looped
async def test_an_openai_body_that_is_wrong_is_refused_by_its_field(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [40000]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({}, "input"),
    ]
    async with vectors(tmp_path) as gateway:
        for body, field in wrong:
            refused = await gateway.call("/v1/embeddings", {"model": MODEL, **body})
            assert (refused.status, refused.code) == (400, 5006)
            assert refused.json["error"]["param"] == field
        assert not gateway.fleet.submits


@looped
async def test_a_model_of_another_task_names_the_right_path(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        asks = [
            ("/v1/embeddings", {"model": BUILT_IN, "input": "a"}, "/v1/chat/completions"),
            ("/v1/rerank", {"model": BUILT_IN, "query": "a", "documents": ["b"]}, "/v1/chat/completions"),
            (
                "/v1/chat/completions",
                {"model": MODEL, "messages": [{"role": "user", "content": "a"}]},
                "/v1/embeddings",
            ),
        ]
        for path, body, right in asks:
            refused = await gateway.call(path, body)
            assert (refused.status, refused.code) == (400, 5007)
            assert right in refused.message
        wrong_form = await gateway.run(prompt="a")
        assert (wrong_form.status, wrong_form.code) == (400, 5006)


@looped
async def test_a_request_is_one_record_and_what_it_says_is_charged(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        found = result(await gateway.run(text=["one", "two words", "three more words"]))
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.outcome == "done"
        assert record.prompt_tokens == found["usage"]["prompt_tokens"]
        assert record.completion_tokens == 0
        assert record.neurons == pytest.approx(record.prompt_tokens * PRICE.input / 1e6)
        assert record.neurons == pytest.approx(found["usage"]["neurons"])


@looped
async def test_tokens_found_in_a_cache_are_charged_as_such(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        gateway.behaviour.announce, gateway.behaviour.cached_tokens = True, 2
        usage = result(await gateway.run(text=["one two three", "four five six"]))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.cached_tokens == 4


@looped
async def test_what_exceeds_a_limit_is_refused_before_it_runs(tmp_path: Path) -> None:
    async with vectors(tmp_path, limits=Limits(neurons_per_day=0.01)) as gateway:
        assert (await gateway.run(text="hi")).status == 200
        refused = await gateway.run(text=["hello there"] * 50)
        assert (refused.status, refused.code) == (429, 4006)
        assert int(refused.headers["retry-after"]) > 0
        assert len(gateway.fleet.submits) == 1


@looped
async def test_one_failing_text_fails_the_request_once_and_cancels_the_others(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        gateway.behaviour.fail_at, gateway.behaviour.announce = 0, True
        failed = await gateway.run(text=["one", "two"])
        assert (failed.status, failed.code) == (500, 5000)
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.outcome == "failed"


@looped
async def test_a_client_that_leaves_ends_all_of_its_texts(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        gateway.behaviour.first_s = 30.0
        client = await gateway.client()
        await client.post(gateway.run_path, {"text": ["a", "b", "c"]}, gateway.headers)
        await until(lambda: gateway.fleet.running == 3)
        client.leave()
        await gateway.settled()
        (record,) = await gateway.records()
        assert (record.outcome, record.prompt_tokens, record.neurons) == ("client_gone", 0, 0)
        assert len(gateway.fleet.replicas[0].cancels) == 3


@looped
async def test_a_client_that_leaves_pays_for_every_text_that_was_begun(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        gateway.behaviour.first_s, gateway.behaviour.announce = 30.0, True
        texts = ["one", "two words", "three more words"]
        client = await gateway.client()
        await client.post(gateway.run_path, {"text": texts}, gateway.headers)
        await until(lambda: gateway.fleet.running == 3)
        await asyncio.sleep(0.1)
        client.leave()
        await gateway.settled()
        (record,) = await gateway.records()
        assert (record.outcome, record.prompt_tokens) == ("client_gone", sum(len(ids_of(text)) for text in texts))


@looped
async def test_no_more_texts_of_a_request_are_at_replicas_than_may_be(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        gateway.behaviour.first_s = 0.3
        count = AT_ONCE_MAX + 40
        asking = asyncio.create_task(
            gateway.call("/v1/embeddings", {"model": MODEL, "input": [f"text {i}" for i in range(count)]})
        )
        await until(lambda: gateway.fleet.running >= AT_ONCE_MAX)
        assert gateway.fleet.running == AT_ONCE_MAX
        answer = await asking
        assert len(answer.json["data"]) == count


@looped
async def test_a_lost_replicas_texts_go_to_another_one_and_are_charged_once(tmp_path: Path) -> None:
    async with vectors(tmp_path, replicas=2) as gateway:
        gateway.behaviour.first_s, gateway.behaviour.announce = 0.3, True
        texts = [f"text number {i}" for i in range(40)]
        asking = asyncio.create_task(gateway.run(text=texts))
        await until(lambda: all(replica.running for replica in gateway.fleet.replicas))
        gateway.fleet.replicas[0].die()
        found = result(await asking)
        for vector, text in zip(found["data"], texts, strict=True):
            assert np.allclose(vector, expected(text), atol=1e-6)
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.prompt_tokens == sum(len(ids_of(text)) for text in texts)
        assert (await gateway.run(text=texts)).status == 200, "one crash is one, however many texts it lost"


@looped
async def test_a_busy_replica_is_told_with_when_to_come_back(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        gateway.behaviour.reject = RejectReason.BUSY
        refused = await gateway.run(text=["a", "b"])
        assert (refused.status, refused.code) == (429, 3040)
        assert int(refused.headers["retry-after"]) == 2
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.prompt_tokens == 0


@looped
async def test_a_request_past_its_time_ends_with_408(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        gateway.behaviour.first_s = 30.0
        refused = await gateway.run(text="a", options={"requestTimeoutMs": 200})
        assert (refused.status, refused.code) == (408, 3046)
        await gateway.settled()


@looped
async def test_long_texts_are_encoded_beside_other_requests(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        many = [f"a text of some words, number {i}" for i in range(100)]
        one, other = await asyncio.gather(gateway.run(text=many), gateway.run(text="a"))
        assert result(one)["shape"] == [100, WIDTH]
        assert result(other)["shape"] == [1, WIDTH]


@looped
async def test_nothing_is_kept_of_a_text_that_asks_for_it(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        answer = await gateway.call(gateway.run_path, {"text": "secret"}, cf_aig_zdr="true")
        assert np.allclose(result(answer)["data"][0], expected("secret"), atol=1e-6)
        (submit,) = gateway.fleet.submits
        assert submit.terms.erase


@looped
async def test_the_catalogue_says_what_the_model_takes_and_gives(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        found = (await gateway.call("/ai/models/search?task=Text%20Embeddings", b"", "GET")).json["result"]
        (model,) = found
        properties = {each["property_id"]: each["value"] for each in model["properties"]}
        assert (properties["max_input_tokens"], properties["output_dimensions"]) == ("256", str(WIDTH))
        assert {price["unit"] for price in properties["price"]} == {"per M input tokens", "per M cached input tokens"}
        schema = (await gateway.call(f"/ai/models/schema?model={MODEL}", b"", "GET")).json["result"]
        assert "contexts" in schema["input"]["properties"]


@looped
async def test_queued_texts_run_in_the_background_and_are_charged_at_the_batch_price(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        requests = [{"text": "one"}, {"text": ["two", "three"], "external_reference": "mine"}, {"text": LONG}]
        queued = await gateway.call(f"{gateway.run_path}?queueRequest=true", {"requests": requests})
        request_id = result(queued)["request_id"]

        async def ended() -> dict[str, Any] | None:
            polled: dict[str, Any] = result(await gateway.call(gateway.run_path, {"request_id": request_id}))
            return polled if "responses" in polled else None

        found = await until(ended)
        one, two, long = found["responses"]
        assert np.allclose(one["result"]["data"][0], expected("one"), atol=1e-6)
        assert two["result"]["shape"] == [2, WIDTH]
        assert two["external_reference"] == "mine"
        assert (long["success"], long["errors"][0]["code"]) == (False, 3030)
        assert all(submit.terms.background for submit in gateway.fleet.submits)
        done = [record for record in await gateway.records() if record.outcome == "done"]
        assert sum(record.prompt_tokens for record in done) == found["usage"]["prompt_tokens"]
        price = next(iter(gateway.app._serving.endpoint.catalogue)).batch_price
        assert sum(record.neurons for record in done) == pytest.approx(
            sum(record.prompt_tokens for record in done) * price.input / 1e6
        )


@looped
async def test_a_queued_request_that_is_wrong_is_named_with_its_place(tmp_path: Path) -> None:
    async with vectors(tmp_path) as gateway:
        for wrong, said in (({"text": []}, "requests[1].text"), ({"text": "a", "options": {"rejectIfBusy": True}}, "")):
            body = {"requests": [{"text": "fine"}, wrong]}
            refused = await gateway.call(f"{gateway.run_path}?queueRequest=true", body)
            assert (refused.status, refused.code) == (400, 5006)
            assert said in refused.message
