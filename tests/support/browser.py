"""A headless Chromium that Selenium drives, from `make .venv/.browser`; its console, its page's violations and shots.

It knows no page of the product.
"""

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

# Keys as WebDriver names them (its specification, 17.4.2), so that tests are collected where selenium is not.
TAB: Final = "\ue004"
ENTER: Final = "\ue007"
ESCAPE: Final = "\ue00c"
END: Final = "\ue010"

UNPACKED: Final = Path(sys.prefix) / "browser"
MISSING: Final = "there is no browser: `make .venv/.browser` brings one"
AXE: Final = Path(sys.prefix) / "node" / "node_modules" / "axe-core" / "axe.min.js"
AXE_MISSING: Final = (
    "axe-core is not installed, and nothing else was wrong: `make .venv/.conformance` brings it from npm"
)
DESKTOP: Final = (1280, 900)
PHONE: Final = (390, 844)
SHOTS: Final = "HEARTH_SCREENSHOTS"  # names the folder in which screenshots are kept, by default this one
SHOTS_FOLDER: Final = Path(__file__).parents[2] / ".screenshots"


def program(name: str) -> Path | None:
    """The path of Chromium's own program or its driver, unpacked beside the virtual environment or installed."""
    places = {"chromedriver": "usr/bin/chromedriver", "chromium": "usr/lib/chromium/chromium-headless-shell"}
    unpacked = UNPACKED / places[name]
    installed = shutil.which("chromium-headless-shell" if name == "chromium" else name) or shutil.which(name)
    return unpacked if unpacked.exists() else Path(installed) if installed else None


def ready() -> bool:
    programs = program("chromedriver"), program("chromium")
    return importlib.util.find_spec("selenium") is not None and None not in programs


class Browser:
    """One window. `driver` is Selenium's own."""

    def __init__(self, driver: "Chrome", folder: Path) -> None:
        self.driver = driver
        self._folder = folder

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str, text: str = "") -> "WebElement":
        """The first element that is seen and has the text, once there is one."""
        return wait_for(lambda: self._found(selector, text), what=f"{selector} {text!r} in {self.body}")  # type: ignore[no-any-return]

    def gone(self, selector: str, text: str = "") -> None:
        """Waits until there is none."""
        wait_for(lambda: self._found(selector, text) is None, what=f"no {selector} {text!r}")

    def click(self, selector: str, text: str = "") -> None:
        """Clicks what `find` finds; once more where the page has drawn it anew in between."""
        from selenium.common.exceptions import StaleElementReferenceException

        try:
            self.find(selector, text).click()
        except StaleElementReferenceException:
            self.find(selector, text).click()

    def type(self, label: str, text: str) -> "WebElement":
        """Writes into the field of this label, in place of what it had."""
        element = self.field(label)
        element.clear()
        element.send_keys(text)
        return element

    def field(self, label: str) -> "WebElement":
        """The control of a label."""
        script = """
            const labels = [...document.querySelectorAll('label')].filter((each) => each.checkVisibility());
            const place = document.querySelector('dialog[open]') ?? document;
            const named = labels.filter((each) => place.contains(each)
                && each.firstChild?.textContent.trim() === arguments[0]);
            return named.map((each) => document.getElementById(each.htmlFor))[0] ?? null;
        """
        return wait_for(lambda: self.driver.execute_script(script, label), what=f"a field {label!r}")  # type: ignore[no-any-return]

    def choose(self, label: str, option: str) -> None:
        """Chooses the option of this text."""
        from selenium.webdriver.support.select import Select

        Select(self.field(label)).select_by_visible_text(option)

    @property
    def body(self) -> str:
        """All text that is seen."""
        return str(self.driver.execute_script("return document.body ? document.body.innerText : ''"))

    @property
    def errors(self) -> list[str]:
        """What the page wrote to the browser's console as an error, violations of its policy among it."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[dict[str, Any]]:
        """What the page asked for since the last time: address, method, headers, body."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def forget(self) -> None:
        """Forgets errors and requests until now."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")

    @property
    def wide(self) -> bool:
        """Whether the page is as wide as a desk's."""
        return bool(self.driver.execute_script("return innerWidth > 800"))

    def resize(self, size: tuple[int, int]) -> None:
        """Makes the page's own area so large, as a phone's or a desk's."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Lets the system prefer light or dark; nothing moves."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def axe(self) -> list[str]:
        """What axe finds against WCAG 2.2 AA and good practice: the rule, and what breaks it. Nothing where it is not
        installed: a test says so at its end by `require_axe`.

        The driver evaluates it beside the page, whose policy lets no such script in.
        """
        if not AXE.exists():
            return []
        self.driver.execute_script(AXE.read_text())
        result = self.driver.execute_async_script("axe.run(document).then(arguments[0])")
        return [
            f"{rule['id']}: {node['target']} {node['failureSummary']}"
            for rule in result["violations"]
            for node in rule["nodes"]
        ]

    def shot(self, name: str) -> Path:
        """Keeps a picture of the whole page; where it is."""
        height = self.driver.execute_script("return document.documentElement.scrollHeight")
        width = self.driver.execute_script("return document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 4000), "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path = self._folder / f"{name}.png"
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _found(self, selector: str, text: str) -> "WebElement | None":
        script = """
            const found = [...document.querySelectorAll(arguments[0])];
            return found.find((each) => each.checkVisibility() && each.textContent.includes(arguments[1])) ?? null;
        """
        return self.driver.execute_script(script, selector, text)  # type: ignore[no-any-return]


def require_axe() -> None:
    """Skips the rest of a test where axe is not installed."""
    if not AXE.exists():
        pytest.skip(AXE_MISSING)


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A window of its own; its profile is in `folder`, its pictures are where SHOTS says."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(_started(folder))
    profile = folder / "profile"
    for argument in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *(f"--window-size={DESKTOP[0]},{DESKTOP[1]}", f"--user-data-dir={profile}", "--no-proxy-server"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(str(program("chromedriver")), env=_environment(folder))
    driver = Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    shots = Path(os.environ.get(SHOTS, SHOTS_FOLDER))
    shots.mkdir(parents=True, exist_ok=True)
    try:
        yield Browser(driver, shots)
    finally:
        driver.quit()


def _started(folder: Path) -> Path:
    """A program that starts Chromium with a page: without a screen it opens none by itself, and the driver waits for
    one."""
    script = folder / "chromium"
    script.write_text(f'#!/bin/sh\nexec "{program("chromium")}" "$@" about:blank\n')
    script.chmod(0o755)
    return script


def _environment(folder: Path) -> dict[str, str]:
    """With the unpacked libraries and fonts before those of the system."""
    if not UNPACKED.is_dir():
        return dict(os.environ)
    fonts = folder / "fonts.conf"
    fonts.write_text(
        f"<fontconfig><dir>{UNPACKED}/usr/share/fonts</dir><dir>/usr/share/fonts</dir>"
        f"<cachedir>{folder}/fonts</cachedir>"
        "<alias binding='same'><family>system-ui</family><prefer><family>Liberation Sans</family></prefer></alias>"
        "<alias binding='same'><family>sans</family><prefer><family>Liberation Sans</family></prefer></alias>"
        "</fontconfig>"
    )
    libraries = [str(each) for pattern in ("*", "*/pulseaudio") for each in (UNPACKED / "usr/lib").glob(pattern)]
    path = os.pathsep.join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {**os.environ, "LD_LIBRARY_PATH": path, "FONTCONFIG_FILE": str(fonts), "SE_AVOID_STATS": "true"}
