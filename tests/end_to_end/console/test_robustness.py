"""What a console must bear: hostile words, a gateway that goes away, keyboards, screen readers, phones, the dark."""

import os
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.conftest import answers
from tests.end_to_end.console.conftest import HOSTILE, Console
from tests.support.browser import DESKTOP, END, ENTER, ESCAPE, PHONE, SHOTS, SHOTS_FOLDER, TAB, require_axe
from tests.support.waiting import wait_for

PAGES = {
    "start": ".tab-panel code",
    "playground": ".transcript",
    "models": "tbody tr",
    "batches": "tbody tr",
    "usage": ".plot-area svg",
    "limits": ".meter",
    "tokens": "tbody tr",
}


def gateway(console: Console) -> psutil.Process:
    lines = {each: each.cmdline() for each in console.team.hearth.processes()}
    return next(each for each, line in lines.items() if "gateway" in line[1:6])


def test_hostile_names_and_tags_are_words(console: Console) -> None:
    browser = console.sign_in(page="usage")
    browser.find(".side", HOSTILE)
    for by in ("model", "tag", "token"):
        browser.choose("By", by)
        browser.find("tbody th", HOSTILE)
        browser.find(".plot-area").send_keys(END)
    console.go("tokens")
    browser.find("tbody th", HOSTILE)
    browser.click(f"button[aria-label^='Revoke {HOSTILE[:4]}']")
    browser.find("dialog", HOSTILE)
    browser.click("dialog button", "Keep it as it is")
    assert browser.driver.find_elements("css selector", "img, script:not([src]), iframe") == []
    assert "run" not in browser.driver.title


def test_a_gateway_that_goes_away_is_said_and_found_again(console: Console) -> None:
    browser = console.sign_in(page="usage")
    browser.find(".plot-area svg")
    process = gateway(console)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    console.go("limits")
    browser.find(".away", "does not answer")
    browser.gone(".away")
    browser.find(".meter")
    browser.gone(".problem")


def test_a_page_whose_script_was_not_fetched_opens_when_the_gateway_is_back(console: Console) -> None:
    console.sign_in()
    browser = console.browser
    browser.driver.execute_cdp_cmd("Network.enable", {})
    browser.driver.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
    browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/pages/limits.js", "*/healthz"]})
    try:
        console.go("limits")
        browser.find(".problem", "opens when the gateway answers")
        browser.find(".away")
    finally:
        browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        browser.driver.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": False})
    browser.click(".away button", "Try now")
    browser.find(".meter")


def test_a_stream_that_its_gateway_leaves_is_an_error_in_words(console: Console) -> None:
    browser = console.sign_in(page="playground")
    browser.type("Your message", "Tell me a very long story about the sea.")
    browser.click("button", "Send")
    process = gateway(console)
    process.send_signal(signal.SIGKILL)
    browser.find(".message .problem, .away", "gateway")
    browser.gone(".away")
    assert browser.find("button", "Send").is_enabled()
    wait_for(lambda: answers(f"{console.team.hearth.base_url}/readyz"))


def test_a_kept_session_waits_for_a_gateway_that_is_away(console: Console) -> None:
    browser = console.sign_in(stay=True)
    browser.find("nav a")
    browser.driver.execute_cdp_cmd("Network.enable", {})
    browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/client/v4/*", "*/healthz"]})
    try:
        browser.driver.refresh()
        browser.find(".away", "does not answer")
        browser.find("h1", "Hearth")
    finally:
        browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    browser.click(".away button", "Try now")
    browser.find("nav a")


def test_the_console_is_used_with_the_keyboard_alone(console: Console) -> None:
    browser = console.sign_in()
    browser.find("nav a")
    page = browser.driver.find_element("css selector", "body")

    def focused() -> str:
        return str(browser.driver.execute_script("return document.activeElement.textContent"))

    page.send_keys(TAB)
    assert focused() == "Skip to the page"
    for _ in range(20):
        browser.driver.switch_to.active_element.send_keys(TAB)
        if focused() == "Tokens":
            break
    browser.driver.switch_to.active_element.send_keys(ENTER)
    browser.find("h1", "Tokens")
    wait_for(lambda: focused() == "Tokens")
    button = browser.find("button", "New token")
    button.send_keys(ENTER)
    browser.find("dialog")
    assert browser.driver.execute_script("return document.querySelector('dialog').contains(document.activeElement)")
    browser.driver.switch_to.active_element.send_keys(ESCAPE)
    browser.gone("dialog")
    wait_for(lambda: focused() == "New token")


@pytest.mark.parametrize(("look", "size"), [("light", DESKTOP), ("dark", DESKTOP), ("light", PHONE), ("dark", PHONE)])
def test_every_page_is_accessible_and_fits(console: Console, look: str, size: tuple[int, int]) -> None:
    """Screenshots of all pages are kept, too: where the environment says, or beside the browser's profile."""
    browser = console.browser
    browser.resize(size)
    browser.prefer(look)
    device = "phone" if size == PHONE else "desk"
    console.leave()
    browser.open(console.url)
    browser.find("h1", "Hearth")
    browser.shot(f"sign-in-{look}-{device}")
    broken = [f"sign-in: {finding}" for finding in browser.axe()]
    console.sign_in()
    browser.find("h1", "First call")
    for page, selector in PAGES.items():
        console.go(page)
        browser.find(selector)
        browser.shot(f"{page}-{look}-{device}")
        wide, room = browser.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        broken += [f"{page} is {wide} px wide"] * (wide > room)
        broken += [f"{page}: {finding}" for finding in browser.axe()]
    assert broken == []
    require_axe()


def test_what_is_broken_on_purpose_is_found(console: Console) -> None:
    require_axe()
    browser = console.sign_in(page="tokens")
    browser.find("tbody tr")
    browser.driver.execute_script("""
        document.querySelector('h1').style.color = '#ccc';
        document.querySelector('tbody button').replaceChildren();
        document.querySelector('tbody button').removeAttribute('aria-label');
    """)
    assert {finding.partition(":")[0] for finding in browser.axe()} >= {"color-contrast", "button-name"}


def test_dialogs_are_accessible(console: Console) -> None:
    require_axe()
    browser, broken = console.sign_in(page="models"), []
    for page, opens in (("models", "tbody button"), ("tokens", ".page-head button"), ("batches", ".page-head button")):
        console.go(page)
        browser.click(opens)
        browser.find("dialog[open]")
        browser.shot(f"{page}-dialog")
        broken += [f"{page}: {finding}" for finding in browser.axe()]
        browser.click("dialog button[aria-label=Close]")
        browser.gone("dialog")
    assert broken == []


@pytest.mark.parametrize(
    ("zone", "ends"), [("Asia/Kolkata", "05:30"), ("Pacific/Kiritimati", "14:00"), ("Pacific/Marquesas", "14:30")]
)
def test_days_are_in_utc_and_say_when_they_end_here(console: Console, zone: str, ends: str) -> None:
    driver = console.browser.driver
    driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": zone})
    try:
        browser = console.sign_in(page="usage")
        browser.find(".lead", f"one ends at {ends} on your clock")
        browser.find(".plot-area").send_keys(END)
        today = datetime.now(UTC)
        assert today.strftime("%a %-d %B") in browser.find(".plot-tip strong").text.replace(",", "")
    finally:
        driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


WRONG_CLOCK = """
    const ahead = %d * 86_400_000, Real = Date;
    globalThis.Date = class extends Real {
        constructor(...given) { given.length ? super(...given) : super(Real.now() + ahead); }
        static now() { return Real.now() + ahead; }
    };
"""


@pytest.mark.parametrize(("days", "words"), [(-400, "400 days slow"), (3, "3 days fast")])
def test_a_readers_wrong_clock_is_said_and_changes_no_day(console: Console, days: int, words: str) -> None:
    driver = console.browser.driver
    wrong = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WRONG_CLOCK % days})
    try:
        browser = console.sign_in(page="usage")
        browser.find(".lead", f"Your clock is {words}")
        browser.find(".plot-area").send_keys(END)
        assert datetime.now(UTC).strftime("%a %-d %B") in browser.find(".plot-tip strong").text.replace(",", "")
        console.go("tokens")
        browser.click("button", "New token")
        browser.type("Name", f"made {words}")
        browser.choose("It ends", "In a week")
        browser.click("dialog button[type=submit]", "Make the token")
        browser.find("dialog code", "hearth_")
        browser.click("dialog button[aria-label=Close]")
        assert "in 7 days" in browser.find("tbody tr", f"made {words}").text
        made = next(token for token in tokens(console) if token["name"] == f"made {words}")
        left = datetime.fromisoformat(made["expires_on"]) - datetime.now(UTC)
        assert timedelta(days=6.9) < left < timedelta(days=7.1)
        console.team.hearth.command("tokens", "revoke", made["id"])
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", wrong)


def tokens(console: Console) -> list[dict[str, Any]]:
    with console.team.hearth.client(console.team.token) as client:
        found: list[dict[str, Any]] = client.get(f"/client/v4/accounts/{console.team.account_id}/tokens").json()[
            "result"
        ]
    return found


def test_the_menu_of_a_phone_opens_and_closes(console: Console) -> None:
    browser = console.sign_in()
    browser.find("nav a")
    browser.resize(PHONE)
    browser.gone("nav a")
    browser.click("button[aria-label=Menu]")
    browser.click("nav a", "Usage")
    browser.find("h1", "Usage")
    browser.gone("nav a")


def test_a_theme_is_kept_and_the_system_is_followed_without_one(console: Console) -> None:
    browser = console.sign_in(stay=True)
    browser.find("nav a")

    def background() -> str:
        return str(browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor"))

    light = background()
    browser.prefer("dark")
    dark = background()
    assert dark != light
    browser.driver.execute_script(
        "const s = document.querySelector('select[aria-label=Colours]'); s.value = 'light';"
        " s.dispatchEvent(new Event('change'))"
    )
    assert background() == light
    browser.driver.refresh()
    browser.find("nav a")
    assert background() == light


def test_screenshots_are_kept(console: Console) -> None:
    console.browser.open(console.url)
    console.browser.find("h1")
    shot = console.browser.shot("sign-in")
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.parent == Path(os.environ.get(SHOTS, SHOTS_FOLDER)), "where CONTRIBUTING.md says"
    ignored = subprocess.run(["git", "check-ignore", "--quiet", SHOTS_FOLDER], cwd=SHOTS_FOLDER.parent, check=False)
    assert ignored.returncode in (0, 128), "0: ignored; 128: no checkout"
