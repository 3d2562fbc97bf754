"""The console in a real browser: how long a page takes from its address to its plot, and how much script there is.

    python -m benchmarks.gateway.console [--repeats 7]

The gateway is a process of its own, as is the browser; both share this machine's cores. The browser's cache is off, and
the tab goes on with a session, so a page's time has the page, all scripts, who is signed in, its data and its drawing.
"""

import argparse
import asyncio
import gzip
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.gateway.overhead import MODEL, SECRET, gateway, ready, stub
from benchmarks.record import record
from gateway.console.routes import STATIC
from tenants.auth.accounts import AccountService
from tenants.open import open_store
from tenants.records.grants import Grant, Permission
from tests.support.browser import DESKTOP, MISSING, Browser, browsing
from tests.support.browser import ready as browser_ready
from tests.support.many_accounts import leave_accounts
from tests.support.usage_history import leave_usage

OPEN_S: Final = 1.0
SCRIPT_KB: Final = 300.0
DAYS: Final = 30
ACCOUNTS: Final = 10_000
USERS: Final = 200
MODELS: Final = (MODEL, *(f"@cf/bench/model-{n}" for n in range(5)))
TOKENS: Final = 8
TAGS: Final = ("", "chat", "search\nbeta", "nightly")
# Notes when what is waited for is there and painted: asking from outside would add the driver's own time.
WATCH: Final = """
    window.shownMs = null;
    new MutationObserver((_, observer) => {
        if (!document.querySelector(%r)) return;
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(() => { window.shownMs = performance.now(); }));
    }).observe(document, { childList: true, subtree: true });
"""


async def make_team(folder: Path) -> str:
    """The text of an administrator's token whose account has used several models with several tokens for 30 days."""
    url = f"sqlite:{folder / 'hearth.db'}"
    store = open_store(url)
    accounts = AccountService(store, SECRET)
    account = await accounts.create("team")
    ids = [(await accounts.mint(account.id, f"program {n}"))[0].id for n in range(TOKENS)]
    everything = Grant((Permission.INFERENCE, Permission.ACCOUNT_ADMIN))
    _, text = await accounts.mint(account.id, "administrator", grant=everything)
    await store.close()
    await leave_usage(url, account.id, days=DAYS, tokens=ids, models=MODELS, tags=TAGS)
    return text


async def make_operator(folder: Path) -> str:
    """The text of an operator's token among ten thousand accounts, of which a page's have used a model for 30 days."""
    store = open_store(f"sqlite:{folder / 'hearth.db'}")
    await leave_accounts(store, ACCOUNTS, USERS, DAYS)
    accounts = AccountService(store, SECRET)
    account = await accounts.create("landlord")
    _, text = await accounts.mint(account.id, "operator", grant=Grant((Permission.OPERATOR,)))
    await store.close()
    return text


@contextmanager
def signed_in(folder: Path, port: int, token: str) -> Iterator[Browser]:
    """A browser without a cache whose tab has a session."""
    with browsing(folder) as browser:
        browser.resize(DESKTOP)
        browser.driver.execute_cdp_cmd("Network.enable", {})
        browser.driver.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
        browser.open(f"http://127.0.0.1:{port}/console/")
        browser.type("Token", token)
        browser.field("Stay signed in until this tab is closed").click()
        browser.click("button[type=submit]", "Sign in")
        browser.find("nav a")
        yield browser


def open_s(browser: Browser, port: int, page: str, selector: str) -> float:
    """Seconds from the address of a page of the console until `selector` is painted."""
    browser.open("about:blank")
    script = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH % selector})
    browser.open(f"http://127.0.0.1:{port}/console/#/{page}")
    shown_ms = browser.driver.execute_async_script(
        "const end = arguments[0]; const look = () => shownMs === null ? setTimeout(look, 5) : end(shownMs); look();"
    )
    browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    return float(shown_ms) / 1e3


def measure_opening(repeats: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        token = asyncio.run(make_team(folder))
        with stub(folder), gateway(folder) as (_, port):
            ready(int(port))
            with signed_in(folder, int(port), token) as browser:
                for page, selector in (("usage", ".plot-area rect"), ("tokens", "tbody tr + tr")):
                    times = [open_s(browser, int(port), page, selector) for _ in range(repeats)]
                    shape = f"first-console-open: {page}, {DAYS} days, {len(MODELS)} models, {TOKENS} tokens"
                    record("first_hour", shape, round(statistics.median(times), 3), "s", bound=OPEN_S)


def measure_operators_opening(repeats: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        token = asyncio.run(make_operator(folder))
        with stub(folder), gateway(folder) as (_, port):
            ready(int(port))
            with signed_in(folder, int(port), token) as browser:
                for page, selector, what in (
                    ("all-usage", ".plot-area rect", f"{USERS} accounts, {DAYS} days"),
                    ("accounts", "tbody tr + tr", f"of {ACCOUNTS:,}"),
                ):
                    times = [open_s(browser, int(port), page, selector) for _ in range(repeats)]
                    shape = f"first-console-open: {page}, {what}"
                    record("first_hour", shape, round(statistics.median(times), 3), "s", bound=OPEN_S)


def measure_script() -> None:
    scripts = [path.read_bytes() for path in STATIC.rglob("*.js")]
    sent = sum(len(gzip.compress(script, 9)) for script in scripts)
    record("first_hour", "first-console-script", round(sum(map(len, scripts)) / 1e3, 1), "kB", bound=SCRIPT_KB)
    record("first_hour", "first-console-script, as sent", round(sent / 1e3, 1), "kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="openings of each page, whose median counts")
    options = parser.parse_args()
    measure_script()
    if browser_ready():
        measure_opening(options.repeats)
        measure_operators_opening(options.repeats)
    else:
        print(f"pages are not opened: {MISSING}")
