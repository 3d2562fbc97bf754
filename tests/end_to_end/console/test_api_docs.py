"""The page of the API in a real browser: every operation and field of the document, search, keys, examples."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.end_to_end.conftest import Hearth
from tests.end_to_end.console.conftest import FAULTS
from tests.support.browser import DESKTOP, ENTER, PHONE, TAB, Browser, require_axe
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def document(hearth: Hearth) -> dict[str, Any]:
    with hearth.client("") as client:
        found: dict[str, Any] = client.get("/client/v4/openapi.json").json()
    return found


@pytest.fixture
def docs(chromium: Browser, hearth: Hearth) -> Iterator[Browser]:
    """The page, open and drawn. What breaks its policy fails the test."""
    chromium.resize(DESKTOP)
    chromium.prefer("light")
    chromium.open("about:blank")
    chromium.forget()
    chromium.open(f"{hearth.base_url}/docs")
    chromium.find("#status", "operations")
    yield chromium
    faults = [error for error in chromium.errors if any(word in error for word in FAULTS)]
    chromium.open("about:blank")
    assert faults == []


def open_all(browser: Browser) -> None:
    """Opens every operation, and all that folds inside, but what is inside itself."""
    browser.click("button", "Open all shown")
    browser.driver.execute_async_script("""
        const end = arguments[0];
        const step = (depth) => {
            const closed = [...document.querySelectorAll('main details:not([open])')];
            if (!closed.length || depth === 0) return end();
            closed.forEach((each) => { each.open = true; });
            setTimeout(() => step(depth - 1), 50);
        };
        setTimeout(() => step(4), 50);
    """)


def test_every_operation_and_field_of_the_document_is_shown(docs: Browser, document: dict[str, Any]) -> None:
    open_all(docs)
    text = str(docs.driver.execute_script("return document.querySelector('main').textContent"))
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            assert f"{method.upper()} {path}" in text or f"{method.upper()}{path}" in text, (method, path)
            assert said["summary"] in text
            assert docs.driver.execute_script("return document.getElementById(arguments[0])", said["operationId"])
    shown = set(docs.driver.execute_script("return [...document.querySelectorAll('.field')].map((f) => f.textContent)"))
    fields = {name for schema in document["components"]["schemas"].values() for name in schema.get("properties", ())}
    parameters = {
        each["name"]
        for methods in document["paths"].values()
        for said in methods.values()
        for each in said["parameters"]
    }
    assert sorted((fields | parameters) - shown) == []


def test_a_search_finds_operations_by_a_field_and_says_how_many(docs: Browser) -> None:
    docs.type("Search operations and fields", "outbox_bytes")
    docs.find("#status", "1 of")
    docs.find("article code", "/client/v4/operator/store")
    docs.type("Search operations and fields", "no such word at all")
    docs.find("#status", "No operation has all of these words")
    docs.type("Search operations and fields", "put plans")
    docs.find("#status", "1 of")
    docs.click("article summary")
    docs.find("article .field", "If-Match")


def test_it_is_used_with_the_keyboard_alone(docs: Browser) -> None:
    docs.driver.find_element("css selector", "body").send_keys("/")
    wait_for(lambda: docs.driver.switch_to.active_element.get_attribute("id") == "query")
    docs.driver.switch_to.active_element.send_keys("chat completions")
    docs.find("#status", "match")
    for _ in range(60):
        docs.driver.switch_to.active_element.send_keys(TAB)
        if (
            docs.driver.switch_to.active_element.tag_name == "summary"
            and "chat" in docs.driver.switch_to.active_element.text
        ):
            break
    docs.driver.switch_to.active_element.send_keys(ENTER)
    docs.find("pre", "/v1/chat/completions")


def test_a_link_leads_to_its_operation(docs: Browser, hearth: Hearth) -> None:
    docs.open("about:blank")
    docs.open(f"{hearth.base_url}/docs#post_v1_messages")
    docs.find("article pre", "/v1/messages")
    assert "MESSAGES" in docs.driver.switch_to.active_element.text.upper()


def test_every_example_is_a_body_that_the_document_takes(
    docs: Browser, document: dict[str, Any], hearth: Hearth
) -> None:
    docs.click("button", "Open all shown")
    docs.find("article pre")
    script = """
        return [...document.querySelectorAll('article')]
            .map((each) => [each.id, each.querySelector('pre code').textContent]);
    """
    examples: dict[str, str] = dict(wait_for(lambda: docs.driver.execute_script(script)))
    operations = {said["operationId"]: said for methods in document["paths"].values() for said in methods.values()}
    judged = 0
    for name, text in examples.items():
        assert text.startswith("curl -s")
        assert hearth.base_url in text
        body = re.search(r"-d '(.*)'$", text, re.DOTALL)
        if "requestBody" not in operations[name]:
            assert body is None, name
            continue
        assert body, name
        schema = operations[name]["requestBody"]["content"]["application/json"]["schema"]
        content = json.loads(body[1].replace("'\\''", "'"))
        Draft202012Validator({**schema, "components": document["components"]}).validate(content)
        judged += 1
    assert judged >= 15


def test_an_example_runs_as_pasted(docs: Browser, hearth: Hearth) -> None:
    account, token = hearth.account("docs reader")
    docs.type("Search operations and fields", "post /v1/chat/completions")
    docs.click("article summary")
    text = str(docs.find("article pre code").get_attribute("textContent"))
    environment = {**os.environ, "TOKEN": token, "ACCOUNT": account}
    ran = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("look", "size"), [("light", DESKTOP), ("dark", DESKTOP), ("light", PHONE), ("dark", PHONE)])
def test_it_is_accessible_and_fits(docs: Browser, look: str, size: tuple[int, int]) -> None:
    docs.resize(size)
    docs.prefer(look)
    docs.type("Search operations and fields", "plans")
    for summary in docs.driver.find_elements("css selector", "article:not([hidden]) > details > summary")[:3]:
        summary.click()
    docs.find("article pre")
    docs.shot(f"api-docs-{look}-{'phone' if size == PHONE else 'desk'}")
    wide, room = docs.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= room
    assert docs.axe() == []
    require_axe()
