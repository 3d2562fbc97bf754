"""A Hearth with a team, and a browser that is signed in to its console. What breaks the page's policy fails a test."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.end_to_end.conftest import EMBER, Hearth
from tests.support import browser as browsers
from tests.support.browser import DESKTOP, Browser, browsing
from tests.support.usage_history import leave_usage

HOSTILE = "<img src=x onerror=\"document.title='run'\">"
TAGS = ("", "chat", "search\nbeta")
FAULTS = ("Content Security Policy", "TrustedHTML", "TrustedScript", "Uncaught", "violates", "The console failed")


@dataclass
class Team:
    """An account with 30 days of usage. `token` may do all that a team can; `tokens` are texts by what they may."""

    account_id: str
    name: str
    token: str
    calls: int
    hearth: Hearth
    tokens: dict[str, str] = field(default_factory=dict)

    def mint(self, name: str, permissions: str, *words: str) -> tuple[str, str]:
        """The id and the text of a new token."""
        command = ("tokens", "mint", self.account_id, "--name", name, "--permissions", permissions, *words, "--json")
        made = json.loads(self.hearth.command(*command))
        return made["token_id"], made["token"]


@pytest.fixture(scope="session")
def team(hearth: Hearth) -> Team:
    """A team whose name, and one of whose tokens, is markup."""
    account_id, caller = hearth.account(HOSTILE, "--requests-per-minute", "600", "--neurons-per-day", "50000")
    team = Team(account_id, HOSTILE, "", 0, hearth, {"inference": caller})
    ids = [team.mint(name, "inference")[0] for name in (HOSTILE + "token", "nightly")]
    _, team.token = team.mint("everything", "inference,usage:read,account:admin")
    _, team.tokens["usage:read"] = team.mint("reader", "usage:read")
    store = f"sqlite:{hearth.folder / '.hearth' / 'hearth.db'}"
    models = [EMBER, "@cf/acme/notes", f"@cf/{HOSTILE}"]
    history = leave_usage(store, account_id, days=30, tokens=ids, models=models, tags=(*TAGS, HOSTILE))
    team.calls = asyncio.run(history)
    return team


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not browsers.ready():
        pytest.skip(browsers.MISSING)
    with browsing(tmp_path_factory.mktemp("browser")) as window:
        yield window


@dataclass
class Console:
    """The console in the browser, and where it is."""

    browser: Browser
    team: Team

    @property
    def url(self) -> str:
        return f"{self.team.hearth.base_url}/console/"

    def sign_in(self, token: str | None = None, page: str = "", *, stay: bool = False) -> Browser:
        """Opens the console anew and signs in; with `page`, the path of one, waits until it is there."""
        self.leave()
        self.browser.open(self.url)
        self.browser.type("Token", self.team.token if token is None else token)
        if stay:
            self.browser.field("Stay signed in until this tab is closed").click()
        self.browser.click("button[type=submit]", "Sign in")
        if page:
            self.browser.find("nav a")
            self.go(page)
        return self.browser

    def go(self, page: str) -> Browser:
        self.browser.driver.execute_script(f"location.hash = '#/{page}'")
        self.browser.find(f"nav a[href='#/{page}'][aria-current]") if self.browser.wide else None
        return self.browser

    def leave(self) -> None:
        """Forgets what an earlier test left in the tab."""
        if self.browser.driver.current_url.startswith("http"):
            self.browser.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.browser.open("about:blank")


@pytest.fixture
def console(chromium: Browser, team: Team) -> Iterator[Console]:
    chromium.resize(DESKTOP)
    chromium.prefer("light")
    console = Console(chromium, team)
    chromium.forget()
    yield console
    faults = [error for error in chromium.errors if any(word in error for word in FAULTS)]
    console.leave()
    assert faults == []


@pytest.fixture
def downloads(chromium: Browser, tmp_path: Path) -> Path:
    """Where files go that a page lets its reader save."""
    options = {"behavior": "allow", "downloadPath": str(tmp_path)}
    chromium.driver.execute_cdp_cmd("Browser.setDownloadBehavior", options)
    return tmp_path
