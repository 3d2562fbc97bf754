"""Bad input at a whole Hearth: the documented status and code, words that help, nothing reserved or left behind."""

from typing import Any

import pytest

from tests.end_to_end.conftest import EMBER, Hearth
from tests.end_to_end.ledger import read_totals

NATIVE = f"/ai/run/{EMBER}"
HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({}, 400, 5006, "prompt"),
        ({"prompt": ""}, 400, 5006, "prompt"),
        ({"prompt": 7}, 400, 5006, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, 5006, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, 400, 5006, "max_tokens"),
        ({"prompt": "x", "temperature": 9}, 400, 5006, "temperature"),
        ({"prompt": "x", "colour": "red"}, 400, 5006, "colour"),
        ({"prompt": "x", "lora": "mine"}, 405, 5005, "lora"),
        ({"messages": []}, 400, 5006, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, 5006, "role"),
        ({"prompt": "word " * 12000}, 400, 3030, "8192"),
    ],
)
def test_a_bad_body_is_refused_in_words(
    hearth: Hearth, body: dict[str, Any], status: int, code: int, words: str
) -> None:
    with hearth.client() as client:
        said = client.post(NATIVE, json=body)
    assert said.status_code == status, said.text
    found = said.json()
    assert found["success"] is False
    assert found["errors"][0]["code"] == code, said.text
    assert words in found["errors"][0]["message"]


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("{", 400, 5006),
        ('{"prompt": "a", "prompt": "b"}', 400, 5006),
        ('{"prompt": "a", "temperature": NaN}', 400, 5006),
        ('{"prompt": ' + "[" * 100 + "]" * 100 + "}", 400, 5006),
        ('{"prompt": "' + "a" * 10_100_000 + '"}', 413, 3006),
    ],
)
def test_malformed_and_oversized_json_is_refused(hearth: Hearth, text: str, status: int, code: int) -> None:
    with hearth.client() as client:
        said = client.post(NATIVE, content=text, headers={"Content-Type": "application/json"})
    assert (said.status_code, said.json()["errors"][0]["code"]) == (status, code), said.text[:500]


def test_an_empty_body_is_named(hearth: Hearth) -> None:
    with hearth.client() as client:
        said = client.post(NATIVE)
    assert (said.status_code, said.json()["errors"][0]["code"]) == (400, 3003), said.text


def test_wrong_credentials_and_foreign_accounts_are_refused_alike(hearth: Hearth) -> None:
    foreign, foreign_token = hearth.account("foreign")
    body = {"prompt": "Hello"}
    with hearth.client() as client:
        junk = client.post(NATIVE, json=body, headers={"Authorization": "Bearer junk"})
        none = client.post(NATIVE, json=body, headers={"Authorization": ""})
        over = client.post(f"/client/v4/accounts/{foreign}/ai/run/{EMBER}", json=body)
        missing = client.post(f"/client/v4/accounts/{'0' * 32}/ai/run/{EMBER}", json=body)
    altered = foreign_token[:-1] + ("A" if foreign_token[-1] != "A" else "B")
    with hearth.client(altered) as client:
        forged = client.post(NATIVE, json=body)
    assert (junk.status_code, junk.json()["errors"][0]["code"]) == (401, 9106), junk.text
    assert none.status_code == 401, none.text
    assert forged.status_code == 401, forged.text
    assert over.status_code == missing.status_code == 403
    assert over.json()["errors"] == missing.json()["errors"]


def test_unknown_models_and_routes_are_named(hearth: Hearth) -> None:
    with hearth.client() as client:
        model = client.post("/ai/run/@cf/meta/nothing", json={"prompt": "Hello"})
        route = client.post("/ai/walk", json={})
        method = client.get(NATIVE)
        openai = client.post("/v1/chat/completions", json={"model": "nothing", "messages": [HELLO]})
    assert (model.status_code, model.json()["errors"][0]["code"]) == (400, 5007), model.text
    assert route.status_code == 404
    assert method.status_code == 405
    assert openai.status_code == 404
    assert openai.json()["error"]["code"] == "model_not_found"
    assert openai.json()["success"] is False


def test_refused_calls_leave_nothing_behind(hearth: Hearth) -> None:
    account, token = hearth.account("refused", "--neurons-per-day", "50")
    with hearth.client(token) as client:
        for body in ({}, {"prompt": 7}, {"prompt": "word " * 12000}, {"prompt": "x", "colour": 1}) * 10:
            assert client.post(NATIVE, json=body).status_code == 400
        said = client.post(NATIVE, json={"prompt": "Hello", "max_tokens": 1})
    assert said.status_code == 200, said.text
    assert read_totals(hearth.folder, account).requests <= 1
