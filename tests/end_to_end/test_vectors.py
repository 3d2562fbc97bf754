"""Vectors and scores as users have them: `hearth serve` with a real encoder, the official clients, and what the
reference library says of the same texts."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudflare
import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, Qwen3Config

from tests.end_to_end.conftest import Hearth, serving
from tests.support import minilm
from tests.support.sdks import client_of

MINILM, RERANKER, DECODER = "@cf/test/minilm", "@cf/test/reranker", "@cf/test/decoder"
TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Two men pushed carts through the woods.",
    "Ein Satz auf Deutsch, mit Umlauten: äöü ß.",
    "x",
    "Long text. " * 40,
]
EMBER = Path(__file__).parents[2] / "engine" / "builtin_model"


def reranker(folder: Path) -> Path:
    """A small one with MiniLM's tokenizer."""
    torch.manual_seed(1)
    config = BertConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((minilm.folder() / name).read_bytes())
    return folder


def decoder(folder: Path) -> Path:
    """A small one with the built-in model's tokenizer, marked as sentence-transformers marks it."""
    torch.manual_seed(2)
    said = json.loads((EMBER / "config.json").read_text())
    config = Qwen3Config(
        vocab_size=said["vocab_size"], hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=512,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"models.{kind}"} for path, kind in modules])
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    prompts = {"prompts": {"query": "Instruct: Find what answers\nQuery:"}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "tokenizer.json").write_bytes((EMBER / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def hearth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearth]:
    folder = tmp_path_factory.mktemp("vectors")
    folders = {
        MINILM: minilm.folder(),
        RERANKER: reranker(folder / "reranker"),
        DECODER: decoder(folder / "decoder"),
    }
    settings = '[[models]]\nname = "@cf/hearth/ember"\nserve = false\n'
    for name, place in folders.items():
        settings += f'[[models]]\nname = "{name}"\nfolder = "{place}"\nmatryoshka = true\n'
    with serving(folder, settings) as running:
        with running.client() as client:
            for name, body in ((RERANKER, {"query": "a", "contexts": [{"text": "b"}]}), (DECODER, {"text": "a"})):
                assert client.post(f"/ai/run/{name}", json=body).status_code == 200
        yield running


@pytest.fixture(scope="module")
def client(hearth: Hearth) -> Iterator[httpx.Client]:
    with hearth.client() as found:
        yield found


@torch.inference_mode()
def reference(texts: Sequence[str]) -> NDArray[np.float32]:
    """Mean of the last states, length 1: what sentence-transformers does with this model."""
    tokenizer, model = AutoTokenizer.from_pretrained(minilm.folder()), AutoModel.from_pretrained(minilm.folder()).eval()
    rows = []
    for text in texts:
        states = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256)).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(rows)


def test_openais_client_gets_the_reference_librarys_vectors(hearth: Hearth) -> None:
    client = client_of(openai.OpenAI, hearth.base_url, hearth.token)
    packed = client.embeddings.create(model=MINILM, input=TEXTS)  # which asks for base64, and unpacks it
    plain = client.embeddings.create(model=MINILM, input=TEXTS, encoding_format="float")
    expected = reference(TEXTS)
    for found in (packed, plain):
        vectors = np.array([each.embedding for each in found.data])
        assert np.abs(vectors - expected).max() < 1e-4
        assert (vectors * expected).sum(1).min() > 1 - 1e-6
        assert [each.index for each in found.data] == list(range(len(TEXTS)))
        assert found.usage.prompt_tokens == found.usage.total_tokens > 100
    short = client.embeddings.create(model=MINILM, input=TEXTS[0], dimensions=64)
    cut = expected[0][:64] / np.linalg.norm(expected[0][:64])
    assert np.abs(np.array(short.data[0].embedding) - cut).max() < 1e-4


def test_openais_client_is_told_what_is_wrong(hearth: Hearth) -> None:
    client = client_of(openai.OpenAI, hearth.base_url, hearth.token)
    with pytest.raises(openai.BadRequestError, match="Sequence too long"):
        client.embeddings.create(model=MINILM, input="long " * 300)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MINILM, input="a", dimensions=1000)
    with pytest.raises(openai.BadRequestError, match="/v1/rerank"):
        client.embeddings.create(model=RERANKER, input="a")
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.chat.completions.create(model=MINILM, messages=[{"role": "user", "content": "a"}])


def test_cloudflares_client_runs_texts(hearth: Hearth) -> None:
    cloud = client_of(cloudflare.Cloudflare, hearth.base_url, hearth.token)
    found: Any = cloud.ai.run(MINILM, account_id=hearth.account_id, text=TEXTS[:3])
    found = found if isinstance(found, dict) else found.to_dict()
    assert found["shape"] == [3, 384]
    assert np.abs(np.array(found["data"]) - reference(TEXTS[:3])).max() < 1e-4


def test_vectors_are_near_where_texts_are_alike(client: httpx.Client) -> None:
    contexts = [{"text": text} for text in TEXTS[1:4]]
    found = client.post(f"/ai/run/{MINILM}", json={"query": TEXTS[0], "contexts": contexts}).json()["result"]
    scores = [each["score"] for each in found["response"]]
    assert scores[0] == max(scores)
    assert np.allclose(scores, reference(TEXTS[1:4]) @ reference(TEXTS[:1])[0], atol=1e-4)


def test_a_reranker_scores_as_the_reference_library_does(hearth: Hearth, client: httpx.Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm.folder())
    model = AutoModelForSequenceClassification.from_pretrained(hearth.folder / "reranker").eval()
    with torch.inference_mode():
        logits = [model(**tokenizer(TEXTS[0], text, return_tensors="pt")).logits[0, 0] for text in TEXTS[1:]]
        expected = torch.stack(logits).sigmoid()
    body = {"model": RERANKER, "query": TEXTS[0], "documents": TEXTS[1:]}
    results = client.post("/v1/rerank", json=body).json()["results"]
    assert [each["index"] for each in results] == expected.argsort(descending=True).tolist()
    for each in results:
        assert each["relevance_score"] == pytest.approx(float(expected[each["index"]]), abs=1e-4)


def test_a_decoders_vectors_are_its_last_states_and_found_in_the_cache_again(
    hearth: Hearth, client: httpx.Client
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBER)
    model = AutoModel.from_pretrained(hearth.folder / "decoder").eval()
    text = "A text of some length, which the cache keeps: " * 4

    def expected(whole: str) -> NDArray[np.float32]:
        ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            states = model(ids).last_hidden_state[0, -1]
        found: NDArray[np.float32] = torch.nn.functional.normalize(states, dim=0).numpy()
        return found

    first, again = (client.post(f"/ai/run/{DECODER}", json={"text": text}).json()["result"] for _ in range(2))
    assert np.abs(np.array(first["data"][0]) - expected(text)).max() < 1e-4
    assert first["data"] == again["data"]
    assert first["pooling"] == "last"
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    for body, prompt in (
        ({"queries": "who?"}, "Instruct: Find what answers\nQuery:"),
        ({"queries": ["who?"], "instruction": "Look"}, "Instruct: Look\nQuery:"),
    ):
        found = client.post(f"/ai/run/{DECODER}", json=body).json()["result"]
        assert np.abs(np.array(found["data"][0]) - expected(prompt + "who?")).max() < 1e-4


def test_the_ledger_has_what_the_answers_said(hearth: Hearth) -> None:
    account_id, token = hearth.account("embeds")
    with hearth.client(token) as client:
        answers = [client.post(f"/ai/run/{MINILM}", json={"text": TEXTS[:count]}) for count in (1, 3, 5)]
    said = [answer.json()["result"]["usage"] for answer in answers]
    for answer, usage in zip(answers, said, strict=True):
        assert float(answer.headers["cf-ai-neurons"]) == pytest.approx(usage["neurons"], abs=1e-6)
    told = json.loads(hearth.command("usage", account_id, "--by", "model", "--json"))
    (row,) = told["rows"]
    assert row["requests"] == 3
    assert row["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in said)
    assert row["neurons"] == pytest.approx(sum(usage["neurons"] for usage in said))
    balanced = hearth.command("usage", "reconcile", account_id)
    assert not re.search(r"\bdiffer", balanced)
