"""Signing in and out: what a token opens, where it is kept, and what becomes of one in the wrong field."""

import json

import httpx

from tests.end_to_end.console.conftest import Console
from tests.support.browser import Browser
from tests.support.waiting import wait_for

UNKNOWN = "hearth_00000000000_" + "0" * 49


def pages(browser: Browser) -> list[str]:
    browser.find("nav a")
    return [
        str(each.get_attribute("hash")).removeprefix("#/")
        for each in browser.driver.find_elements("css selector", "nav a[href^='#']")
    ]


def kept(browser: Browser) -> str:
    """All that the page could find again: storages, cookies, address and document."""
    script = """
        return JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie, location.href,
            document.documentElement.outerHTML, history.length && history.state]);
    """
    return str(browser.driver.execute_script(script))


def test_a_browser_that_asks_for_the_root_comes_to_the_console(console: Console) -> None:
    console.browser.open(console.team.hearth.base_url + "/")
    console.browser.find("h1", "Hearth")
    assert console.browser.driver.current_url == console.url


def test_each_token_sees_the_pages_that_its_grant_permits(console: Console) -> None:
    calls = ["start", "playground", "models", "batches"]
    assert pages(console.sign_in(console.team.tokens["inference"])) == calls
    assert pages(console.sign_in(console.team.tokens["usage:read"])) == ["usage", "limits"]
    assert pages(console.sign_in()) == [*calls, "usage", "limits", "tokens"]


def test_an_operators_token_opens_the_operators_pages_and_is_told_of_before_signing_in(console: Console) -> None:
    console.leave()
    console.browser.open(console.url)
    console.browser.click("summary", "Where do I find a token?")
    console.browser.find("details code", "--permissions operator")
    _, text = console.team.mint("operator", "operator")
    operators = ["live", "wakes", "top", "health", "accounts", "plans", "all-usage", "audit"]
    assert pages(console.sign_in(text)) == operators


def test_a_page_that_is_not_for_this_token_leads_to_one_that_is(console: Console) -> None:
    browser = console.sign_in(console.team.tokens["usage:read"])
    browser.find("h1", "Usage")
    browser.driver.execute_script("location.hash = '#/tokens'")
    wait_for(lambda: browser.driver.current_url.endswith("#/usage"))
    assert "Tokens" not in browser.body


def test_a_token_that_opens_nothing_is_refused_in_words(console: Console) -> None:
    browser = console.sign_in(UNKNOWN)
    problem = browser.find("[role=alert]", ".").text
    assert "token" in problem.lower() or "authenticat" in problem.lower()
    assert browser.driver.current_url == console.url
    browser.type("Token", "")
    browser.click("button[type=submit]")
    browser.find(".field-problem", "fill")


def test_a_session_ends_with_a_reload_unless_its_user_asked_it_to_stay(console: Console) -> None:
    browser = console.sign_in()
    browser.find("nav a")
    assert console.team.token not in kept(browser)
    browser.driver.refresh()
    browser.find("h1", "Hearth")

    browser = console.sign_in(stay=True)
    browser.find("nav a")
    browser.driver.refresh()
    browser.find("nav a")
    assert browser.driver.execute_script("return localStorage.length") == 0


def test_signing_out_leaves_nothing(console: Console) -> None:
    browser = console.sign_in(page="usage", stay=True)
    browser.find(".plot-area")
    browser.click("button", "Sign out")
    browser.find("h1", "Hearth")
    left = kept(browser)
    assert console.team.token not in left
    assert console.team.account_id not in left
    assert browser.driver.current_url == console.url
    browser.driver.refresh()
    browser.find("h1", "Hearth")


def test_a_token_that_is_revoked_meanwhile_ends_the_session_and_says_why(console: Console) -> None:
    token_id, text = console.team.mint("short-lived", "inference,usage:read")
    browser = console.sign_in(text, "usage")
    browser.find(".plot-area")
    console.team.hearth.command("tokens", "revoke", token_id)

    def refused() -> bool:
        answer = httpx.get(
            f"{console.team.hearth.base_url}/client/v4/user/tokens/verify", headers={"Authorization": f"Bearer {text}"}
        )
        return answer.status_code == 401

    wait_for(refused)
    console.browser.driver.execute_script("location.hash = '#/limits'")
    assert "signed out" in browser.find("[role=alert]", "signed out").text
    browser.find("h1", "Hearth")


def test_a_token_in_a_wrong_field_goes_nowhere(console: Console) -> None:
    browser = console.sign_in(page="playground")
    secret = console.team.tokens["inference"]
    browser.requests()
    browser.type("Your message", f"my key is {secret}")
    browser.click("button", "Send")
    browser.find(".field-problem", "looks like a token")
    browser.type("Your message", "Hello!")
    browser.type("System prompt", secret)
    browser.click("button", "Send")
    browser.find(".play-settings .field-problem", "looks like a token")

    console.go("tokens")
    browser.click("button", "New token")
    browser.type("Name", secret)
    browser.click("dialog button[type=submit]")
    browser.find("dialog .field-problem", "looks like a token")
    browser.click("dialog button", "Cancel")

    console.go("models")
    browser.find("input.filter").send_keys(secret)
    browser.find("td", "No row")

    sent = browser.requests()
    assert all(secret not in json.dumps(request) for request in sent)
    assert secret not in kept(browser)
    state = console.team.hearth.folder / ".hearth"
    assert all(secret not in path.read_text() for path in (state / "gateway.log", state / "machine.log"))


def test_the_token_travels_in_the_authorization_header_alone(console: Console) -> None:
    browser = console.sign_in(page="usage")
    browser.find(".plot-area")
    requests = [request for request in browser.requests() if "/client/v4/" in request["url"]]
    assert requests
    for request in requests:
        headers = {name.lower(): value for name, value in request["headers"].items()}
        assert headers.pop("authorization") == f"Bearer {console.team.token}"
        assert console.team.token not in json.dumps([request["url"], headers, request.get("postData", "")])
        assert not headers.get("referer")
