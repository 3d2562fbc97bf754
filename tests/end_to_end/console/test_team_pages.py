"""The team's pages, each flow from its first click to what the API says afterwards."""

import csv
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance import node_sdks
from tests.end_to_end.conftest import EMBER, events
from tests.end_to_end.console.conftest import Console
from tests.support.browser import Browser
from tests.support.waiting import wait_for

ASKED = "When are you open?"
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


def api(console: Console, path: str, **query: str) -> Any:
    hearth, team = console.team.hearth, console.team
    with hearth.client(team.token) as client:
        answer = client.get(f"/client/v4/accounts/{team.account_id}{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def answered(browser: Browser, message: int) -> str:
    """The text of this answer of the model's, the first is 1, once it has ended."""
    from selenium.webdriver.remote.webelement import WebElement

    def ended() -> WebElement | None:
        found = browser.driver.find_elements("css selector", ".message.assistant:not(.live)")
        return found[message - 1] if len(found) >= message else None

    element = wait_for(ended, what=f"answer {message} in {browser.body}")
    return str(element.text)


@pytest.mark.parametrize("language", ["curl", "Python", "JavaScript"])
def test_the_first_call_runs_as_pasted(console: Console, language: str) -> None:
    if language == "JavaScript" and not node_sdks.ready():
        pytest.skip(node_sdks.MISSING)
    browser = console.sign_in(page="start")
    browser.click("[role=tab]", language)
    source = str(browser.find(".tab-panel code").get_attribute("textContent"))
    assert console.team.hearth.base_url in source
    assert EMBER in source
    assert console.team.token not in source
    environment = {"TOKEN": console.team.token}
    if language == "JavaScript":
        done = node_sdks.run(source, environment)
    else:
        command = ["bash", "-c"] if language == "curl" else [sys.executable, "-c"]
        done = subprocess.run([*command, source], env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if language == "curl":
        text = "".join(
            event["choices"][0]["delta"].get("content") or "" for event in events(done.stdout) if event["choices"]
        )
    else:
        text = done.stdout
    assert re.search("9:00", text), text


def test_the_first_call_is_made_from_the_page_and_its_cost_is_told(console: Console) -> None:
    browser = console.sign_in(page="start")
    browser.click("button", "Run it")
    first = answered(browser, 1)
    assert re.search(r"\d ms to the first token", first)
    assert re.search(r"[\d.]+ neurons", first)
    browser.click("button", "Run it again")
    wait_for(lambda: re.search(r"[1-9]\d* of them cached", answered(browser, 1)), what=browser.body)


def test_a_call_is_copied_with_the_token_only_where_its_user_asks(console: Console) -> None:
    browser = console.sign_in(page="start")
    browser.find(".tab-panel code")
    grant = {"origin": console.team.hearth.base_url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", grant)

    def copied() -> str:
        browser.click(".tab-panel button", "Copy")
        browser.find(".tab-panel button", "Copied")
        text = browser.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
        browser.find(".tab-panel button", "Copy")
        return str(text)

    assert "Bearer $TOKEN" in copied()
    browser.field("Copy with my token in it").click()
    assert f"Bearer {console.team.token}" in copied()


def test_a_conversation_is_streamed_and_its_second_turn_is_cached(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.type(
        "System prompt", "You are the assistant of Harbour Books. Opening hours: Monday to Friday, 9:00 to 18:00."
    )
    browser.type("Temperature", "0")
    browser.type("Tags", "no, €")
    browser.type("Your message", ASKED)
    browser.click("button", "Send")
    browser.find(".field-problem", "format")
    browser.type("Tags", "console, search")
    browser.click("button", "As curl")
    assert "?tags=console%2Csearch'" in browser.find("dialog code").text
    browser.click("dialog button[aria-label=Close]")
    browser.click("button", "Send")
    assert "9:00" in answered(browser, 1)
    wait_for(lambda: any(row["tag"] == "console" for row in api(console, "/usage", by="tag", per_page="1000")))
    browser.type("Your message", "Thank you!")
    browser.click("button", "Send")
    second = answered(browser, 2)
    assert re.search(r"[1-9]\d* of them cached", second), second
    for fact in ("ms to the first token", "in", "out", "neurons"):
        assert fact in second


def test_two_models_answer_side_by_side(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.click("button", "Compare two models")
    browser.type("Your message", "Hello!")
    browser.click("button", "Send")
    assert all("neurons" in answered(browser, place) for place in (1, 2))
    assert len(browser.driver.find_elements("css selector", ".talk")) == 2
    browser.click("button", "One model")
    assert len(browser.driver.find_elements("css selector", ".talk")) == 1


def test_an_answer_is_stopped_and_what_came_is_charged(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.type("System prompt", "Count on, and say nothing else: one two three four five six seven eight nine ten.")
    browser.type("Tokens at most", "2000")
    browser.type("Your message", "Tell me a very long story about the sea.")
    browser.type("Stop at", "\ue000")
    browser.click("button", "Send")
    browser.driver.execute_script(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Stop').click()"
    )
    text = answered(browser, 1)
    assert "Stopped" in text or "neurons" in text, text
    assert browser.find("button", "Send").is_enabled()


def test_a_tool_is_called_and_its_result_goes_back(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.click("button", "Put an example in")
    browser.type("Temperature", "0")
    browser.type("System prompt", "You can look up the weather.")
    browser.type("Your message", "What is the weather in Paris?")
    browser.click("button", "Send")
    first = answered(browser, 1)
    assert "get_weather" in first
    assert "Paris" in first
    browser.type("What get_weather answers", '{"sky": "rain", "celsius": 11}')
    browser.click("button", "Send the results")
    assert answered(browser, 2)


def test_a_message_in_place_of_a_tools_result_goes_on_without_the_call(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.click("button", "Put an example in")
    browser.type("Temperature", "0")
    browser.type("Your message", "What is the weather in Paris?")
    browser.click("button", "Send")
    browser.find("label", "What get_weather answers")
    browser.type("Tools", "")
    browser.type("Your message", "Hello!")
    browser.click(".composer button", "Send")
    assert "neurons" in answered(browser, 2)
    browser.gone("label", "What get_weather answers")


def test_an_answer_is_held_to_a_schema_and_a_wrong_one_is_said(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.choose("The answer is", "JSON by a schema")
    browser.type("JSON schema", "{no json")
    browser.type("Your message", "Ann is 7 years old.")
    browser.click("button", "Send")
    browser.find(".field-problem", "This is no JSON")
    browser.type("JSON schema", json.dumps(AGE))
    browser.click("button", "Send")
    assert re.search(r'\{\s*"age":\s*-?\d+\s*\}', answered(browser, 1))


def test_an_error_of_the_api_is_said_in_words_and_the_message_comes_back(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.type("Temperature", "1")
    browser.type("Tokens at most", "99999999")
    browser.type("Your message", "Hello!")
    browser.click("button", "Send")
    problem = answered(browser, 1)
    assert "max_tokens" in problem
    assert "Request " in problem
    assert browser.field("Your message").get_attribute("value") == "Hello!"


def test_models_have_prices_limits_and_examples(console: Console) -> None:
    browser = console.sign_in(page="models")
    row = browser.find("tbody tr", EMBER).text
    assert "8,192" in row
    assert "tools" in row
    browser.click("tbody button", EMBER)
    assert "curl" in browser.find("dialog .tab-panel code").text
    browser.click("dialog summary", "Every field")
    browser.find("dialog pre", "max_tokens")
    browser.click("dialog a", "Try it in the playground")
    browser.gone("dialog")
    assert browser.field("Model").get_attribute("value") == EMBER


def test_usage_is_drawn_by_day_and_told_to_the_last_request(console: Console) -> None:
    browser = console.sign_in(page="usage")
    browser.find(".plot-area")
    browser.choose("Count", "requests")
    rows = api(console, "/usage", by="model", per_page="1000")
    assert sum(row["requests"] for row in rows) >= console.team.calls
    for row in rows:
        assert f"{row['requests']:,}" in browser.find("tbody tr", row["model"]).text
    browser.choose("By", "tag")
    browser.find("th", "no tag")
    browser.find("th", "beta")
    browser.choose("By", "token")
    browser.find("th", "nightly")
    browser.click("summary", "As a table")
    rows_of = partial(browser.driver.find_elements, "css selector", ".plot details tbody tr")
    wait_for(lambda: len(rows_of()) == 30, what="a row for each day")
    assert "UTC" in browser.body


def test_a_plot_is_walked_through_with_the_arrow_keys(console: Console) -> None:
    browser = console.sign_in(page="usage")
    area = browser.find(".plot-area")
    area.send_keys("\ue010")  # End
    today = browser.find(".plot-tip strong").text
    area.send_keys("\ue012")  # left
    assert browser.find(".plot-tip strong").text != today
    area.send_keys("\ue00c")  # Escape
    browser.gone(".plot-tip strong")


def test_usage_is_saved_as_csv(console: Console, downloads: Path) -> None:
    browser = console.sign_in(page="usage")
    browser.find(".plot-area")
    browser.click("button", "Download CSV")
    path = wait_for(lambda: next(downloads.glob("usage-by-model-*.csv"), None))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {"day", "model", "requests", "neurons"} <= rows[0].keys()
    assert sum(int(row["requests"]) for row in rows) >= console.team.calls


def test_what_is_left_is_what_the_api_says(console: Console) -> None:
    browser = console.sign_in(page="limits")
    row = browser.find("tbody tr", "Neurons a day").text
    left = next(item for item in api(console, "/limits/left") if item["limit"] == "neurons_per_day")
    assert "50,000" in row
    assert f"{left['left']:,.0f}"[:3] in row
    browser.find("tbody tr", "Requests a minute")
    browser.find("caption", "Where they come from")


def test_a_token_is_minted_shown_once_changed_rolled_and_revoked(console: Console) -> None:
    def verified(text: str) -> int:
        url = f"{console.team.hearth.base_url}/client/v4/user/tokens/verify"
        return httpx.get(url, headers={"Authorization": f"Bearer {text}"}).status_code

    browser = console.sign_in(page="tokens")
    browser.click("button", "New token")
    browser.type("Name", "for the flow")
    browser.find("dialog input[value=inference]").click()
    browser.click("dialog button[type=submit]")
    browser.find("dialog .field-problem", "Choose one")
    browser.find("dialog input[value=inference]").click()
    browser.type("Models", "@cf/hearth/*")
    browser.choose("It ends", "In a week")
    browser.click("dialog summary", "Limits of its own")
    browser.type("Requests a minute", "60")
    browser.click("dialog button[type=submit]", "Make the token")
    secret = browser.find("dialog code", "hearth_").text
    assert verified(secret) == 200
    browser.click("dialog button[aria-label=Close]")
    row = browser.find("tbody tr", "for the flow").text
    assert "@cf/hearth/*" in row
    assert "Requests a minute: 60" in row
    assert secret not in str(browser.driver.execute_script("return document.documentElement.outerHTML"))

    browser.click("button[aria-label='Change for the flow']")
    assert browser.field("Requests a minute").get_attribute("value") == "60"
    browser.type("Requests a minute", "")
    browser.type("Networks", "not a network")
    browser.click("dialog button[type=submit]", "Save")
    browser.find("dialog .problem", "network")
    browser.type("Networks", "127.0.0.0/8")
    browser.click("dialog button[type=submit]", "Save")
    browser.find("tbody tr", "from 127.0.0.0/8")
    assert "Requests a minute" not in browser.find("tbody tr", "for the flow").text

    browser.click("button[aria-label='Roll for the flow']")
    browser.click("dialog button[type=submit]", "Make a new text")
    rolled = browser.find("dialog code", "hearth_").text
    browser.click("dialog button[aria-label=Close]")
    assert rolled != secret
    wait_for(lambda: (verified(secret), verified(rolled)) == (401, 200))

    browser.click("button[aria-label='Revoke for the flow']")
    browser.click("dialog button", "Keep it as it is")
    browser.click("button[aria-label='Revoke for the flow']")
    browser.click("dialog button", "Revoke it")
    browser.gone("tbody tr", "for the flow")
    wait_for(lambda: verified(rolled) == 401)


def test_a_token_with_what_the_server_alone_gives_is_not_said_anew(console: Console) -> None:
    """Saying it anew would take away what the console cannot give."""
    token_id, _ = console.team.mint("scraper", "metrics:read,inference")
    browser = console.sign_in(page="tokens")
    browser.find("button[aria-label='Roll scraper']")
    assert browser.driver.find_elements("css selector", "button[aria-label='Change scraper']") == []
    console.team.hearth.command("tokens", "revoke", token_id)


def test_a_batch_is_queued_followed_and_read(console: Console, downloads: Path) -> None:
    browser = console.sign_in(page="batches")
    browser.click("button", "New batch")
    browser.type("Prompts", 'Hello!\n{"prompt": "Hi!", "max_tokens": 4, "external_reference": "second"}')
    browser.click("dialog button[type=submit]", "Queue it")
    browser.find("tbody tr .chip", "done")
    browser.click("tbody button", "Results")
    browser.find("dialog tbody tr", "second")
    browser.click("dialog button", "Download")
    wait_for(lambda: next(downloads.glob("batch-*.json"), None))
    browser.click("dialog button[aria-label=Close]")


def test_a_batch_is_cancelled_and_a_wrong_one_is_named(console: Console) -> None:
    browser = console.sign_in(page="batches")
    browser.click("button", "New batch")
    browser.type("Prompts", '{"prompt": 7}')
    browser.click("dialog button[type=submit]", "Queue it")
    browser.find("dialog .problem", "requests[0]")
    browser.type("Prompts", "\n".join(f"Tell a long story about the number {n}." for n in range(200)))
    browser.click("dialog button[type=submit]", "Queue it")
    browser.click("button[aria-label^='Cancel the rest']")
    browser.click("dialog button", "Cancel it")
    browser.find("tbody tr .chip", "cancelled")
