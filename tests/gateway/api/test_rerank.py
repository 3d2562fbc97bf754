"""Requests for scores through a whole gateway: the native form and `/v1/rerank`, by a reranker and by vectors."""

import contextlib
import json
import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from engine.protocol.types import Pooling
from gateway.settings.config import ModelEntryConfig
from tests.support import minilm
from tests.support.served_gateway import PRICE, Served, looped, served
from tests.support.stub_replica import MODEL

TOKENIZER = AutoTokenizer.from_pretrained(minilm.folder())
DOCUMENTS = ["of middling length here", "short", "by far the longest of all of these documents"]


def reranker(folder: Path) -> Path:
    """MiniLM's tokenizer with the config of a model that scores."""
    made = folder / "reranker"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm.folder() / name, made / name)
    said = json.loads((minilm.folder() / "config.json").read_text())
    said |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (made / "config.json").write_text(json.dumps(said))
    return made


@contextlib.asynccontextmanager
async def scoring(folder: Path) -> AsyncIterator[Served]:
    """A gateway whose stub scores pairs by their length."""
    async with served(
        folder, models=[ModelEntryConfig(name=MODEL, folder=str(reranker(folder)), price=PRICE)]
    ) as gateway:
        gateway.behaviour.numbers = lambda ids: [(len(ids) - 12) / 4]
        yield gateway


def score(document: str) -> float:
    return 1 / (1 + math.exp(-(len(TOKENIZER("a query", document)["input_ids"]) - 12) / 4))


@looped
async def test_contexts_are_scored_as_pairs_and_told_best_first(tmp_path: Path) -> None:
    async with scoring(tmp_path) as gateway:
        contexts = [{"text": text} for text in DOCUMENTS]
        answer = await gateway.run(query="a query", contexts=contexts)
        found = answer.json["result"]
        assert [each["id"] for each in found["response"]] == [2, 0, 1]
        for each in found["response"]:
            assert each["score"] == pytest.approx(score(DOCUMENTS[each["id"]]))
        sent = [np.frombuffer(submit.tokens, "<u4").tolist() for submit in gateway.fleet.submits]
        assert sent == [TOKENIZER("a query", text)["input_ids"] for text in DOCUMENTS]
        assert {submit.pooling for submit in gateway.fleet.submits} == {Pooling.SCORE}
        assert found["usage"]["prompt_tokens"] == sum(map(len, sent))
        assert float(answer.headers["cf-ai-neurons"]) == pytest.approx(sum(map(len, sent)) * PRICE.input / 1e6)


@looped
async def test_top_k_are_the_best_ones(tmp_path: Path) -> None:
    async with scoring(tmp_path) as gateway:
        contexts = [{"text": text} for text in DOCUMENTS]
        found = (await gateway.run(query="a query", contexts=contexts, top_k=2)).json["result"]
        assert [each["id"] for each in found["response"]] == [2, 0]


@looped
async def test_v1_rerank_answers_results_and_their_documents_where_asked(tmp_path: Path) -> None:
    async with scoring(tmp_path) as gateway:
        body = {"model": MODEL, "query": "a query", "documents": DOCUMENTS, "top_n": 2}
        answer = await gateway.call("/v1/rerank", body)
        assert [each["index"] for each in answer.json["results"]] == [2, 0]
        assert [each["relevance_score"] for each in answer.json["results"]] == [
            pytest.approx(score(DOCUMENTS[index])) for index in (2, 0)
        ]
        assert answer.json["model"] == MODEL
        assert answer.json["usage"]["total_tokens"] > 0
        assert "document" not in answer.json["results"][0]
        documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
        shown = await gateway.call("/ai/v1/rerank", {**body, "documents": documents, "return_documents": True})
        assert shown.json["results"][0]["document"] == {"text": DOCUMENTS[2]}
        assert shown.json["results"][1]["document"] == {"text": DOCUMENTS[0]}


@looped
async def test_a_long_document_is_refused_by_name_or_cut_where_asked(tmp_path: Path) -> None:
    async with scoring(tmp_path) as gateway:
        long = "word " * 600
        contexts = [{"text": "short"}, {"text": long}]
        refused = await gateway.run(query="a query", contexts=contexts)
        assert (refused.status, refused.code) == (400, 3030)
        assert "'contexts[1].text'" in refused.message
        cut = await gateway.run(query="a query", contexts=contexts, truncate_inputs=True)
        assert cut.status == 200
        expected = TOKENIZER("a query", long, truncation="only_second", max_length=512)["input_ids"]
        assert np.frombuffer(gateway.fleet.submits[-1].tokens, "<u4").tolist() == expected
        query = await gateway.run(query=long, contexts=contexts, truncate_inputs=True)
        assert (query.status, query.code) == (400, 3030)
        assert "'query'" in query.message


@looped
async def test_a_reranker_gives_no_vectors(tmp_path: Path) -> None:
    async with scoring(tmp_path) as gateway:
        refused = await gateway.call("/v1/embeddings", {"model": MODEL, "input": "a"})
        assert (refused.status, refused.code) == (400, 5007)
        assert "/v1/rerank" in refused.message
        searched = (await gateway.call("/ai/models/search?task=Text%20Classification", b"", "GET")).json["result"]
        assert [model["name"] for model in searched] == [MODEL]
        assert "output_dimensions" not in {each["property_id"] for each in searched[0]["properties"]}


@looped
async def test_a_model_that_gives_vectors_reranks_by_their_cosines(tmp_path: Path) -> None:
    async with served(tmp_path, models=[ModelEntryConfig(name=MODEL, folder=str(minilm.folder()))]) as gateway:
        body = {"model": MODEL, "query": "short", "documents": DOCUMENTS}
        results = (await gateway.call("/v1/rerank", body)).json["results"]
        assert results[0]["index"] == 1
        assert results[0]["relevance_score"] == pytest.approx(1, abs=1e-5)
        assert len(results) == 3


@looped
async def test_a_body_that_is_wrong_is_refused_by_its_field(tmp_path: Path) -> None:
    native: list[tuple[dict[str, Any], str]] = [
        ({"query": "a"}, "contexts"),
        ({"contexts": [{"text": "a"}]}, "query"),
        ({"query": "", "contexts": [{"text": "a"}]}, "query"),
        ({"query": "a", "contexts": []}, "contexts"),
        ({"query": "a", "contexts": [{"text": "a"}] * 101}, "contexts"),
        ({"query": "a", "contexts": [{"text": "a"}], "top_k": 0}, "top_k"),
        ({"query": "a", "contexts": [{"text": ""}]}, "contexts[0].text"),
        ({"query": "a", "contexts": [{"text": "a"}], "pooling": "cls"}, "pooling"),
    ]
    common: list[tuple[dict[str, Any], str]] = [
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a"] * 1001}, "documents"),
        ({"query": "a", "documents": ["a", 5]}, "documents[1]"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ]
    async with scoring(tmp_path) as gateway:
        for body, field in native:
            refused = await gateway.run(**body)
            assert (refused.status, refused.code) == (400, 5006)
            assert f"'{field}'" in refused.message
        for body, field in common:
            refused = await gateway.call("/v1/rerank", {"model": MODEL, **body})
            assert (refused.status, refused.code) == (400, 5006)
            assert refused.json["error"]["param"] == field
        assert not gateway.fleet.submits


@looped
async def test_scores_far_from_zero_stay_numbers(tmp_path: Path) -> None:
    async with scoring(tmp_path) as gateway:
        for raw, mapped in ((1e4, 1.0), (-1e4, 0.0)):
            gateway.behaviour.numbers = lambda ids, raw=raw: [raw]  # type: ignore[misc]
            found = (await gateway.run(query="a", contexts=[{"text": "b"}])).json["result"]
            assert found["response"][0]["score"] == mapped
