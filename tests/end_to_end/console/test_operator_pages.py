"""The operators' pages, each flow from its first click to what the API says afterwards, among ten thousand accounts."""

import contextlib
import csv
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.protocol.types import TierLoad
from tests.end_to_end.console.conftest import FAULTS
from tests.end_to_end.console.operated import ACCOUNTS, Operated, operated
from tests.support.browser import DESKTOP, ENTER, ESCAPE, PHONE, Browser, require_axe
from tests.support.many_accounts import HOSTILE
from tests.support.redis_server import RedisServer
from tests.support.stub_replica import MODEL
from tests.support.waiting import wait_for

PAGES = {
    "live": "tbody tr .meter",
    "wakes": ".timeline rect",
    "top": "tbody tr .meter",
    "health": ".alert",
    "accounts": "tbody tr + tr",
    "plans": "tbody tr + tr",
    "all-usage": ".plot-area rect",
    "audit": "tbody tr",
}


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    with contextlib.ExitStack() as resources:
        url = None
        if request.param == "redis":
            server = RedisServer(folder)
            resources.callback(server.close)
            server.start()
            url = server.url
        yield resources.enter_context(operated(folder, url))


@pytest.fixture
def browser(chromium: Browser, gateway: Operated) -> Iterator[Browser]:
    """Signed in as an operator. What breaks the page's policy fails the test."""
    chromium.resize(DESKTOP)
    chromium.prefer("light")
    chromium.open("about:blank")
    chromium.forget()
    sign_in(chromium, gateway, gateway.house.operator)
    yield chromium
    faults = [error for error in chromium.errors if any(word in error for word in FAULTS)]
    chromium.driver.execute_script("sessionStorage.clear()")
    chromium.open("about:blank")
    assert faults == []


def sign_in(browser: Browser, gateway: Operated, token: str) -> None:
    browser.open(f"{gateway.base_url}/console/")
    browser.type("Token", token)
    browser.click("button[type=submit]", "Sign in")
    browser.find("nav a")


def calls(gateway: Operated) -> None:
    """Lets a team call, so that it is among the busiest."""
    for _ in range(3):
        assert gateway.run(gateway.house.gateway.run(prompt="hello", max_tokens=9)).status == 200


def go(browser: Browser, page: str) -> None:
    browser.driver.execute_script(f"location.hash = '#/{page}'")
    if browser.wide:
        browser.find(f"nav a[href='#/{page.partition('?')[0]}'][aria-current]")
    browser.find(PAGES[page.partition("?")[0]])


def test_a_team_sees_no_page_of_an_operators(chromium: Browser, gateway: Operated) -> None:
    chromium.resize(DESKTOP)
    chromium.open("about:blank")
    sign_in(chromium, gateway, gateway.house.ann)
    links = chromium.driver.find_elements("css selector", "nav a")
    shown = {str(link.get_attribute("href")).partition("#/")[2] for link in links}
    assert shown
    assert not shown & PAGES.keys()
    chromium.driver.execute_script("location.hash = '#/accounts'")
    wait_for(lambda: "accounts" not in chromium.driver.current_url)
    chromium.driver.execute_script("sessionStorage.clear()")
    chromium.open("about:blank")


def test_one_of_ten_thousand_accounts_is_found_by_a_part_of_its_name(browser: Browser, gateway: Operated) -> None:
    go(browser, "accounts")
    browser.find(".pager", f"of {ACCOUNTS + 3:,}")
    browser.find("tbody th", HOSTILE)
    browser.click(".pager button", "Next")
    browser.find(".pager", "51–100 of")
    browser.type("Name or id", "TEAM 07431")
    browser.find("tbody th", "team 07431 of the works")
    browser.find(".pager", "1 in all")
    browser.type("Name or id", "nobody at all")
    browser.find(".empty", "No account is like that")
    assert "team" not in browser.driver.current_url, "what is typed is not in the address"


def test_an_account_is_made_with_a_plan_a_ceiling_and_its_first_token(browser: Browser, gateway: Operated) -> None:
    go(browser, "accounts")
    browser.click("button", "New account")
    browser.type("Name", "harbour library")
    browser.choose("Plan", "team")
    browser.click("summary", "A ceiling of its own")
    browser.type("Requests a minute", "120")
    browser.click("button[type=submit]", "Make the account")
    browser.find("dialog h2", "A token of harbour library")
    browser.click("button[type=submit]", "Make the token")
    text = str(browser.find("dialog .code-block code").get_attribute("textContent"))
    (made,) = gateway.call("GET", "/accounts?name=harbour%20library")
    assert (made["plan"], made["limits"]["in_force"]["requests_per_minute"]) == ("team", 120)
    told = gateway.run(
        gateway.house.gateway.call("/client/v4/user/tokens/verify", b"", "GET", authorization=f"Bearer {text}")
    )
    assert told.json["result"]["account_id"] == made["id"]
    browser.click("dialog button[aria-label=Close]")
    browser.click("button", "New account")
    browser.type("Name", "Harbour Library")
    browser.click("button[type=submit]", "Make the account")
    browser.find("dialog .problem", "name")


def test_an_account_is_suspended_and_served_again(browser: Browser, gateway: Operated) -> None:
    go(browser, "accounts")
    browser.type("Name or id", "team 00042")
    browser.click("button[aria-label='Suspend team 00042 of the works']")
    browser.click("dialog button", "Keep it as it is")
    browser.click("button[aria-label='Suspend team 00042 of the works']")
    browser.click("dialog button", "Suspend it")
    browser.find("tbody .chip", "suspended")
    account = f"/accounts/{42:032x}"
    assert gateway.call("GET", account)["suspended_on"]
    browser.choose("State", "Suspended")
    browser.click("button[aria-label='Resume team 00042 of the works']")
    browser.find(".empty")
    assert gateway.call("GET", account)["suspended_on"] is None


def test_who_changes_an_account_second_is_told_what_the_first_one_changed(browser: Browser, gateway: Operated) -> None:
    go(browser, "accounts")
    browser.type("Name or id", "team 00077")
    browser.click("button[aria-label='Change team 00077 of the works']")
    browser.find("dialog h2", "Change team 00077")
    gateway.call("PATCH", f"/accounts/{77:032x}", {"plan": "large"})
    browser.type("Name", "renamed 00077")
    browser.click("button[type=submit]", "Save")
    browser.find("dialog .note", "Plan: default → large")
    assert gateway.call("GET", f"/accounts/{77:032x}")["name"] == "team 00077 of the works"
    browser.click("dialog button", "Take theirs")
    browser.type("Name", "renamed 00077")
    browser.click("button[type=submit]", "Save")
    browser.gone("dialog")
    account = gateway.call("GET", f"/accounts/{77:032x}")
    assert (account["name"], account["plan"]) == ("renamed 00077", "large")


def test_two_operators_edit_the_same_plan_and_the_second_is_told_in_words(browser: Browser, gateway: Operated) -> None:
    go(browser, "plans")
    browser.click("button[aria-label='Change team']")
    browser.find("dialog h2", "Change the plan team")
    gateway.call("PUT", "/plans/team", {"limits": {"requests_per_minute": 900}, "weight": 2})
    browser.type("Neurons a day", "70000")
    browser.click("button[type=submit]", "Save")
    note = browser.find("dialog .note", "Somebody else changed this").text
    for words in ("Requests a minute: 600 → 900", "Neurons a month: 5,000,000 → nothing", "Weight: 1 → 2"):
        assert words in note
    assert gateway.call("GET", "/plans/team")["weight"] == 2, "nothing of mine was saved"
    browser.click("dialog button", "Take theirs")
    browser.type("Neurons a day", "70000")
    browser.click("button[type=submit]", "Save")
    browser.gone("dialog")
    plan = gateway.call("GET", "/plans/team")
    assert (plan["limits"]["requests_per_minute"], plan["limits"]["neurons_per_day"], plan["weight"]) == (900, 70000, 2)


def test_a_plan_is_made_strict_and_is_not_again(browser: Browser, gateway: Operated) -> None:
    label = "Strict: no failover passes its limits"
    go(browser, "plans")
    browser.click("button", "New plan")
    browser.type("Name", "bank")
    browser.field(label).click()
    browser.click("button[type=submit]", "Make the plan")
    browser.find("tbody th", "bank")
    assert gateway.call("GET", "/plans/bank")["strict"] is True
    assert "yes" in browser.find("tbody tr", "bank").text

    browser.click("button[aria-label='Change bank']")
    box = browser.field(label)
    assert box.is_selected()
    browser.type("Requests a minute", "60")
    browser.click("button[type=submit]", "Save")
    browser.gone("dialog")
    assert gateway.call("GET", "/plans/bank")["strict"] is True, "what is not touched stays"

    browser.click("button[aria-label='Change bank']")
    gateway.call("PUT", "/plans/bank", {"limits": {"requests_per_minute": 60}, "strict": False})
    browser.type("Requests a minute", "90")
    browser.click("button[type=submit]", "Save")
    browser.find("dialog .note", "Strict: yes → no")
    browser.click("dialog button", "Take theirs")
    assert not browser.field(label).is_selected()
    browser.click("button[type=submit]", "Save")
    browser.gone("dialog")
    assert gateway.call("GET", "/plans/bank")["strict"] is False
    browser.gone("tbody tr", "yes")


def test_a_plan_is_made_and_removed_but_not_one_that_accounts_have(browser: Browser, gateway: Operated) -> None:
    go(browser, "plans")
    browser.click("button", "New plan")
    browser.type("Name", "Not A Plan")
    browser.click("button[type=submit]", "Make the plan")
    browser.find("dialog .field-problem")
    browser.type("Name", "seasonal")
    browser.type("Requests a minute", "30")
    browser.click("button[type=submit]", "Make the plan")
    browser.find("tbody th", "seasonal")
    browser.click("button", "New plan")
    browser.type("Name", "seasonal")
    browser.click("button[type=submit]", "Make the plan")
    browser.find("dialog .note", "Requests a minute: nothing → 30")
    browser.click("dialog button", "Cancel")
    browser.click("button[aria-label='Remove seasonal']")
    browser.click("dialog button", "Remove it")
    browser.gone("tbody th", "seasonal")
    gateway.call("PATCH", f"/accounts/{5:032x}", {"plan": "large"})
    browser.click("button[aria-label='Remove large']")
    browser.click("dialog button", "Remove it")
    browser.find(".notice", "have the plan large")


def test_machines_and_models_are_shown_as_they_are_now(browser: Browser, gateway: Operated) -> None:
    go(browser, "live")
    browser.find("tbody th", MODEL)
    for chip in ("2 on device", "1 in memory", "1 on disk", "1 quarantined"):
        browser.find("td .chip", chip)
    browser.find(".bad-text", HOSTILE)
    browser.find(".meters", "500 B of 600 B")
    browser.find("td .chip", "memory → device")
    gateway.loop.call_soon_threadsafe(lambda: gateway.house.gateway.fleet.replicas[0].load(waiting=37, blocks=640))
    browser.find("tbody td", "38")
    browser.find(".plot-line")


def test_kv_is_shown_by_tier_with_what_was_found_in_each(browser: Browser, gateway: Operated) -> None:
    replica = gateway.house.gateway.fleet.replicas[0]
    in_host, on_disk = TierLoad(3 << 29, 2 << 30), TierLoad(5 << 30, 20 << 30)
    steps = itertools.count(1)

    def found(*words: str) -> bool:
        """Whether all is on the page, where every prompt of the last seconds was found as often in each tier."""
        parts = {"lookup_tokens": 1000, "hit_tokens": 500, "host_hit_tokens": 350, "disk_hit_tokens": 150}
        step = next(steps)
        counters = {name: count * step for name, count in ({"computed_tokens": 1000} | parts).items()}
        say = partial(replica.load, blocks=640, counters=counters, tiers=(in_host, on_disk))
        gateway.loop.call_soon_threadsafe(say)
        return all(each in browser.body for each in words)

    go(browser, "live")
    wait_for(lambda: found("1.5 GiB of 2 GiB in host memory", "5 GiB of 20 GiB on disk"))
    wait_for(lambda: found("85%", "20% from host memory", "15% from disk"))
    meter = browser.find(f"[role=meter][aria-label='KV in host memory of {MODEL}']")
    assert meter.get_attribute("aria-valuenow") == "75"
    of_disk = f"[role=meter][aria-label='KV on disk of {MODEL}']"
    assert len(browser.driver.find_elements("css selector", of_disk)) == 2, "of the model and of its replica"
    browser.shot("operator-live-tiers")
    assert browser.axe() == []
    gateway.loop.call_soon_threadsafe(partial(replica.load, blocks=640, tiers=(in_host, TierLoad(0, 0))))
    browser.find("tbody td .bad-text", "no room on disk")
    browser.resize(PHONE)
    wide, room = browser.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= room
    browser.shot("operator-live-tiers-phone")


def test_wakes_are_a_timeline_with_a_table_behind(browser: Browser, gateway: Operated) -> None:
    go(browser, "wakes")
    browser.find("tbody td", "wake: memory → device")
    assert len(browser.driver.find_elements("css selector", ".timeline rect")) >= 3
    browser.find("tbody td", "under way")
    browser.choose("Moves", "Sleeps (to memory)")
    browser.gone("tbody td", "wake:")
    browser.find("tbody td", "sleep: device → memory")


def test_the_busiest_tenants_are_named(browser: Browser, gateway: Operated) -> None:
    calls(gateway)
    go(browser, "top")
    browser.find("tbody th", "test")
    browser.choose("The last", "5 minutes")
    browser.choose("Most", "Requests")
    browser.find("tbody th", gateway.house.ann_id)


def test_alerts_that_hold_and_the_stores_health_are_said_with_what_to_do(browser: Browser, gateway: Operated) -> None:
    go(browser, "health")
    browser.find(".alert.bad", "died so often that it is not started for a while")
    browser.find(".alert.bad", "The machine's log has its last words")
    browser.find(".alert .chip", "pending")
    browser.find("dd", "Redis" if gateway.on_redis else "SQLite, for one gateway")
    browser.find("dd .chip.good", "yes")
    browser.click("summary", "no gateway can evaluate by itself")
    browser.find("dt", "HearthGatewayDown")


def test_usage_of_all_accounts_is_plotted_with_a_table_behind_and_saved(
    browser: Browser, gateway: Operated, downloads: Path
) -> None:
    go(browser, "all-usage")
    browser.find(".plot-legend", "others")
    assert len(browser.driver.find_elements("css selector", ".spark")) >= 90
    browser.find("tbody th", HOSTILE)
    browser.choose("Plot by", "model, all accounts")
    browser.find("h2", "of all accounts by day and model")
    browser.choose("Count", "requests")
    browser.click(".plot summary", "As a table")
    browser.find(".plot tbody td", "200")
    browser.type("Name or id", "team 00003")
    browser.find(".pager", "1 in all")
    browser.click("button", "Download CSV")
    (saved,) = wait_for(lambda: list(downloads.glob("usage-of-all-*.csv")))
    rows = list(csv.DictReader(saved.read_text().splitlines()))
    assert sum(int(row["requests"]) for row in rows) >= 200 * 30
    assert HOSTILE in {row["name"] for row in rows}


def test_the_audit_log_is_narrowed_paged_and_checked(browser: Browser, gateway: Operated) -> None:
    for number in range(60):
        gateway.call("PUT", "/plans/busy", {"limits": {"requests_per_minute": number + 1}})
    go(browser, "audit")
    browser.find("tbody th", "plan.change")
    browser.click("button", "Show older entries")
    wait_for(lambda: len(browser.driver.find_elements("css selector", "tbody tr")) > 50)
    browser.choose("Action", "plan.remove")
    browser.gone("tbody th", "plan.change")
    browser.click("button", "Check the chain")
    browser.find(".note.good", "The chain is whole")
    gateway.call("POST", f"/accounts/{9:032x}/suspend")
    go(browser, f"audit?account={9:032x}")
    browser.find("tbody th", "account.suspend")
    row = browser.find("tbody tr", "account.suspend").text
    assert "team 00009 of the works" in row, "the account by its name"
    assert "console" in row, "the token by its name"
    gateway.call("PUT", "/plans/busy", {"limits": {"requests_per_minute": 1234, "neurons_per_day": None}})
    go(browser, "audit")
    browser.find("tbody details summary", "limits").click()
    lines = browser.find("tbody details[open] dl", "requests per minute")
    assert "limits › requests per minute" in lines.text
    assert "1,234" in lines.text
    assert "{" not in lines.text
    go(browser, f"audit?account={9:032x}")
    gateway.call("POST", f"/accounts/{9:032x}/resume")
    browser.type("Account", "Team 00009 of the works").send_keys(ENTER)
    browser.find("tbody th", "account.resume")
    browser.type("Account", "nobody").send_keys(ENTER)
    browser.find(".empty", "No account has this name or id")


@pytest.mark.parametrize(("look", "size"), [("light", DESKTOP), ("dark", DESKTOP), ("light", PHONE), ("dark", PHONE)])
def test_every_page_is_accessible_and_fits(
    browser: Browser, gateway: Operated, look: str, size: tuple[int, int]
) -> None:
    """Screenshots of all pages are kept, too."""
    calls(gateway)
    browser.resize(size)
    browser.prefer(look)
    broken = []
    for page in PAGES:
        go(browser, page)
        browser.shot(f"operator-{page}-{look}-{'phone' if size == PHONE else 'desk'}")
        wide, room = browser.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        broken += [f"{page} is {wide} px wide"] * (wide > room)
        broken += [f"{page}: {finding}" for finding in browser.axe()]
    assert broken == []
    require_axe()


@pytest.mark.parametrize(("look", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_dialogs_are_accessible_and_fit(browser: Browser, gateway: Operated, look: str, size: tuple[int, int]) -> None:
    browser.resize(size)
    browser.prefer(look)
    broken = []
    for page, opens, folded in (
        ("plans", "button[aria-label='Change team']", True),
        ("accounts", ".page-head button", True),
        ("accounts", "tbody button.link", False),
        ("accounts", "button[aria-label^='Suspend']", False),
    ):
        go(browser, page)
        browser.click(opens)
        browser.find("dialog[open]")
        if folded:
            browser.click("dialog summary")
        browser.shot(f"operator-{page}-dialog-{look}")
        broken += [f"{page} {opens}: {finding}" for finding in browser.axe()]
        wide, room = browser.driver.execute_script(
            "const d = document.querySelector('dialog[open]'); return [d.scrollWidth, d.clientWidth]"
        )
        broken += [f"{page} {opens} is {wide} px wide"] * (wide > room)
        browser.driver.switch_to.active_element.send_keys(ESCAPE)
        browser.gone("dialog[open]")
    assert broken == []
    require_axe()


def test_names_of_others_are_words_and_never_markup(browser: Browser, gateway: Operated) -> None:
    calls(gateway)
    for page in PAGES:
        go(browser, page)
        assert browser.driver.find_elements("css selector", "img, script:not([src]), iframe") == []
        assert "run" not in browser.driver.title
