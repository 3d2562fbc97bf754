"""The console's files over HTTP: what a browser may do with them, and how often it asks for them."""

import gzip
import re
from pathlib import Path

import pytest

from gateway.console.routes import PAGE, STATIC, console_files
from tests.support.served_gateway import Answer, Served, looped, served


async def get(gateway: Served, path: str, method: str = "GET", **headers: str) -> Answer:
    return await gateway.call(path, b"", method, authorization="", **headers)


def named(page: bytes) -> list[str]:
    """The files that the page names."""
    return [name.decode() for name in re.findall(rb'(?:href|src)="([^"]+)"', page)]


@looped
async def test_the_page_and_all_that_it_names_are_served_without_a_token(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        page = await get(gateway, "/console/")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        names = named(page.content)
        assert any(name.endswith("main.js") for name in names)
        for name in names:
            answer = await get(gateway, f"/console/{name}")
            assert answer.status == 200, name
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"


@looped
async def test_every_answer_has_a_policy_that_lets_nothing_in(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        page = await get(gateway, "/console/")
        for answer in (page, await get(gateway, f"/console/{named(page.content)[0]}")):
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert "http" not in policy
            for rule in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "trusted-types 'none'"):
                assert rule in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "set-cookie" not in answer.headers


@looped
async def test_what_a_browser_has_is_not_sent_again(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        page = await get(gateway, "/console/")
        assert page.headers["cache-control"] == "no-cache"
        client = await gateway.client()
        await client.send("GET", "/console/", b"", {"if-none-match": page.headers["etag"]})
        assert await client.head() == 304
        assert "content-length" not in client.headers
        client.leave()
        assert (await get(gateway, "/console/", if_none_match='"other"')).status == 200


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip, deflate, br", True),
        ("br;q=1, gzip;q=0.5", True),
        ("*", True),
        ("br", False),
        ("gzip;q=0", False),
        ("", False),
    ],
)
def test_files_are_compressed_for_those_who_take_that(tmp_path: Path, accepted: str, packed: bool) -> None:
    async def compare() -> None:
        async with served(tmp_path) as gateway:
            plain, answer = await get(gateway, "/console/"), await get(gateway, "/console/", accept_encoding=accepted)
            assert (answer.headers.get("content-encoding") == "gzip") is packed
            assert answer.headers["vary"] == "Accept-Encoding"
            assert (gzip.decompress(answer.content) if packed else answer.content) == plain.content

    looped(compare)()


@looped
async def test_a_browser_is_led_from_the_root_and_others_see_what_they_saw(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        html = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        for path in ("/", "/console"):
            led = await get(gateway, path, **html)
            assert (led.status, led.headers["location"]) == (302, "/console/")
        for method, headers in (("GET", {}), ("GET", {"accept": "*/*"}), ("POST", html)):
            answer = await get(gateway, "/", method, **headers)
            assert (answer.status, answer.code) == (404, 7000)


@looped
async def test_what_is_no_file_of_the_console_is_no_path(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        page = await get(gateway, "/console/")
        digest = named(page.content)[0].partition("/")[0]
        for path in ("index.html", "main.js", f"{digest}/../routes.py", f"{digest}/..%2f..%2froutes.py", "0/main.js"):
            assert (await get(gateway, f"/console/{path}")).status == 404, path
        assert (await get(gateway, "/console/", "POST")).status == 405
        head = await gateway.client()
        await head.send("HEAD", "/console/", b"")
        assert await head.head() == 200
        head.leave()


def test_a_change_of_any_file_renames_all_of_them(tmp_path: Path) -> None:
    (tmp_path / PAGE).write_text('<script src="{{digest}}/main.js">')
    (tmp_path / "main.js").write_text("1")
    before = console_files(tmp_path)
    (tmp_path / "main.js").write_text("2")
    after = console_files(tmp_path)
    assert before.keys() & after.keys() == {""}
    assert before[""].content != after[""].content


def test_scripts_are_small_and_no_file_names_another_host() -> None:
    scripts = [path.read_bytes() for path in STATIC.rglob("*.js")]
    assert sum(len(script) for script in scripts) <= 300_000
    for path in STATIC.rglob("*.*"):
        hosts = set(re.findall(r"https?://[\w.-]+", path.read_text())) - {"http://www.w3.org"}
        assert hosts == set(), path


def test_scripts_take_no_markup_and_no_style_from_text() -> None:
    for path in STATIC.rglob("*.js"):
        forbidden = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text()
        )
        assert forbidden == [], path


def test_the_page_asks_early_for_all_that_every_page_needs() -> None:
    page = (STATIC / PAGE).read_text()
    needed, waiting = set[Path](), [STATIC / "main.js"]
    while waiting:
        path = waiting.pop()
        if path in needed:
            continue
        needed.add(path)
        imports = re.findall(r"^(?:import|export) .* from '([^']+)'", path.read_text(), re.MULTILINE)
        waiting += [(path.parent / name).resolve() for name in imports]
    assert {path.relative_to(STATIC).as_posix() for path in needed} == {
        name.removeprefix("{{digest}}/") for name in named(page.encode()) if name.endswith(".js")
    }
